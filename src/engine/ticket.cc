#include <new>
#include <utility>

#include "engine/submission.h"
#include "weft/engine.h"

namespace weft {

bool Ticket::done() const { return submission_->done.load(std::memory_order_acquire); }

void Ticket::wait() const {
  detail::Submission& s = *submission_;
  const Lock lock(s.mutex);
  if (!s.done.load(std::memory_order_relaxed)) {
    if (!std::exchange(s.said_waiting, true)) {
      s.keep_waited = submission_;
      s.engine.executor().post(s.waited);
    }
    while (!s.done.load(std::memory_order_relaxed)) lock.wait(s.changed);
  }
  if (s.error) std::rethrow_exception(s.error);
}

std::exception_ptr Ticket::error() const {
  const Lock lock(submission_->mutex);
  return submission_->error;
}

void Ticket::then(std::function<void()> f) const {
  {
    const Lock lock(submission_->mutex);
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
Ticket::Awaiter Ticket::behind() const { return Awaiter(submission_, Awaiter::For::order); }

bool Ticket::Awaiter::await_ready() const noexcept {
  return submission_->done.load(std::memory_order_acquire);
}

bool Ticket::Awaiter::enlist(std::coroutine_handle<> waiter, Executor& executor, Operation* operation) {
  detail::Submission& s = *submission_;
  const Lock lock(s.mutex);
  if (s.done.load(std::memory_order_relaxed)) return false;
  record_ = new (executor.arena().allocate(sizeof(Record))) Record(s, executor, waiter);
  if (operation != nullptr && for_ != For::end) {
    record_->link.emplace(*operation, *record_);
    if (operation->failure) {
      record_->link->complete(operation->failure);
      return false;
    }
    record_->link->waiter = waiter;
  }
  record_->next_awaiter = s.awaiters;
  s.awaiters = record_;
  if (for_ != For::order && !std::exchange(s.said_waiting, true)) {
    s.keep_waited = submission_;
    s.engine.executor().post(s.waited);
  }
  return true;
}

void Ticket::Awaiter::await_resume() const {
  if (for_ == For::end) return;
  if (record_ != nullptr && record_->link && record_->link->error)
    std::rethrow_exception(record_->link->error);
  if (for_ == For::order) return;
  const Lock lock(submission_->mutex);
  if (submission_->error) std::rethrow_exception(submission_->error);
}

Ticket::Awaiter::~Awaiter() {
  if (record_ == nullptr) return;
  Arena& arena = record_->executor.arena();
  record_->~Record();
  arena.deallocate(record_, sizeof(Record));
}

Ticket::Awaiter::Record::Record(detail::Submission& awaited, Executor& runs_on,
                                std::coroutine_handle<> coroutine)
    : submission(awaited), executor(runs_on), waiter(coroutine) {
  run = [](Remote& remote) {
    auto& self = static_cast<Record&>(remote);
    if (self.link)
      self.link->complete(self.link->operation.failure);
    else
      self.waiter.resume();
  };
}

bool Ticket::Awaiter::Record::withdraw() noexcept {
  const Lock lock(submission.mutex);
  for (Record** at = &submission.awaiters; *at != nullptr; at = &(*at)->next_awaiter) {
    if (*at != this) continue;
    *at = next_awaiter;
    return true;
  }
  return false;
}

}  // namespace weft
