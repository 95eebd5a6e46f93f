// Ring reduce-scatter: the first trip of the ring all-reduce. Block b, of any length, travels from rank b+1
// to its owner b, and each rank on the way adds its values to what arrives. Order of additions: as in
// all_reduce_ring.cc.
//   Step 1  send block rank-1
//   Step 2  at each hop fold the block that arrives, and send it on; the last one is the own block
// Rounds: size-1. Bytes sent by a rank: every block but its own, n (size-1)/size.
#include <utility>

#include "collectives/dense/ring_pass.h"
#include "collectives/registry.h"

namespace weft {

Task<void> reduce_scatter_ring(Comm comm, Dense data, Blocks blocks, Reduction reduction, Shape shape) {
  const int size = comm.size();
  return ring_pass(std::move(comm), {.data = data,
                                     .blocks = blocks,
                                     .first_hop = 0,
                                     .last_hop = size - 1,
                                     .reduction = reduction,
                                     .micro_op_bytes = shape.micro_op_bytes});
}

}  // namespace weft
