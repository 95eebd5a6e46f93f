// What is behind a Comm (weft/comm.h): its group, and what all Comms of one rank share.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "base/executor.h"
#include "base/mutex.h"
#include "weft/comm.h"
#include "weft/kernel_costs.h"
#include "weft/transport.h"

namespace weft {

class SimWorkers;
class WorkerPool;

// A group as one rank holds it.
struct Comm::Group {
  Endpoint* endpoint = nullptr;
  std::uint64_t id = 0;
  std::vector<int> members;  // world rank of each group rank
  int rank = 0;              // of this process in the group
  std::atomic<std::uint32_t> next_unnamed{0};
};

// What the Comms of one rank share: its transport, executor, memory and groups. Owned by the engine (or a
// test).
class Endpoint {
 public:
  Endpoint(Transport& transport, Executor& executor, WorkerPool* pool);
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  Transport& transport() const { return transport_; }
  Executor& executor() const { return executor_; }
  WorkerPool* pool() const { return pool_; }

  // Largest message that gradient traffic may send in one piece; equal on all ranks.
  std::size_t micro_op_bytes() const { return micro_op_bytes_; }
  void set_micro_op_bytes(std::size_t bytes) { micro_op_bytes_ = bytes; }
  const LinkCost& cost() const { return cost_; }
  void set_cost(const LinkCost& cost) { cost_ = cost; }
  const KernelCosts& kernels() const { return kernels_; }
  void set_kernels(const KernelCosts& kernels) { kernels_ = kernels; }
  // Who computes for this rank in virtual time; null: whoever computes is free at once.
  SimWorkers* sim_workers() const { return sim_workers_; }
  void set_sim_workers(SimWorkers* workers) { sim_workers_ = workers; }

  std::shared_ptr<Comm::Group> world() const { return world_; }
  // The group of these world ranks (this rank among them). The same id gives the same object, so that the
  // numbers of unnamed operations go on.
  std::shared_ptr<Comm::Group> group(std::uint64_t id, std::vector<int> members);

 private:
  Transport& transport_;
  Executor& executor_;
  WorkerPool* pool_;
  std::size_t micro_op_bytes_ = std::size_t{1} << 20;
  LinkCost cost_;
  KernelCosts kernels_;
  SimWorkers* sim_workers_ = nullptr;
  std::shared_ptr<Comm::Group> world_;
  Mutex mutex_;
  std::map<std::uint64_t, std::shared_ptr<Comm::Group>> groups_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft
