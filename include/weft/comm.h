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

#include <coroutine>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "weft/arena.h"
#include "weft/clock.h"
#include "weft/dtype.h"
#include "weft/function_ref.h"
#include "weft/kernel_costs.h"
#include "weft/task.h"

namespace weft {

class Endpoint;  // what the Comms of one rank share
class Wait;

// Cost of a hop, measured or given, the same on all ranks (rank 0's values): what algorithm choice and
// micro-ops go by. A node is a run of `node_ranks` consecutive ranks of the world, which share its port to the
// others (scale-out) and have ports of their own inside it (scale-up).
struct LinkCost {
  double hop_seconds = 20e-6;           // latency of a small message, overheads included; between nodes
  double seconds_per_byte = 1.0 / 2e9;  // of one port; between nodes, of a node's
  double fold_seconds_per_byte = 1.0 / 4e9;
  int node_ranks = 1;  // every rank is a node: there is one level
  // Inside a node; 0: as between nodes.
  double scale_up_hop_seconds = 0;
  double scale_up_seconds_per_byte = 0;

  // Comm::node_size of `size` consecutive ranks, the first of which begins a node.
  int node_size(int size) const {
    if (size % node_ranks == 0) return node_ranks;
    return node_ranks % size == 0 ? size : 1;
  }
  // The figures of a hop inside a node, as those of a link with one level.
  LinkCost inside() const {
    LinkCost out = *this;
    if (scale_up_hop_seconds > 0) out.hop_seconds = scale_up_hop_seconds;
    if (scale_up_seconds_per_byte > 0) out.seconds_per_byte = scale_up_seconds_per_byte;
    return out;
  }
};

// What a coroutine awaits of its operation. Move-only.
class Pending {
 public:
  Pending() = default;
  Pending(Wait* record, Arena& arena, std::size_t record_bytes)
      : record_(record), arena_(&arena), record_bytes_(record_bytes) {}
  Pending(Pending&& other) noexcept
      : record_(std::exchange(other.record_, nullptr)),
        arena_(other.arena_),
        record_bytes_(other.record_bytes_) {}
  Pending& operator=(Pending&& other) noexcept {
    std::swap(record_, other.record_);
    std::swap(arena_, other.arena_);
    std::swap(record_bytes_, other.record_bytes_);
    return *this;
  }
  ~Pending();

  bool done() const;

  bool await_ready() const noexcept { return done(); }
  void await_suspend(std::coroutine_handle<> waiter) noexcept;
  void await_resume() const;

 protected:
  Wait* record_ = nullptr;  // in the arena; null: nothing to wait for

 private:
  Arena* arena_ = nullptr;
  std::size_t record_bytes_ = 0;
};

// A posted send or receive. Destroying one that is not done cancels it.
class Transfer : public Pending {
 public:
  using Pending::Pending;
  // What a receive without a buffer got. REQUIRES: done, made by Comm::recv_any.
  Buffer take();
};

// Waits for a point in time on the operation's clock.
class Sleep : public Pending {
 public:
  using Pending::Pending;
};

// Runs `work` on the worker pool (inline where there is none) and goes on when it has ended. In virtual time
// it runs inline and takes a worker for the seconds that it returns, which are then the operation's
// computed_seconds. Begins when it is awaited.
class Compute : public Pending {
 public:
  using Pending::Pending;
  bool await_ready() noexcept;
  void await_suspend(std::coroutine_handle<> waiter) noexcept;
};

class Comm {
 public:
  struct Group;

  Comm() = default;
  explicit Comm(std::shared_ptr<Group> group, Operation* operation = nullptr, std::uint32_t hop_base = 0)
      : group_(std::move(group)), operation_(operation), hop_base_(hop_base) {}

  int rank() const;
  int size() const;
  int after(int gap) const { return static_cast<int>((static_cast<std::int64_t>(rank()) + gap) % size()); }
  int before(int gap) const {
    return static_cast<int>((static_cast<std::int64_t>(rank()) - gap % size() + size()) % size());
  }
  int world_rank(int group_rank) const;

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
  Comm hops_from(std::uint32_t base) const { return Comm(group_, operation_, hop_base_ + base); }
  // These ranks of this group, in that order, as a group of their own; for use inside the same operation or
  // as a group for new operations. All its members call it with the same arguments, at any time and in any
  // order: nothing is sent. `label` tells apart groups of equal members. Any thread.
  Comm subgroup(const std::vector<int>& ranks, std::uint32_t label = 0) const;
  // This group bound to an operation.
  Comm bound(Operation& operation) const { return Comm(group_, &operation); }
  // Number of the next operation without a plan row; the same on all ranks because they call in the same
  // order.
  std::uint32_t next_unnamed_slot() const;

  Buffer buffer(std::size_t bytes) const { return {arena(), bytes}; }
  Arena& arena() const;
  Time now() const;
  std::size_t micro_op_bytes() const;  // longest message of gradient traffic, where an algorithm may cut
  const LinkCost& cost() const;
  // Consecutive ranks of this group that share a node, where it is cut into such runs evenly; else 1. A group
  // inside one node has its size, one with a rank of each node 1. By cost().node_ranks, so equal on all ranks.
  int node_size() const;
  const KernelCosts& kernels() const;
  std::uint64_t bytes_sent() const;  // payload of this rank in this operation, so far
  std::uint64_t group_id() const;
  Endpoint& endpoint() const;
  Operation& operation() const { return *operation_; }
  bool valid() const { return group_ != nullptr; }
  bool is_bound() const { return operation_ != nullptr; }
  // Declares what this operation is; a peer that declares something else gets a mismatch error instead of
  // wrong data.
  void declare(std::uint32_t fingerprint) const;

 private:
  template <class Record>
  Record* record_to(int peer, std::uint32_t hop) const;
  void check_bound() const;
  void check(int peer) const;
  Compute compute_priced(FunctionRef<double()> work) const;

  std::shared_ptr<Group> group_;
  Operation* operation_ = nullptr;
  std::uint32_t hop_base_ = 0;
};

}  // namespace weft
