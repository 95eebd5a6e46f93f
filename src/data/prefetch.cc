#include "data/prefetch.h"

#include <utility>

namespace weft {

namespace {

constexpr std::int64_t kAhead = 2;  // batches beyond the current one

}  // namespace

Prefetch::Prefetch(Batches batches, std::int64_t first_step)
    : batches_(std::move(batches)), step_(first_step), wanted_(first_step), thread_([this] { run(); }) {}

Prefetch::~Prefetch() {
  {
    const Lock lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Prefetch::advance() {
  {
    const Lock lock(mutex_);
    slots_.erase(step_);
    wanted_ = ++step_;
  }
  changed_.notify_all();
}

const TokenBatch& Prefetch::wait(std::int64_t step) {
  Lock lock(mutex_);
  while (!slots_.contains(step)) lock.wait(changed_);
  const Slot& slot = slots_.at(step);
  if (slot.error) std::rethrow_exception(slot.error);
  return slot.batch;  // a map's elements stay where they are
}

void Prefetch::run() {
  Lock lock(mutex_);
  for (std::int64_t step = wanted_;; ++step) {
    while (!stop_ && step > wanted_ + kAhead) lock.wait(changed_);
    if (stop_) return;
    lock.unlock();
    Slot slot;
    try {
      slot.batch = batches_.at(step);
    } catch (...) {
      slot.error = std::current_exception();
    }
    lock.lock();
    if (step >= wanted_) slots_.emplace(step, std::move(slot));  // else it was passed over
    changed_.notify_all();
  }
}

}  // namespace weft
