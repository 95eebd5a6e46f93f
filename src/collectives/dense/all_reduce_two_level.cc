// All-reduce on two levels: between nodes every rank sends only its share of what its node has summed. The
// vector is cut into `node_size` blocks, block l belongs to the ranks with place l in their nodes (a column),
// and each such block again into one for each node of its column.
//   Step 1  ring reduce-scatter inside the node: place l has the node's sum of block l
//   Step 2  ring all-reduce of block l along the column
//   Step 3  ring all-gather inside the node
// Order of additions: inside the node that of the ring (all_reduce_ring.cc) over its ranks, of these sums that
// of the ring over nodes.
// Rounds: 2 (node_size-1) + 2 (nodes-1). Bytes sent by a rank: 2 n (node_size-1)/node_size inside the node,
// 2 n (nodes-1)/nodes / node_size between nodes; through a node's port 2 n (nodes-1)/nodes.
#include "collectives/dense/two_level.h"
#include "patterns/ring.h"

namespace weft {

Task<void> all_reduce_levels(Comm comm, Dense data, Reduction reduction, Shape shape, Finish* finish) {
  const TwoLevels levels(comm, shape);
  const Blocks blocks(levels.node_size(), data.count);
  const int trip = levels.node_size() - 1;

  // Step 1
  RingPass inside{.data = data,
                  .blocks = blocks,
                  .first_hop = 0,
                  .last_hop = trip,
                  .reduction = reduction,
                  .micro_op_bytes = shape.micro_op_bytes};
  inside.ranks = levels.ring_of_node();
  if (levels.nodes() == 1) inside.finish = finish;
  co_await ring_pass(comm, inside);

  // Step 2
  const Dense own = data.sub(blocks.begin(levels.local()), blocks.count(levels.local()));
  RingPass column = all_reduce_pass(levels.nodes(), own, reduction, shape.micro_op_bytes);
  column.ranks = levels.ring_of_column();
  column.finish = finish;
  co_await ring_pass(comm.hops_from(static_cast<std::uint32_t>(trip)), column);

  // Step 3
  inside.first_hop = trip;
  inside.last_hop = 2 * trip;
  inside.finish = finish;
  co_await ring_pass(comm.hops_from(static_cast<std::uint32_t>(trip + ring_hops(levels.nodes()))), inside);
}

Task<void> all_reduce_two_level(Comm comm, Dense data, Reduction reduction, Shape shape) {
  return all_reduce_levels(std::move(comm), data, reduction, shape, nullptr);
}

}  // namespace weft
