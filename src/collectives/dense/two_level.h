// What the collectives of two levels share. The ranks of a node (`node_size` consecutive ones) form a ring over
// the fast network inside it; a column, the ranks with equal place in their nodes, forms one over the network
// between nodes. All of them belong to one operation of the whole group, so that a node's port counts the
// columns as one.
#pragma once

#include "collectives/dense/ring_pass.h"
#include "collectives/registry.h"
#include "patterns/alltoall.h"

namespace weft {

class TwoLevels {
 public:
  TwoLevels(const Comm& comm, const Shape& shape)
      : grid_{comm.size(), shape.node_size},
        node_(grid_.node_of(comm.rank())),
        micro_op_(shape.micro_op_bytes) {
    local_ = grid_.local_of(comm.rank());
  }

  int node_size() const { return grid_.node_size; }
  int nodes() const { return grid_.nodes(); }
  int local() const { return local_; }
  RingRanks ring_of_node() const { return {grid_.rank_of(node_, 0), 1, node_size()}; }
  RingRanks ring_of_column() const { return {local_, node_size(), nodes()}; }

  // A trip of the blocks of `size` ranks inside the node, where block b is those of all ranks with place b in
  // their nodes; and one of this column's blocks between nodes. `trip` 0 sums, 1 copies.
  RingPass inside(Dense data, Blocks blocks, int trip) const {
    RingPass pass = pass_of(data, blocks, trip, node_size());
    pass.ranks = ring_of_node();
    pass.places = {.first = 0, .stride = 1, .runs = nodes(), .run_stride = node_size()};
    return pass;
  }
  RingPass along_column(Dense data, Blocks blocks, int trip) const {
    RingPass pass = pass_of(data, blocks, trip, nodes());
    pass.ranks = ring_of_column();
    pass.places = {.first = local_, .stride = node_size()};
    return pass;
  }

 private:
  RingPass pass_of(Dense data, Blocks blocks, int trip, int size) const {
    return {.data = data,
            .blocks = blocks,
            .first_hop = trip * (size - 1),
            .last_hop = (trip + 1) * (size - 1),
            .micro_op_bytes = micro_op_};
  }

  NodeGrid grid_;
  int node_;
  int local_ = 0;
  std::size_t micro_op_;
};

// What all_reduce_two_level() runs; `finish` may be null.
Task<void> all_reduce_levels(Comm comm, Dense data, Reduction reduction, Shape shape, Finish* finish);

}  // namespace weft
