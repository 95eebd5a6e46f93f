// Who computes for the ranks of `sim`, in virtual time. A rank has a communication thread, which handles what
// arrives, and a worker; or the ranks stand for threads of one machine, and all of it is done by the cores
// that they share. First come, first served.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "weft/clock.h"

namespace weft {

// One rank's. Thread: the world's.
class SimWorkers {
 public:
  using Threads = std::vector<Time>;  // when each is free

  SimWorkers() : threads_(std::make_shared<Threads>(1)) {}
  explicit SimWorkers(std::shared_ptr<Threads> shared) : threads_(std::move(shared)), shares_(true) {}

  // When work of so many seconds that comes now will be done: on a worker, or on the communication thread.
  // REQUIRES: calls come in order of time.
  Time compute(Time now, double seconds) { return take(*std::ranges::min_element(*threads_), now, seconds); }
  Time handle(Time now, double seconds) {
    return shares_ ? compute(now, seconds) : take(communication_, now, seconds);
  }

  // What this rank's work has taken so far, with what is under way or waits; and when the last of it would be
  // done if nobody else had any. For a rank whose own computation needs the core meanwhile.
  Time taken() const { return taken_; }
  Time taken_until() const { return taken_until_; }

 private:
  Time take(Time& free_at, Time now, double seconds) {
    const Time cost = from_seconds(seconds);
    free_at = std::max(free_at, now) + cost;
    taken_ += cost;
    taken_until_ = std::max(taken_until_, now) + cost;
    return free_at;
  }

  std::shared_ptr<Threads> threads_;
  bool shares_ = false;
  Time communication_{};
  Time taken_{}, taken_until_{};
};

}  // namespace weft
