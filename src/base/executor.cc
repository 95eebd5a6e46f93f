#include "base/executor.h"

#include <thread>

#include "weft/task.h"

namespace weft {

void detail::PromiseBase::resume_later() noexcept { executor->ready(continuation); }

Timer::~Timer() {
  if (executor_ != nullptr) executor_->disarm(*this);
}

// What was posted may be the last thing that its owner waited for: the owner then ends while the thread that
// posted is still on its way to wake it.
Executor::~Executor() {
  while (posting_.load(std::memory_order_acquire) > 0) std::this_thread::yield();
}

void Executor::post(Remote& work) noexcept {
  posting_.fetch_add(1, std::memory_order_relaxed);  // whoever takes the work sees it: released below
  work.next = inbox_.load(std::memory_order_relaxed);
  while (
      !inbox_.compare_exchange_weak(work.next, &work, std::memory_order_release, std::memory_order_relaxed)) {
  }
  if (wake_) wake_();
  posting_.fetch_sub(1, std::memory_order_release);
}

bool Executor::run() {
  bool ran = false;
  // Posted work, oldest first: the box is a stack, so it is turned round.
  Remote* newest = inbox_.exchange(nullptr, std::memory_order_acquire);
  Remote* oldest = nullptr;
  while (newest != nullptr) {
    Remote* next = newest->next;
    newest->next = oldest;
    oldest = newest;
    newest = next;
  }
  while (oldest != nullptr) {
    Remote* next = oldest->next;  // read first: run() may end the work's life
    oldest->run(*oldest);
    oldest = next;
    ran = true;
  }
  if (!heap_.empty()) {
    const Time now = clock_.now();
    while (!heap_.empty() && heap_.front()->at_ <= now) {
      Timer& due = *heap_.front();
      disarm(due);
      due.fire_(due);
      ran = true;
    }
  }
  if (!ready_.empty()) {
    running_.swap(ready_);
    for (const std::coroutine_handle<> coroutine : running_) coroutine.resume();
    running_.clear();
    ran = true;
  }
  return ran;
}

bool Executor::earlier(const Timer* a, const Timer* b) const {
  return a->at_ != b->at_ ? a->at_ < b->at_ : a->sequence_ < b->sequence_;
}

void Executor::place(Timer* timer, std::size_t position) {
  heap_[position] = timer;
  timer->position_ = static_cast<std::ptrdiff_t>(position);
}

void Executor::sift_up(std::size_t position) {
  Timer* timer = heap_[position];
  while (position > 0 && earlier(timer, heap_[(position - 1) / 2])) {
    place(heap_[(position - 1) / 2], position);
    position = (position - 1) / 2;
  }
  place(timer, position);
}

void Executor::sift_down(std::size_t position) {
  Timer* timer = heap_[position];
  for (;;) {
    std::size_t child = 2 * position + 1;
    if (child >= heap_.size()) break;
    if (child + 1 < heap_.size() && earlier(heap_[child + 1], heap_[child])) ++child;
    if (!earlier(heap_[child], timer)) break;
    place(heap_[child], position);
    position = child;
  }
  place(timer, position);
}

void Executor::arm(Timer& timer, Time at) {
  if (timer.armed()) disarm(timer);
  timer.executor_ = this;
  timer.at_ = at;
  timer.sequence_ = sequence_++;
  heap_.push_back(&timer);
  timer.position_ = static_cast<std::ptrdiff_t>(heap_.size() - 1);
  sift_up(heap_.size() - 1);
}

void Executor::disarm(Timer& timer) noexcept {
  if (!timer.armed()) return;
  const auto position = static_cast<std::size_t>(timer.position_);
  timer.position_ = -1;
  Timer* last = heap_.back();
  heap_.pop_back();
  if (last == &timer) return;
  place(last, position);
  sift_up(position);
  sift_down(static_cast<std::size_t>(last->position_));
}

}  // namespace weft
