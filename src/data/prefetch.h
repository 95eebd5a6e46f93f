// Batches in order, read ahead by a thread: the current one, and the next one before it is needed (what it
// will look up is known one step early).
//
//   Prefetch batches(Batches(source, options), step);
//   for (;; batches.advance()) { batches.current(); batches.next(); }
//
// Thread: one caller. A reading error is rethrown by whoever asks for that batch.
#pragma once

#include <cstdint>
#include <exception>
#include <map>
#include <thread>

#include "base/mutex.h"
#include "data/batches.h"

namespace weft {

class Prefetch {
 public:
  Prefetch(Batches batches, std::int64_t first_step);
  ~Prefetch();
  Prefetch(const Prefetch&) = delete;
  Prefetch& operator=(const Prefetch&) = delete;

  const Batches& batches() const { return batches_; }
  std::int64_t step() const { return step_; }
  // Until advance(). They wait where the thread is behind.
  const TokenBatch& current() { return wait(step_); }
  const TokenBatch& next() { return wait(step_ + 1); }
  void advance();

 private:
  struct Slot {
    TokenBatch batch;
    std::exception_ptr error;
  };
  const TokenBatch& wait(std::int64_t step);
  void run();

  const Batches batches_;
  std::int64_t step_;

  Mutex mutex_;
  std::condition_variable changed_;
  std::map<std::int64_t, Slot> slots_ WEFT_GUARDED_BY(mutex_);  // by step: [wanted_, wanted_ + kAhead]
  std::int64_t wanted_ WEFT_GUARDED_BY(mutex_);
  bool stop_ WEFT_GUARDED_BY(mutex_) = false;

  std::thread thread_;  // last: it uses all the others
};

}  // namespace weft
