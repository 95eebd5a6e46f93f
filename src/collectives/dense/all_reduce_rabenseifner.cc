// Rabenseifner's all-reduce on the Bruck pattern, for any size: a reduce-scatter whose messages halve, and an
// all-gather whose messages double.
//   Step 1  for gap = 2^(L-1) .. 1: send the far part of the blocks still held to rank + gap, fold what
//           arrives from rank - gap into the near part; in the end rank b holds the sum of block b
//   Step 2  Bruck all-gather of the blocks (all_gather_bruck.cc)
// Order of additions: at each hop local + arrived. With S(r) what rank r holds of block b, a hop makes
// S(r) = S(r) + S(r - gap) for every r whose distance b - r is below the hop's count.
// Rounds: 2 L, L = ceil(log2 size). Bytes sent by a rank: 2 n (size-1)/size.
// Rabenseifner, ICCS 2004; any size by the reversed Bruck pattern: Zhao et al. (SparDL), ICDE 2024.
#include "collectives/dense/bruck_gather.h"
#include "collectives/pieces.h"
#include "collectives/registry.h"
#include "patterns/bruck.h"

namespace weft {

Task<void> all_reduce_rabenseifner(Comm comm, Dense data, Reduction reduction, Shape shape) {
  const Blocks blocks(comm.size(), data.count);
  const Hops halving = halving_hops(comm.size());

  // Step 1
  for (const Hop& hop : halving) {
    const BagExchange exchange{.to = comm.after(hop.gap),
                               .from = comm.before(hop.gap),
                               .hop = hop.number,
                               .fold = true,
                               .reduction = reduction,
                               .micro_op_bytes = shape.micro_op_bytes};
    const Bag outgoing(data, blocks, comm.rank() + hop.sent, hop.count);
    const Bag incoming(data, blocks, comm.rank() + hop.received, hop.count);
    co_await exchange_bags(comm, exchange, outgoing, incoming);
  }

  // Step 2
  const Comm later = comm.hops_from(static_cast<std::uint32_t>(halving.size()));
  co_await bruck_gather(later, data, blocks, comm.rank(), shape.micro_op_bytes);
}

}  // namespace weft
