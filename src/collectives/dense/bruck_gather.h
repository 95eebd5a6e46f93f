// The Bruck all-gather with freely numbered blocks: rank r owns block own_block on entry, rank r+1 the next
// one (cyclically), and so on. Hops 0 .. ceil(log2 size)-1.
#pragma once

#include "patterns/blocks.h"
#include "weft/comm.h"

namespace weft {

Task<void> bruck_gather(Comm comm, Dense data, Blocks blocks, int own_block, std::size_t micro_op_bytes);

}  // namespace weft
