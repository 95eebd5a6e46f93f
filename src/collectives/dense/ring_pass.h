// The ring as all-reduce, reduce-scatter and all-gather run it: some of its hops, in one coroutine.
#pragma once

#include "collectives/dense/finish.h"
#include "patterns/blocks.h"
#include "weft/comm.h"

namespace weft {

// Ranks first, first + stride, ... of a group, as the ring that they form.
struct RingRanks {
  int first = 0;
  int stride = 1;
  int size = 0;  // 0: all ranks of the group
};

// Which of `blocks` travel as block b of the ring: first + b stride, and where it has several runs, those that
// follow it in distances of run_stride.
struct RingBlocks {
  int first = 0;
  int stride = 1;
  int runs = 1;
  int run_stride = 0;
};

struct RingPass {
  Dense data;
  Blocks blocks;
  int first_hop = 0;  // of patterns/ring.h
  int last_hop = 0;   // one beyond
  Reduction reduction = Reduction::sum;
  std::size_t micro_op_bytes = 0;
  Finish* finish = nullptr;  // of an all-reduce; null: sums are results
  RingRanks ranks;           // this rank is one of them
  RingBlocks places;
};
Task<void> ring_pass(Comm comm, RingPass pass);

// Both trips: what all_reduce_ring() runs.
RingPass all_reduce_pass(int size, Dense data, Reduction reduction, std::size_t micro_op_bytes);

}  // namespace weft
