#include "base/worker_pool.h"

namespace weft {

WorkerPool::WorkerPool(int threads) {
  threads_.reserve(static_cast<std::size_t>(threads));
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { run(); });
}

WorkerPool::~WorkerPool() {
  {
    const Lock lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void WorkerPool::submit(FunctionRef<void()> work) {
  {
    const Lock lock(mutex_);
    queue_.push_back(work);
  }
  changed_.notify_one();
}

void WorkerPool::run() {
  Lock lock(mutex_);
  for (;;) {
    while (!stop_ && queue_.empty()) lock.wait(changed_);
    if (queue_.empty()) return;
    const FunctionRef<void()> work = queue_.front();
    queue_.pop_front();
    lock.unlock();
    work();
    lock.lock();
  }
}

}  // namespace weft
