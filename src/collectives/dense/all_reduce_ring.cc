// Ring all-reduce. The vector is cut into `size` blocks, block b belongs to rank b.
//   Step 1  every block travels once around the ring, from rank b+1 to its owner b, and each rank on the
//           way adds its values
//   Step 2  every block travels around once more, from its owner, and is copied
// Both trips are one pipeline of micro-ops (ring_pass.cc).
// Order of additions in block b: x[b] + (x[b-1] + ( ... + (x[b+2] + x[b+1]))).
// Rounds: 2 (size-1). Bytes sent by a rank: all blocks twice, less its own and the next: 2 n (size-1)/size.
// Patarasuk and Yuan, JPDC 69(2), 2009.
#include <utility>

#include "collectives/dense/ring_pass.h"
#include "collectives/registry.h"
#include "patterns/ring.h"

namespace weft {

RingPass all_reduce_pass(int size, Dense data, Reduction reduction, std::size_t micro_op_bytes) {
  return {.data = data,
          .blocks = Blocks(size, data.count),
          .first_hop = 0,
          .last_hop = ring_hops(size),
          .reduction = reduction,
          .micro_op_bytes = micro_op_bytes};
}

Task<void> all_reduce_ring(Comm comm, Dense data, Reduction reduction, Shape shape) {
  const int size = comm.size();
  return ring_pass(std::move(comm), all_reduce_pass(size, data, reduction, shape.micro_op_bytes));
}

}  // namespace weft
