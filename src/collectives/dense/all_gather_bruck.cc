// Bruck all-gather on any size. At hop j every rank passes the 2^j blocks that it has (at the end: those that
// are missing) to rank - 2^j, so the number of blocks doubles. Blocks lie in their final place from the
// start: a bag wraps around instead of being rotated at the end.
//   Step 1  for gap = 1, 2, 4 ..: send blocks rank .. to rank - gap,
//           receive blocks rank+gap .. from rank + gap
// Rounds: ceil(log2 size). Bytes sent by a rank: size-1 blocks, n (size-1)/size.
// Bruck et al., IEEE TPDS 8(11), 1997.
#include <utility>

#include "collectives/dense/bruck_gather.h"
#include "collectives/pieces.h"
#include "collectives/registry.h"
#include "patterns/bruck.h"

namespace weft {

Task<void> bruck_gather(Comm comm, Dense data, Blocks blocks, int own_block, std::size_t micro_op_bytes) {
  for (const Hop& hop : gather_hops(comm.size())) {
    const BagExchange exchange{.to = comm.before(hop.gap),
                               .from = comm.after(hop.gap),
                               .hop = hop.number,
                               .micro_op_bytes = micro_op_bytes};
    const Bag outgoing(data, blocks, own_block + hop.sent, hop.count);
    const Bag incoming(data, blocks, own_block + hop.received, hop.count);
    co_await exchange_bags(comm, exchange, outgoing, incoming);
  }
}

Task<void> all_gather_bruck(Comm comm, Dense data, Blocks blocks, Shape shape) {
  const int rank = comm.rank();
  return bruck_gather(std::move(comm), data, blocks, rank, shape.micro_op_bytes);
}

}  // namespace weft
