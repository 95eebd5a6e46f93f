// Measures a link once, when a job starts, and makes all ranks go by rank 0's figures: algorithm choice and
// the length of micro-ops must be the same everywhere.
#pragma once

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

// Ranks 0 and 1 play ping-pong with short and long messages; rank 0's figures go to everybody. `known` on
// rank 0 skips the measuring, whatever other ranks have there. `agreed` is set on every rank.
Task<void> calibrate(Comm comm, const LinkCost* known, const Config& config, Agreement& agreed);

}  // namespace weft
