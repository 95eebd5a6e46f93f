// Comm: a group of ranks, as an algorithm sees it. A small value; copy it freely.
//
// A Comm that was given to an operation (by Engine::submit) sends and receives with that operation's
// identity; the Comm that a program holds only names the group. Ranks are those of the group, 0 .. size()-1.
//
//   Task<void> exchange(Comm comm, std::span<const std::byte> mine, std::span<std::byte> theirs) {
//     Transfer received = comm.recv(comm.before(1), 0, theirs);   // posted now
//     Transfer sent = comm.send(comm.after(1), 0, mine);          // posted now
//     co_await received;
//     co_await sent;  // may wait for its receiver: never before the own receive is posted
//   }
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "weft/arena.h"
#include "weft/dtype.h"
#include "weft/function_ref.h"
#include "weft/kernel_costs.h"
#include "weft/task.h"
#include "weft/transport.h"

namespace weft {

class SimWorkers;

// Cost of a hop, measured or given, the same on all ranks (rank 0's values): what algorithm choice and
// micro-ops go by.
struct LinkCost {
  double hop_seconds = 20e-6;           // latency of a small message, overheads included
  double seconds_per_byte = 1.0 / 2e9;  // of one port
  double fold_seconds_per_byte = 1.0 / 4e9;
};

// A posted send or receive. Move-only. Destroying one that is not done cancels it.
class Transfer {
 public:
  Transfer() = default;
  explicit Transfer(TransferRecord* record, Arena* arena, std::size_t bytes)
      : record_(record), arena_(arena), record_bytes_(bytes) {}
  Transfer(Transfer&& other) noexcept
      : record_(std::exchange(other.record_, nullptr)),
        arena_(other.arena_),
        record_bytes_(other.record_bytes_) {}
  Transfer& operator=(Transfer&& other) noexcept {
    std::swap(record_, other.record_);
    std::swap(arena_, other.arena_);
    std::swap(record_bytes_, other.record_bytes_);
    return *this;
  }
  ~Transfer();

  bool done() const { return record_ == nullptr || record_->done; }
  // What a receive without a buffer got. REQUIRES: done, made by Comm::recv_any.
  Buffer take();

  bool await_ready() const noexcept { return done(); }
  void await_suspend(std::coroutine_handle<> waiter) noexcept { record_->waiter = waiter; }
  void await_resume() const {
    if (record_ != nullptr && record_->error) std::rethrow_exception(record_->error);
  }

 private:
  TransferRecord* record_ = nullptr;
  Arena* arena_ = nullptr;
  std::size_t record_bytes_ = 0;
};

// A group as one rank holds it.
struct Group {
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

  std::shared_ptr<Group> world() const { return world_; }
  // The group of these world ranks (this rank among them). The same id gives the same object, so that the
  // numbers of unnamed operations go on.
  std::shared_ptr<Group> group(std::uint64_t id, std::vector<int> members);

 private:
  Transport& transport_;
  Executor& executor_;
  WorkerPool* pool_;
  std::size_t micro_op_bytes_ = std::size_t{1} << 20;
  LinkCost cost_;
  KernelCosts kernels_;
  SimWorkers* sim_workers_ = nullptr;
  std::shared_ptr<Group> world_;
  std::mutex mutex_;
  std::map<std::uint64_t, std::shared_ptr<Group>> groups_;
};

// Waits for a point in time on the operation's clock.
class Sleep final : public Wait {
 public:
  Sleep(Operation& op, Time until);
  bool abandon() noexcept override { return true; }
  bool is_progress() const override { return false; }
  bool await_ready() const noexcept { return done; }
  void await_suspend(std::coroutine_handle<> h) noexcept { waiter = h; }
  void await_resume() const {
    if (error) std::rethrow_exception(error);
  }

 private:
  struct Alarm : Timer {
    Alarm(Sleep& s, Fire fire) : Timer(fire), sleep(s) {}
    Sleep& sleep;
  };
  Alarm alarm_;
};

// Runs `work` on the worker pool (inline where there is none) and goes on when it has ended. In virtual time
// it runs inline and takes a worker for the seconds that it returns, which are then the operation's
// computed_seconds.
class Compute final : public Wait {
 public:
  Compute(Operation& op, SimWorkers* workers, FunctionRef<double()> work);
  bool abandon() noexcept override { return alarm_.armed(); }
  bool await_ready() noexcept;
  void await_suspend(std::coroutine_handle<> h) noexcept;
  void await_resume() const;

 private:
  struct Done : Remote {
    Compute* compute = nullptr;
  };
  struct Alarm : Timer {
    Alarm(Compute& c, Fire fire) : Timer(fire), compute(c) {}
    Compute& compute;
  };
  void work() noexcept;

  SimWorkers* workers_;
  FunctionRef<double()> work_;
  double simulated_seconds_ = 0;
  double computed_seconds_ = 0;
  Done remote_;
  Alarm alarm_;
  std::exception_ptr thrown_;
};

class Comm {
 public:
  Comm() = default;
  Comm(Endpoint& endpoint, std::shared_ptr<Group> group, Operation* operation = nullptr,
       std::uint32_t hop_base = 0)
      : endpoint_(&endpoint), group_(std::move(group)), operation_(operation), hop_base_(hop_base) {}

