// All-gather on two levels: a block crosses to each other node once. Block b, of any length, is rank b's.
//   Step 1  ring all-gather of the blocks of a column, the ranks with equal place in their nodes
//   Step 2  ring all-gather inside the node, of what its columns have
// Rounds: (node_size-1) + (nodes-1). Bytes sent by a rank: n (nodes-1)/size between nodes, through a node's
// port n (nodes-1)/nodes; inside the node n (node_size-1)/node_size.
#include "collectives/dense/two_level.h"

namespace weft {

Task<void> all_gather_two_level(Comm comm, Dense data, Blocks blocks, Shape shape) {
  const TwoLevels levels(comm, shape);
  // Step 1
  const RingPass column = levels.along_column(data, blocks, 1);
  co_await ring_pass(comm, column);
  // Step 2
  const RingPass inside = levels.inside(data, blocks, 1);
  co_await ring_pass(comm.hops_from(static_cast<std::uint32_t>(levels.nodes() - 1)), inside);
}

}  // namespace weft
