#include "transports/operation.h"

#include <utility>

#include "weft/transport.h"

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

}  // namespace weft
