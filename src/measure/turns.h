// Taking turns: several worlds live in one process, and one at a time trains, for some steps.
//
// Whatever changes on the machine meanwhile then changes for all of them. A turn begins and ends with nothing
// under way, so its first step waits for no communication of the step before, and what is left of its last
// step is waited for with no forward beside it: neither is what a step takes in the middle of a run.
#pragma once

#include <cstdint>
#include <exception>
#include <vector>

#include "base/mutex.h"

namespace weft {

// Who trains which steps, in rounds of one turn for everybody.
struct Turns {
  std::vector<std::int64_t> ends;  // of each round: the step that its turns stop before
  std::vector<bool> measured;      // of each step

  std::int64_t steps() const { return ends.empty() ? 0 : ends.back(); }
  bool ends_behind(std::int64_t step) const;
};
// `warmup` steps in the first turn, then `wanted` measured ones in rounds of at most 5, at least 3 rounds
// where there are so many. The first step of a later turn is not measured; with `drop_last` neither is the
// last one of any. REQUIRES: wanted > 0.
Turns plan_turns(std::int64_t warmup, std::int64_t wanted, bool drop_last);

// The ranks of one world, which wait here for their turn. Waiting costs nothing: they sleep.
class Lane {
 public:
  explicit Lane(int ranks) : ranks_(ranks) {}

  // The ranks, before every step. Where the lane was closed it throws what closed it, or an Error that says
  // so.
  void before_step(std::int64_t step);
  // Whoever gives turns: returns when all ranks wait before step `end`, or when the lane was closed. 0: when
  // they have arrived.
  void run_until(std::int64_t end);
  // The ranks have ended, or are to end: everybody who waits goes on, a rank with an error. `cause`: of a rank
  // that failed; the others then fail with the same, whichever of them is asked first. Any thread.
  void close(std::exception_ptr cause = std::current_exception());

 private:
  bool ready() const WEFT_REQUIRES(mutex_) { return arrived_ == ranks_ || closed_; }

  Mutex mutex_;
  std::condition_variable changed_;
  const int ranks_;
  int arrived_ WEFT_GUARDED_BY(mutex_) = 0;  // ranks that wait before end_
  std::int64_t end_ WEFT_GUARDED_BY(mutex_) = 0;
  bool closed_ WEFT_GUARDED_BY(mutex_) = false;
  std::exception_ptr cause_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft
