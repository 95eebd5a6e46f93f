// Reduce-scatter on two levels: what leaves a node is summed inside it before. Block b, of any length, belongs
// to rank b.
//   Step 1  ring reduce-scatter inside the node: place l has the node's sums of the blocks of all ranks with
//           place l in their nodes (a column)
//   Step 2  ring reduce-scatter of these blocks along the column
// Order of additions: as in all_reduce_two_level.cc.
// Rounds: (node_size-1) + (nodes-1). Bytes sent by a rank: every block but its own, n (size-1)/size, of which
// n (nodes-1)/size leave the node; through a node's port n (nodes-1)/nodes.
#include "collectives/dense/two_level.h"

namespace weft {

Task<void> reduce_scatter_two_level(Comm comm, Dense data, Blocks blocks, Reduction reduction, Shape shape) {
  const TwoLevels levels(comm, shape);
  // Step 1
  RingPass inside = levels.inside(data, blocks, 0);
  inside.reduction = reduction;
  co_await ring_pass(comm, inside);
  // Step 2
  RingPass column = levels.along_column(data, blocks, 0);
  column.reduction = reduction;
  co_await ring_pass(comm.hops_from(static_cast<std::uint32_t>(levels.node_size() - 1)), column);
}

}  // namespace weft
