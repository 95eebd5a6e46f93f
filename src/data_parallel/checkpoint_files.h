// The two kinds of files in a checkpoint (checkpoint.h): from a snapshot to a file and back, checked both
// ways by the same rules. Readable by any reader of safetensors:
//
//   metadata of both   weft.checkpoint (shared, rank), weft.version, weft.step, weft.seed, weft.size
//   shared             weft.model, weft.optimizer, weft.lr, weft.optimizer_parameters,
//   weft.optimizer_vectors,
//                      and the user's own; lists of names have one a line
//     model/<name>                       optimizer/<parameter>/<vector>
//     optimizer/step    I64, updates of each parameter                 extra/<name>   U8
//   rank               weft.rank, weft.state_step, weft.parameters, weft.buckets, and how many there are of
//   these:
//                      weft.residuals, weft.factors
//     residual/<name>   F32, none for zeros          parameter/count   I64          parameter/scale   F64
//     factor/<name>     F32, rank x length, none where there is none yet
//     bucket/num_parameters, bucket/num_regions   I64, one a bucket; then all of them end to end:
//     bucket/parameters (places in weft.parameters), bucket/regions   I64
//     bucket/team_quota   I64: entries, step, inertia a bucket      bucket/thresholds   F32: local, global
//     bucket/threshold_steps   I64: k, steps
//
// All errors are UsageErrors of one sentence with the path.
#pragma once

#include <cstdint>
#include <filesystem>

#include "data_parallel/checkpoint.h"

namespace weft {

void write_shared_file(const std::filesystem::path& path, const TrainingSnapshot& snapshot);
void write_rank_file(const std::filesystem::path& path, const TrainingSnapshot& snapshot);

// Of state, only the size. Throws UsageError if the file is of another step.
TrainingSnapshot read_shared_file(const std::filesystem::path& path, std::int64_t step);
// Throws UsageError unless step, seed and size are those of `shared`, and the rank is `rank`.
StateSnapshot read_rank_file(const std::filesystem::path& path, const TrainingSnapshot& shared, int rank);

}  // namespace weft
