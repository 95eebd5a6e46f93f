// The ring as all-reduce, reduce-scatter and all-gather run it: some of its hops, in one coroutine.
#pragma once

#include "collectives/dense/finish.h"
#include "patterns/blocks.h"
#include "weft/comm.h"

namespace weft {

struct RingPass {
  Dense data;
  Blocks blocks;
  int first_hop = 0;  // of patterns/ring.h
  int last_hop = 0;   // one beyond
  Reduction reduction = Reduction::sum;
  std::size_t micro_op_bytes = 0;
  Finish* finish = nullptr;  // of an all-reduce; null: sums are results
};
Task<void> ring_pass(Comm comm, RingPass pass);

// Both trips: what all_reduce_ring() runs.
RingPass all_reduce_pass(int size, Dense data, Reduction reduction, std::size_t micro_op_bytes);

}  // namespace weft
