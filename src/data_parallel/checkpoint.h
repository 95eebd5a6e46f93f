// Checkpoints of a training job: a folder of safetensors files for each saved step.
//
//   <dir>/step-<N>/shared.safetensors         model, optimizer, extra states, metadata: the same on all ranks
//   <dir>/step-<N>/rank-<r>-of-<P>.safetensors   residuals, velocities, scales, factors and controllers of
//   rank r <dir>/latest                              "step-<N>": the one that was committed last
//   <dir>/.step-<N>.tmp, .weft-*.tmp          unfinished: nobody reads them, begin_checkpoint() removes them
//
// Saving, with a barrier of the caller's between the steps (nothing here communicates):
//   Step 1  rank 0: begin_checkpoint(); it makes <dir>/.step-<N>.tmp
//   Step 2  every rank: write_rank(); rank 0 also write_shared()
//   Step 3  rank 0: commit_checkpoint(), only if no rank failed in step 2
// The folder gets its name, and `latest` its line, by a rename after everything is on the disk: a crash, a
// kill or a full disk at any moment leaves the checkpoints before it and `latest` as they were.
//
// Loading on the same number of ranks gives every bit back. On another number all rank files are read and
// reshard() (state.h) deals the residuals out: their sum is conserved, controllers start anew.
//
// A snapshot is checked before it is written and after it was read, by the same rules: names, types, shapes,
// counts, finite values. The checksums of wire/safetensors.h find damage; files that other tools rewrote have
// none and pass if what they say holds together. All errors are UsageErrors of one sentence with the path.
//
// REQUIRES: one job at a time saves into `dir`. Thread: write_rank() of different ranks and write_shared()
// may run at the same time; what rank 0 does in steps 1 and 3, and keep_last(), beside nothing that writes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "data_parallel/optimizer.h"
#include "data_parallel/state.h"
#include "weft/dtype.h"

namespace weft {

// Names are not empty, unique in their list, UTF-8, and without line ends. Order is kept.
struct TrainingSnapshot {
  struct Tensor {
    std::string name;
    DType dtype = DType::float32;     // or float64
    std::vector<std::int64_t> shape;  // empty for a scalar
    std::vector<std::byte> bytes;     // row-major
    friend bool operator==(const Tensor&, const Tensor&) = default;
  };
  std::int64_t step = 0;  // of training; state.step counts only those that were committed
  std::uint64_t seed = 0;
  std::map<std::string, std::string> metadata;  // free UTF-8 text (configuration); no key begins with "weft."
  std::vector<Tensor> model;
  OptimizerSnapshot optimizer;  // all parameters with the same vectors; no '/' in a vector's name
  std::map<std::string, std::vector<std::byte>> extra;  // every other registered state (random numbers, data)
  StateSnapshot state;                                  // this rank's; its rank and size are the file's
};

// Removes what unfinished checkpoints left in `dir`, which it creates if need be.
void begin_checkpoint(const std::filesystem::path& dir, std::int64_t step);
// Of the snapshot: step, seed and state.
void write_rank(const std::filesystem::path& dir, const TrainingSnapshot& snapshot);
// Of the snapshot: everything but the contents of state.
void write_shared(const std::filesystem::path& dir, const TrainingSnapshot& snapshot);
// Throws UsageError, and commits nothing, unless the shared file and those of all `ranks` are there and
// nothing else is. A checkpoint of the same step is replaced.
void commit_checkpoint(const std::filesystem::path& dir, std::int64_t step, int ranks);

// The step that `latest` names if its checkpoint is sound, else the newest sound one, else none. Reads every
// byte of what it returns, so one rank asks and tells the others. Why others were passed over is appended to
// `passed_over`, a sentence each.
std::optional<std::int64_t> latest_checkpoint(const std::filesystem::path& dir,
                                              std::vector<std::string>* passed_over = nullptr);
// What rank `rank` of `size` goes on with.
TrainingSnapshot load_checkpoint(const std::filesystem::path& dir, std::int64_t step, int rank, int size);

// Deletes all but the newest n of the checkpoints whose files are all there, and never the one that `latest`
// names. Throws UsageError for n below 1.
void keep_last(const std::filesystem::path& dir, int n);

}  // namespace weft
