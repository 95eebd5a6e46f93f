// What the algorithms share: runs of elements cut into micro-ops, bags of blocks as runs, and posted
// transfers in a queue.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>

#include "patterns/blocks.h"
#include "weft/comm.h"
#include "weft/dtype.h"

namespace weft {

// How many receives an algorithm posts ahead of the one it awaits: one that is folded, one that arrives, and
// two that a sender may start meanwhile, so that a transport that grants each long message first is not idle
// for that round trip.
inline constexpr int kReceivesAhead = 4;

// A run of elements, cut into pieces of at most micro_op_bytes (at least one element each). An empty run is
// one empty piece: the schedule depends on the size alone, and ranks that disagree about a length find out.
class Pieces {
 public:
  Pieces() = default;
  Pieces(const Dense& run, std::size_t micro_op_bytes)
      : run_(run),
        length_(std::max<std::int64_t>(1, static_cast<std::int64_t>(micro_op_bytes / size_of(run.dtype)))) {}

  std::int64_t size() const { return std::max<std::int64_t>(1, (run_.count + length_ - 1) / length_); }
  Dense operator[](std::int64_t i) const {
    return run_.sub(i * length_, std::min(length_, run_.count - i * length_));
  }

 private:
  Dense run_;
  std::int64_t length_ = 1;
};

inline Dense block_of(const Dense& data, const Blocks& blocks, int block) {
  return data.sub(blocks.begin(block), blocks.count(block));
}

// Blocks first, first+1, ... (cyclically), `count` of them: one run of elements, or two where they wrap
// around. A rank that sends a bag and the rank that receives it cut it alike.
class Bag {
 public:
  Bag(const Dense& data, const Blocks& blocks, int first, int count) {
    first %= blocks.size();
    const int straight = std::min(count, blocks.size() - first);
    const std::int64_t begin = blocks.begin(first);
    runs_[0] = data.sub(begin, blocks.begin(first + straight) - begin);
    if (straight < count) runs_[num_runs_++] = data.sub(0, blocks.begin(count - straight));
  }
  const Dense* begin() const { return runs_; }
  const Dense* end() const { return runs_ + num_runs_; }

 private:
  Dense runs_[2];
  int num_runs_ = 1;
};

// Posted transfers, first in, first out, in memory of the arena:
//   while (!sends.empty()) co_await sends.next();
class TransferQueue {
 public:
  // Waits for the oldest transfer, and takes it out of the queue.
  class Next {
   public:
    explicit Next(TransferQueue& queue) : queue_(queue) {}
    bool await_ready() const noexcept { return queue_.oldest().done(); }
    void await_suspend(std::coroutine_handle<> waiter) const noexcept {
      queue_.oldest().await_suspend(waiter);
    }
    void await_resume() const {
      const Transfer transfer = std::move(queue_.oldest());
      queue_.release();
      transfer.await_resume();
    }

   private:
    TransferQueue& queue_;
  };

  explicit TransferQueue(const Comm& comm) : arena_(comm.arena()) {}
  TransferQueue(const TransferQueue&) = delete;
  TransferQueue& operator=(const TransferQueue&) = delete;
  ~TransferQueue() {
    while (!empty()) release();
    if (ring_ != nullptr) arena_.deallocate(ring_, capacity_ * sizeof(Transfer));
  }

  void add(Transfer transfer) {
    if (size() == capacity_) grow();
    new (place(added_)) Transfer(std::move(transfer));
    ++added_;
  }
  bool empty() const { return released_ == added_; }
  std::size_t size() const { return added_ - released_; }
  std::uint64_t added() const { return added_; }        // how many were put in so far
  std::uint64_t released() const { return released_; }  // how many were taken out so far
  Next next() { return Next(*this); }                   // REQUIRES: not empty

 private:
  Transfer& oldest() { return *place(released_); }
  void release() {
    std::destroy_at(place(released_));
    ++released_;
  }
  Transfer* place(std::uint64_t number) const { return ring_ + (number & (capacity_ - 1)); }
  void grow() {
    const std::size_t larger = capacity_ == 0 ? 16 : 2 * capacity_;
    auto* ring = static_cast<Transfer*>(arena_.allocate(larger * sizeof(Transfer)));
    for (std::uint64_t n = released_; n != added_; ++n) {
      new (ring + (n & (larger - 1))) Transfer(std::move(*place(n)));
      std::destroy_at(place(n));
    }
    if (ring_ != nullptr) arena_.deallocate(ring_, capacity_ * sizeof(Transfer));
    ring_ = ring;
    capacity_ = larger;
  }

  Arena& arena_;
  Transfer* ring_ = nullptr;
  std::size_t capacity_ = 0;  // a power of two
  std::uint64_t added_ = 0;
  std::uint64_t released_ = 0;
};

// Runs `work` (a named callable), which moves `bytes`: here if that is quick, else on the worker pool.
Task<void> run_local(Comm comm, std::size_t bytes, FunctionRef<void()> work);
// REQUIRES: equal lengths, no overlap.
Task<void> copy_bytes(Comm comm, std::span<const std::byte> from, std::span<std::byte> into);

// The bags of a hop go out and come in; what comes in is folded (or placed, without `fold`). Posts every
// receive, then every send, and ends when all are done.
struct BagExchange {
  int to = 0;
  int from = 0;
  std::uint32_t hop = 0;
  bool fold = false;
  Reduction reduction = Reduction::sum;
  std::size_t micro_op_bytes = 0;
};
Task<void> exchange_bags(Comm comm, BagExchange exchange, Bag outgoing, Bag incoming);

}  // namespace weft
