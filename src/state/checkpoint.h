// Checkpoints of a training job: a folder of safetensors files for each saved step.
//
//   <dir>/step-<N>/rank-<r>-of-<P>.safetensors   the shards that rank r stored
//   <dir>/step-<N>/index.safetensors             which file has which range of what; metadata
//   <dir>/latest                                 "step-<N>": the one that was committed last
//   <dir>/.step-<N>.tmp, .weft-*.tmp             unfinished: nobody reads them, begin_checkpoint() removes
//                                                them
//
// Saving, with a barrier of the caller's between the steps (nothing here communicates):
//   Step 1  rank 0: begin_checkpoint(); it makes <dir>/.step-<N>.tmp
//   Step 2  every rank: write_shards(). Shards are stored by who holds them, what several ranks hold by one
//           of them, so that sizes balance; sums and restarts (state/rows.h) by each
//   Step 3  rank 0: commit_checkpoint(), only if no rank failed in step 2. It reads the heads of all files
//           and commits only a whole: no range is missing or there twice, ranks agree on what several of
//           them have
// The folder gets its name, and `latest` its line, by a rename after everything is on the disk: a crash, a
// kill or a full disk at any moment leaves the checkpoints before it and `latest` as they were.
//
// Loading: registry.load(Checkpoint(dir, step)). A rank reads the index and the ranges that it needs, in
// pieces of 1 MiB with a checksum each: no rank needs the memory of the whole model. On the same layout every
// bit comes back; on any other the rules of the rows hold.
//
// A value is checked before it is written and after it was read, by the same rules. Checksums find damage;
// the index has those of the files, so that a file of another checkpoint or rank is not taken for its own.
// All errors are UsageErrors of one sentence with the path.
//
// REQUIRES: one job at a time saves into `dir`. Thread: write_shards() of different ranks may run at the same
// time; what rank 0 does in steps 1 and 3, and keep_last(), beside nothing that writes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "state/checkpoint_files.h"
#include "state/registry.h"

namespace weft {

// Removes what unfinished checkpoints left in `dir`, which it creates if need be.
void begin_checkpoint(const std::filesystem::path& dir, std::int64_t step);
// Of the info: step and seed.
void write_shards(const std::filesystem::path& dir, const CheckpointInfo& info, StateRegistry& registry,
                  int rank, int size);
// Throws UsageError, and commits nothing, unless the files of all `ranks` are there, are a whole, and nothing
// else is there. A checkpoint of the same step is replaced.
void commit_checkpoint(const std::filesystem::path& dir, const CheckpointInfo& info, int ranks);

// The step that `latest` names if its checkpoint is sound, else the newest sound one, else none. Reads every
// byte of what it returns, so one rank asks and tells the others. Why others were passed over is appended to
// `passed_over`, a sentence each.
std::optional<std::int64_t> latest_checkpoint(const std::filesystem::path& dir,
                                              std::vector<std::string>* passed_over = nullptr);

// Deletes all but the newest n of the checkpoints whose files are all there, and never the one that `latest`
// names. Throws UsageError for n below 1.
void keep_last(const std::filesystem::path& dir, int n);

// A committed checkpoint; files are opened as ranges of them are asked for. Thread: one at a time.
class Checkpoint final : public StateSource {
 public:
  // Reads the index. Throws UsageError for one that is not there, damaged, of another version, or no whole.
  Checkpoint(const std::filesystem::path& dir, std::int64_t step);

  const CheckpointInfo& info() const { return index_.info; }
  int ranks() const { return static_cast<int>(index_.files.size()); }  // that saved it
  std::span<const Saved> rows() const override { return rows_; }
  void read(std::size_t row, std::size_t first, std::span<std::byte> into) const override;
  std::string where() const override { return "'" + folder_.string() + "'"; }
  void check() const;  // reads every byte; throws UsageError for the first that is not sound

 private:
  struct Place {
    std::size_t file = 0;
    RowLine line;
  };
  const ShardsFile& file(std::size_t i) const;
  std::span<const std::byte> piece(std::size_t row, std::size_t index) const;

  std::filesystem::path folder_;
  CheckpointIndex index_;
  std::vector<Saved> rows_;
  std::vector<Place> places_;  // of each row
  // Kept between reads: some open files, and the piece that was read last.
  mutable std::vector<std::unique_ptr<ShardsFile>> files_;
  mutable std::size_t num_open_ = 0;
  mutable std::vector<std::byte> piece_;
  mutable std::optional<std::pair<std::size_t, std::size_t>> piece_of_;  // row and index
};

}  // namespace weft
