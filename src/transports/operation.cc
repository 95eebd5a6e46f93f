// Operations, waits and transfers: the parts of weft/transport.h and weft/comm.h that every transport shares.
#include <algorithm>

#include "base/thread_time.h"
#include "base/worker_pool.h"
#include "transports/records.h"
#include "transports/sim_workers.h"
#include "weft/comm.h"
#include "weft/error.h"

namespace weft {

Wait::Wait(Operation& op) : operation(op), next_(op.pending_) {
  if (next_ != nullptr) next_->previous_ = this;
  op.pending_ = this;
}

Wait::~Wait() {
  if (done) return;
  (previous_ != nullptr ? previous_->next_ : operation.pending_) = next_;
  if (next_ != nullptr) next_->previous_ = previous_;
}

void Wait::complete(std::exception_ptr failure) noexcept {
  if (done) return;
  (previous_ != nullptr ? previous_->next_ : operation.pending_) = next_;
  if (next_ != nullptr) next_->previous_ = previous_;
  done = true;
  error = std::move(failure);
  if (!error && operation.executor != nullptr && is_progress())
    operation.progressed = operation.executor->now();
  if (waiter) operation.executor->ready(waiter);
}

void Operation::fail(std::exception_ptr cause) noexcept {
  if (!failure) failure = std::move(cause);
  for (Wait* wait = pending_; wait != nullptr;) {
    Wait* next = wait->next_;
    if (wait->abandon()) wait->complete(failure);
    wait = next;
  }
}

bool TransferRecord::abandon() noexcept {
  transport.cancel(*this);
  return true;
}

Transfer::~Transfer() {
  if (record_ == nullptr) return;
  if (!record_->done) record_->transport.cancel(*record_);
  record_->~TransferRecord();
  arena_->deallocate(record_, record_bytes_);
}

Buffer Transfer::take() {
  await_resume();
  return std::move(static_cast<RecvRecord*>(record_)->sink.kept);
}

Sleep::Sleep(Operation& op, Time until)
    : Wait(op), alarm_(*this, [](Timer& timer) { static_cast<Alarm&>(timer).sleep.complete(); }) {
  if (op.failure)
    complete(op.failure);
  else if (until <= op.executor->now())
    complete();
  else
    op.executor->arm(alarm_, until);
}

Compute::Compute(Operation& op, SimWorkers* workers, FunctionRef<double()> work)
    : Wait(op), workers_(workers), work_(work), alarm_(*this, [](Timer& timer) {
        Compute& self = static_cast<Alarm&>(timer).compute;
        self.complete(self.thrown_);
      }) {}

void Compute::work() noexcept {
  const bool simulated = operation.executor->simulated();
  const double before = simulated ? 0 : thread_seconds();
  try {
    simulated_seconds_ = work_();
  } catch (...) {
    thrown_ = std::current_exception();
  }
  computed_seconds_ = simulated ? simulated_seconds_ : thread_seconds() - before;
}

bool Compute::await_ready() noexcept {
  if (operation.failure) {
    complete(operation.failure);
    return true;
  }
  if (operation.pool != nullptr) return false;
  work();
  operation.computed_seconds += computed_seconds_;
  if (operation.executor->simulated() && simulated_seconds_ > 0) return false;
  complete(thrown_);
  return true;
}

void Compute::await_suspend(std::coroutine_handle<> h) noexcept {
  waiter = h;
  if (operation.pool == nullptr) {
    const Time now = operation.executor->now();
    operation.executor->arm(alarm_, workers_ != nullptr ? workers_->compute(now, simulated_seconds_)
                                                        : now + from_seconds(simulated_seconds_));
    return;
  }
  remote_.compute = this;
  remote_.run = [](Remote& remote) {
    Compute& self = *static_cast<Done&>(remote).compute;
    self.operation.computed_seconds += self.computed_seconds_;
    self.complete(self.thrown_ ? self.thrown_ : self.operation.failure);
  };
  operation.pool->submit(FunctionRef<void()>(this, [](void* target) {
    Compute& self = *static_cast<Compute*>(target);
    self.work();
    self.operation.executor->post(self.remote_);  // from here on `self` may be gone
  }));
}

void Compute::await_resume() const {
  if (error) std::rethrow_exception(error);
}

}  // namespace weft
