// An all-reduce whose sums are finished (averaged, checked) piece by piece while others are still under way,
// and not in one more pass over memory at the end.
#pragma once

#include "weft/collective.h"

namespace weft {

// Called on whatever thread has the piece, one at a time; pieces are no longer than a micro-op where the
// communication thread calls. Both return their seconds in virtual time.
class Finish {
 public:
  // All ranks' values are in it: makes the result of it, in place, and no other rank has it yet.
  virtual double sum(Dense piece) = 0;
  // A result that another rank has made.
  virtual double result(Dense piece) = 0;

 protected:
  ~Finish() = default;
};

// Every element passes through exactly one of the two on each rank. Algorithms other than the ring pass all
// of the vector through sum(), in the end. `finish` stays until the task is done.
Task<void> all_reduce_and_finish(Comm comm, Dense data, Finish* finish, AllReduceOptions options = {});

}  // namespace weft
