// Ring all-gather: the second trip of the ring all-reduce. Every block, of any length, travels around the
// ring from its owner.
//   Step 1  send the own block
//   Step 2  at each hop place the block that arrives, and send it on, except the last
// Rounds: size-1. Bytes sent by a rank: every block but the next rank's, n (size-1)/size.
#include <utility>

#include "collectives/dense/ring_pass.h"
#include "collectives/registry.h"
#include "patterns/ring.h"

namespace weft {

Task<void> all_gather_ring(Comm comm, Dense data, Blocks blocks, Shape shape) {
  const int size = comm.size();
  return ring_pass(std::move(comm), {.data = data,
                                     .blocks = blocks,
                                     .first_hop = size - 1,
                                     .last_hop = ring_hops(size),
                                     .micro_op_bytes = shape.micro_op_bytes});
}

}  // namespace weft
