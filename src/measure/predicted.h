// What the plan predicts of a run, beside what was measured of it: in every summary, whoever computed.
#pragma once

#include <optional>

#include "planner/plan.h"
#include "weft/train/run.h"
#include "weft/world.h"
#include "workload/train_options.h"

namespace weft {

// By this outline; the summary then has the prediction, or why there is none: one rank exchanges nothing, and
// a walk may need more memory than there is. Large jobs are walked at a byte scale.
void add_prediction(const Outline& outline, const EmulationOptions& emulation, SimulationOptions simulation,
                    TrainSummary& summary);

// Of a run whose model computed: by the outline of its own steps, whose seconds have in them what ranks and
// their communication take from each other's cores, over `link` or, without one, over what its ranks measured
// when they connected. `one_process`: all ranks shared one pool of workers.
void predict_run(const TrainOptions& options, int ranks, const std::optional<EmulatedLink>& link,
                 bool one_process, TrainSummary& summary);

}  // namespace weft
