// Training on the ranks of a world: data, model, data parallelism, schedules, checkpoints, resume. What
// `weft train` runs on every rank; no torch is reachable from here.
//
//   run_ranks(4, [&](World& world) {
//     Observer quiet;
//     const TrainSummary summary = train_rank(world, options, run, quiet);
//   });
//
// A step's record comes when its loss is known: at the end of the next step, or when the run settles for a
// checkpoint or at its end.
//
// Resume: on the same number of ranks the run goes on with the bits that it would have had without a stop
// (weights, optimizer, residuals, controllers; algorithms are chosen by planned_link, not by measurement). On
// another number the residuals are dealt out (state/rows.h) and sums are added in another order.
#pragma once

#include "weft/train/options.h"
#include "weft/train/run.h"
#include "weft/world.h"

namespace weft {

// One rank's part; all ranks call it with equal options and runs. The summary is the same on all of them.
// Throws UsageError, or Error: every rank ends with a sentence, and after an error the world cannot be used
// any more.
TrainSummary train_rank(World& world, const TrainOptions& options, const TrainRun& run, Observer& observer);

// In the calling thread, and as the default of those that follow.
void set_torch_threads(int threads);

}  // namespace weft
