// Measures a link once, when a job starts, and makes all ranks go by rank 0's figures: algorithm choice and
// the length of micro-ops must be the same everywhere.
#pragma once

#include <cstdint>
#include <span>

#include "weft/comm.h"
#include "weft/config.h"
#include "weft/task.h"

namespace weft {

// What all ranks go by.
struct Agreement {
  LinkCost cost;
  std::uint64_t micro_op_bytes = 0;
};

// Length of a micro-op: the larger of micro_op_time and five hops, at the link's bandwidth. (Shorter ones
// would be paid for in latency when ranks outnumber cores.)
std::uint64_t micro_op_bytes(const LinkCost& cost, const Config& config);

// Consecutive ranks on one host, where all hosts have as many and some rank is on another; else 1.
int node_ranks_of(std::span<const std::uint64_t> host_of_rank);
// Nodes of a network that is given, and what it costs inside them.
void set_nodes(LinkCost& cost, int ranks, int nodes, double scale_up_hop_seconds,
               double scale_up_bytes_per_second);
// What is planned by, on the nodes that were found where it names none.
LinkCost on_nodes_of(LinkCost planned, const LinkCost& found);

// Ranks tell rank 0 their hosts. It plays ping-pong with short and long messages, with rank 1 and, where there
// are nodes, with the first rank of the next one: inside a node and between nodes apart. Its figures go to
// everybody. `known` on rank 0 skips the measuring, whatever other ranks have there, and says the nodes, too.
// `agreed` is set on every rank.
Task<void> calibrate(Comm comm, const LinkCost* known, std::uint64_t host, const Config& config,
                     Agreement& agreed);

}  // namespace weft
