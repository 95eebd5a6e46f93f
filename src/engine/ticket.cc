#include <utility>

#include "engine/scheduler.h"
#include "engine/submission.h"
#include "weft/engine.h"

namespace weft {

bool Ticket::done() const { return submission_->done.load(std::memory_order_acquire); }

void Ticket::wait() const {
  detail::Submission& s = *submission_;
  std::unique_lock lock(s.mutex);
  if (!s.done.load(std::memory_order_relaxed)) {
    if (!std::exchange(s.said_waiting, true)) {
      s.keep_waited = submission_;
      s.engine.executor_.post(s.waited);
    }
    s.changed.wait(lock, [&s] { return s.done.load(std::memory_order_relaxed); });
  }
  if (s.error) std::rethrow_exception(s.error);
}

std::exception_ptr Ticket::error() const {
  const std::lock_guard lock(submission_->mutex);
  return submission_->error;
}

void Ticket::then(std::function<void()> f) const {
  {
    const std::lock_guard lock(submission_->mutex);
    if (!submission_->done.load(std::memory_order_relaxed)) {
      submission_->continuations.push_back(std::move(f));
      return;
    }
  }
  f();
}

Time Ticket::submitted() const { return submission_->submitted; }
Time Ticket::started() const { return submission_->started; }
Time Ticket::finished() const { return submission_->finished; }
double Ticket::computed_seconds() const { return submission_->operation.computed_seconds; }

Ticket::Awaiter Ticket::operator co_await() const { return Awaiter(submission_); }

bool Ticket::Awaiter::await_ready() const noexcept {
  return submission_->done.load(std::memory_order_acquire);
}

bool Ticket::Awaiter::enlist(std::coroutine_handle<> waiter, Executor& executor) {
  detail::Submission& s = *submission_;
  const std::lock_guard lock(s.mutex);
  if (s.done.load(std::memory_order_relaxed)) return false;
  resume_.waiter = waiter;
  resume_.run = [](Remote& remote) { static_cast<Resume&>(remote).waiter.resume(); };
  executor_ = &executor;
  next_ = s.awaiters;
  s.awaiters = this;
  if (!std::exchange(s.said_waiting, true)) {
    s.keep_waited = submission_;
    s.engine.executor_.post(s.waited);
  }
  return true;
}

void Ticket::Awaiter::await_resume() const {
  if (submission_->error) std::rethrow_exception(submission_->error);
}

}  // namespace weft
