// What follows from the options of a training run.
#pragma once

#include <cstdint>
#include <string>

#include "data/batches.h"
#include "weft/train/options.h"
#include "world/mesh.h"

namespace weft {

// Why no parameter is updated before all results of a step are here; empty: each block waits for its own.
std::string why_updates_wait(const TrainOptions& options);

// Of the run's gradients.
DataParallelOptions data_parallel_options(const TrainOptions& options);
OptimizerOptions optimizer_options(const TrainOptions& options);
std::int64_t sequence_length(const TrainOptions& options);
// Of the run's data: what to open; then, with that vocabulary, the model's sizes; a rank's share of the
// batches.
DataOptions data_options(const TrainOptions& options);
ModelOptions model_sizes(const TrainOptions& options, const DataSource& source);
// Of a step, that the data-parallel rank with most has, of so many.
std::int64_t sequences_of_rank(const TrainOptions& options, int data_ranks);
// Of so many ranks: stages, and experts that share a layer's, are those of the options.
Mesh mesh_of(const ModelOptions& sizes, int ranks);
// Ranks of one pipeline have the same batches.
BatchOptions batch_options(const TrainOptions& options, int rank, int ranks);
// Of the update that step `step` (from 0) makes. Warm-up: lr (step + 1) / lr_warmup; then lr, or half a
// cosine from there to lr_final lr at the last step.
double lr_at(const TrainOptions& options, std::int64_t step);
// Of what selects; 1 where everything is sent. Of step `step`: kWarmUpDensity (density /
// kWarmUpDensity)^(step / warmup_steps), then density.
double density_at(const TrainOptions& options, std::int64_t step);

// Of what results depend on and neither the model's tensors nor its scheme and optimizer tell.
std::uint64_t hash_of(const TrainOptions& options);

}  // namespace weft
