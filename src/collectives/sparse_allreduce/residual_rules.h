// What is left in the residual when the result is known. Before this, staged holds what was dropped at this
// rank, mass that had arrived from others included, with everything it sent taken out: that is the rule DROP.
//
//   gres  not in the result: the own value, as if nothing was sent. In the result: as dropped here.
//         Conserves.
//   pres  not in the result: the own value. In the result: 0 where this rank sent it, else the own value.
//         Loses what is dropped in flight.
//   lres  0 where this rank sent it, else the own value. Loses more.
//   drop  as dropped here. Conserves.
//
// Only places where something was sent or arrived can differ from the own value gradient + residual, so only
// those are visited. Their own values are noted on the way, when their memory is at hand anyway: a place that
// was only sent has the value that was cut out, another one what was there before something was added.
#pragma once

#include "collectives/sparse_allreduce/call.h"

namespace weft {

// Notes places of a block and the own values there. Whoever noted a place first is right.
void touch(const SparseCall& call, int block, EntriesView own);
// Adds entries to a block of `staged` and notes their places, but not those of `selected`: once a place was
// cut out, its own value is no longer there.
void add_and_touch(const SparseCall& call, const Deal& deal, int block, EntriesView entries,
                   EntriesView selected);

// One block: `selected` was sent by this rank, with its own values (which count where a place was not
// touched), `kept` is the block's result.
void apply_residual_rule(const SparseCall& call, const Deal& deal, int block, EntriesView selected,
                         EntriesView touched, EntriesView kept);

}  // namespace weft
