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

Ticket::Awaiter Ticket::operator co_await() const { return Awaiter(submission_, Awaiter::For::result); }
Ticket::Awaiter Ticket::ended() const { return Awaiter(submission_, Awaiter::For::end); }

bool Ticket::Awaiter::await_ready() const noexcept {
  return submission_->done.load(std::memory_order_acquire);
}

bool Ticket::Awaiter::enlist(std::coroutine_handle<> waiter, Executor& executor, Operation* operation) {
  detail::Submission& s = *submission_;
  const std::lock_guard lock(s.mutex);
  if (s.done.load(std::memory_order_relaxed)) return false;
  if (operation != nullptr && for_ == For::result) {
    link_.emplace(*operation, *this);
    if (operation->failure) {
      link_->complete(operation->failure);
      return false;
    }
    link_->waiter = waiter;
  }
  waiter_ = waiter;
  resume_.awaiter = this;
  resume_.run = [](Remote& remote) { static_cast<Resume&>(remote).awaiter->resume(); };
  executor_ = &executor;
  next_ = s.awaiters;
  s.awaiters = this;
  if (!std::exchange(s.said_waiting, true)) {
    s.keep_waited = submission_;
    s.engine.executor_.post(s.waited);
  }
  return true;
}

void Ticket::Awaiter::resume() {
  if (link_)
    link_->complete(link_->operation.failure);
  else
    waiter_.resume();
}

bool Ticket::Awaiter::withdraw() noexcept {
  const std::lock_guard lock(submission_->mutex);
  for (Awaiter** at = &submission_->awaiters; *at != nullptr; at = &(*at)->next_) {
    if (*at != this) continue;
    *at = next_;
    return true;
  }
  return false;
}

void Ticket::Awaiter::await_resume() const {
  if (for_ == For::end) return;
  if (link_ && link_->error) std::rethrow_exception(link_->error);
  if (submission_->error) std::rethrow_exception(submission_->error);
}

}  // namespace weft