  int rank() const { return group_->rank; }
  int size() const { return static_cast<int>(group_->members.size()); }
  int after(int gap) const { return static_cast<int>((static_cast<std::int64_t>(rank()) + gap) % size()); }
  int before(int gap) const {
    return static_cast<int>((static_cast<std::int64_t>(rank()) - gap % size() + size()) % size());
  }
  int world_rank(int group_rank) const { return group_->members[static_cast<std::size_t>(group_rank)]; }

  // Posts at once; hop is the round of the algorithm. REQUIRES: an operation's Comm; peer in the group;
  // memory as in weft/transport.h.
  Transfer send(int peer, std::uint32_t hop, std::span<const std::byte> payload,
                DType dtype = DType::bytes) const;
  Transfer send(int peer, std::uint32_t hop, std::span<std::byte> payload) const {
    return send(peer, hop, std::span<const std::byte>(payload));
  }
  Transfer send(int peer, std::uint32_t hop, const Dense& data) const {
    return send(peer, hop, data.bytes(), data.dtype);
  }
  Transfer recv(int peer, std::uint32_t hop, std::span<std::byte> into, DType dtype = DType::bytes) const;
  Transfer recv(int peer, std::uint32_t hop, const Dense& into) const {
    return recv(peer, hop, into.bytes(), into.dtype);
  }
  // into = into (reduction) arrived, element by element, the local value on the left.
  Transfer recv_fold(int peer, std::uint32_t hop, const Dense& into, Reduction reduction) const;
  // Hands the bytes to `consume` (a named callable), at most `limit` of them. As in recv_any, they were sent
  // as bytes. What `consume` does takes so many seconds a byte in virtual time.
  Transfer recv_with(int peer, std::uint32_t hop, std::size_t limit,
                     FunctionRef<void(std::span<const std::byte>)> consume,
                     double seconds_per_byte = 0) const;
  // Any length up to `limit`; Transfer::take() has the bytes.
  Transfer recv_any(int peer, std::uint32_t hop, std::size_t limit) const;

  Sleep sleep_until(Time until) const;
  // For what takes longer than about 200 us. `work` (a named callable) returns how many seconds that is in
  // virtual time, from kernels() and the sizes that it has met; or nothing: none.
  template <class Work>
  Compute compute(Work& work) const {
    if constexpr (std::is_void_v<std::invoke_result_t<Work&>>) {
      void* const target = const_cast<void*>(static_cast<const void*>(std::addressof(work)));
      return compute_priced(FunctionRef<double()>(target, [](void* named) {
        (*static_cast<Work*>(named))();
        return 0.0;
      }));
    } else {
      return compute_priced(FunctionRef<double()>(work));
    }
  }
  // What was computed here and now, on the communication thread: its seconds pass in virtual time. On other
  // clocks they have passed, and this is done at once.
  Sleep charge(double seconds) const;

  // The same operation with its hops counted from `base` on: for an algorithm that is made of two.
  Comm hops_from(std::uint32_t base) const { return {*endpoint_, group_, operation_, hop_base_ + base}; }
  // These ranks of this group, in that order, as a group of their own; for use inside the same operation or
  // as a group for new operations. All its members call it with the same arguments, at any time and in any
  // order: nothing is sent. `label` tells apart groups of equal members. Any thread.
  Comm subgroup(const std::vector<int>& ranks, std::uint32_t label = 0) const;
  // This group bound to an operation.
  Comm bound(Operation& operation) const { return {*endpoint_, group_, &operation, 0}; }
  // Number of the next operation without a plan row; the same on all ranks because they call in the same
  // order.
  std::uint32_t next_unnamed_slot() const {
    return kUnnamed | (group_->next_unnamed.fetch_add(1) & ~kUnnamed);
  }

  Buffer buffer(std::size_t bytes) const { return {arena(), bytes}; }
  Arena& arena() const { return endpoint_->executor().arena(); }
  Time now() const { return endpoint_->executor().now(); }
  std::size_t micro_op_bytes() const { return endpoint_->micro_op_bytes(); }
  const LinkCost& cost() const { return endpoint_->cost(); }
  const KernelCosts& kernels() const { return endpoint_->kernels(); }
  std::uint64_t group_id() const { return group_->id; }
  Endpoint& endpoint() const { return *endpoint_; }
  Operation& operation() const { return *operation_; }
  bool valid() const { return endpoint_ != nullptr; }
  bool is_bound() const { return operation_ != nullptr; }
  // Declares what this operation is; a peer that declares something else gets a mismatch error instead of
  // wrong data.
  void declare(std::uint32_t fingerprint) const {
    operation_->fingerprint = fingerprint;
    if (operation_->opening == 0) operation_->opening = fingerprint;
  }

 private:
  Identity identity(std::uint32_t hop) const {
    return {group_->id, operation_->slot, operation_->step, hop_base_ + hop};
  }
  void check_bound() const;
  void check(int peer) const;
  Compute compute_priced(FunctionRef<double()> work) const;

  Endpoint* endpoint_ = nullptr;
  std::shared_ptr<Group> group_;
  Operation* operation_ = nullptr;
  std::uint32_t hop_base_ = 0;
};

}  // namespace weft
