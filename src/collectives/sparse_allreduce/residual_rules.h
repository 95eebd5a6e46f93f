// What is left in the residual when the result is known. Before this, staged holds what was dropped at this
// rank, mass that had arrived from others included, with everything it sent taken out: that is the rule DROP.
//
//   gres  not in the result: the own value, as if nothing was sent. In the result: as dropped here. conserves
//   pres  not in the result: the own value. In the result: 0 where this rank sent it, else the own value.
//   loses in flight lres  0 where this rank sent it, else the own value. loses more drop  as dropped here.
//   conserves
//
// Only places where something was sent or arrived can differ from the own value gradient + residual, so only
// those are visited.
#pragma once

#include "collectives/sparse_allreduce/call.h"

namespace weft {

// One block: `selected` was sent by this rank, `touched` (sorted) is where something arrived, `kept` is the
// block's result.
void apply_residual_rule(const SparseCall& call, const Deal& deal, int block, EntriesView selected,
                         std::span<const std::uint32_t> touched, EntriesView kept);

}  // namespace weft
