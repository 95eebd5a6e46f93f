// Threads for computations that would hold up the communication thread. One per process, made by its owner
// and passed in.
#pragma once

#include <deque>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "weft/function_ref.h"

namespace weft {

class WorkerPool {
 public:
  explicit WorkerPool(int threads);
  ~WorkerPool();  // runs what is queued, then joins
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // Any thread. `work` must not throw and is not touched after it was called; its target may end its own
  // life.
  void submit(FunctionRef<void()> work);
  int threads() const { return static_cast<int>(threads_.size()); }

 private:
  void run();
  Mutex mutex_;
  std::condition_variable changed_;
  std::deque<FunctionRef<void()>> queue_ WEFT_GUARDED_BY(mutex_);
  bool stop_ WEFT_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace weft
