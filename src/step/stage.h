// A stage of a pipeline: which blocks of a model a rank has, and in which order it computes them
// (patterns/pipeline.h). The first stage has what stands before the layers, the last one what stands behind them.
//
// Thread: any.
#pragma once

#include <span>
#include <vector>

#include "patterns/pipeline.h"
#include "weft/train/shape.h"
#include "weft/train/stage_options.h"

namespace weft {

PipelineSchedule pipeline_schedule_of(std::string_view name);  // throws UsageError with the nearest one
PipelineShape pipeline_shape(const StageOptions& options, int micro_batches);
// Throws UsageError of one sentence: options that cannot be meant, or (micro_batches > 0) micro-batches that the
// schedule does not take.
void check_stage(const StageOptions& options, int micro_batches = 0);
// Whether a step's backwards are cut in two: a single stage, behind which nobody waits, has whole ones.
bool in_halves(const StageOptions& options);
// Of a step with these options; evaluations and first tables have so many.
int fewest_micro_batches(const StageOptions& options);

// The pieces of a step in order, without updates.
std::vector<Piece> step_order(const ModelShape& shape, const StageOptions& options, int micro_batches);
// One micro-batch forward through all of the rank's blocks.
std::vector<Piece> forward_order(const ModelShape& shape);

}  // namespace weft
