// What is behind a Comm (weft/comm.h): its group, and what all Comms of one rank share.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "base/executor.h"
#include "base/mutex.h"
#include "weft/clock.h"
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

// How long at least one operation of a rank was under way that sends or receives. Any thread.
class CommunicationClock {
 public:
  void begin(Time now) {
    const Lock lock(mutex_);
    if (operations_++ == 0) since_ = now;
  }
  void end(Time now) {
    const Lock lock(mutex_);
    if (--operations_ == 0) before_ += now - since_;
  }
  Time until(Time now) {
    const Lock lock(mutex_);
    return operations_ == 0 ? before_ : before_ + std::max(now - since_, Time{0});
  }

 private:
  Mutex mutex_;
  int operations_ WEFT_GUARDED_BY(mutex_) = 0;
  Time since_ WEFT_GUARDED_BY(mutex_){};   // of those that are under way, the first began
  Time before_ WEFT_GUARDED_BY(mutex_){};  // while others were
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

  CommunicationClock& communication() { return communication_; }

  // In virtual time every byte stands for so many, but for those of operations that are whole. Before the
  // figures are set.
  double byte_scale() const { return byte_scale_; }
  void set_byte_scale(double scale) { byte_scale_ = scale; }
  // Figures of a byte that stands for byte_scale() ones; `whole`: of one that stands for itself.
  // Largest message that gradient traffic may send in one piece; equal on all ranks.
  std::size_t micro_op_bytes(bool whole = false) const { return (whole ? whole_ : scaled_).micro_op_bytes; }
  void set_micro_op_bytes(std::size_t bytes) {
    scaled_.micro_op_bytes = bytes;
    whole_.micro_op_bytes = static_cast<std::size_t>(static_cast<double>(bytes) * byte_scale_);
  }
  const LinkCost& cost(bool whole = false) const { return (whole ? whole_ : scaled_).cost; }
  void set_cost(const LinkCost& cost) {
    scaled_.cost = whole_.cost = cost;
    whole_.cost.seconds_per_byte /= byte_scale_;
    whole_.cost.fold_seconds_per_byte /= byte_scale_;
    whole_.cost.scale_up_seconds_per_byte /= byte_scale_;
  }
  const KernelCosts& kernels(bool whole = false) const { return (whole ? whole_ : scaled_).kernels; }
  void set_kernels(const KernelCosts& kernels) {
    scaled_.kernels = kernels;
    whole_.kernels = byte_scale_ == 1 ? kernels : scaled(kernels, 1 / byte_scale_);
  }
  // Operations of the group under these slots are whole: each of their bytes stands for itself. Before the first of
  // them. (In virtual time, on its one thread; elsewhere every byte does.)
  void add_whole_slots(std::uint64_t group, std::uint32_t first, std::uint32_t count) {
    if (byte_scale_ != 1) whole_slots_.push_back({group, first, count});
  }
  bool is_whole(std::uint64_t group, std::uint32_t slot) const {
    return std::ranges::any_of(whole_slots_,
                               [=](const Slots& s) { return group == s.group && slot - s.first < s.count; });
  }
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
  CommunicationClock communication_;
  double byte_scale_ = 1;
  struct Slots {
    std::uint64_t group = 0;
    std::uint32_t first = 0, count = 0;
  };
  std::vector<Slots> whole_slots_;
  struct Figures {
    std::size_t micro_op_bytes = std::size_t{1} << 20;
    LinkCost cost;
    KernelCosts kernels;
  };
  Figures scaled_, whole_;
  SimWorkers* sim_workers_ = nullptr;
  std::shared_ptr<Comm::Group> world_;
  Mutex mutex_;
  std::map<std::uint64_t, std::shared_ptr<Comm::Group>> groups_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft
