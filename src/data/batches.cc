#include "data/batches.h"

#include <algorithm>
#include <string>

#include "data/permutation.h"
#include "patterns/blocks.h"
#include "weft/error.h"

namespace weft {

Batches::Batches(std::shared_ptr<const DataSource> source, const BatchOptions& options)
    : source_(std::move(source)), options_(options) {
  const auto require = [](bool holds, const std::string& what) {
    if (!holds) throw UsageError("batches: " + what);
  };
  require(source_ != nullptr, "there is no source");
  require(options.sequences >= 1,
          "a batch has at least 1 sequence, not " + std::to_string(options.sequences));
  require(options.length >= 1, "a sequence has at least 1 token, not " + std::to_string(options.length));
  require(options.size >= 1 && options.rank >= 0 && options.rank < options.size,
          "rank " + std::to_string(options.rank) + " is none of " + std::to_string(options.size));
  sequences_ = (source_->tokens() - 1) / options.length;
  require(source_->tokens() > 0 && sequences_ >= 1,
          "the data has " + std::to_string(source_->tokens()) + " tokens, too few for one sequence of " +
              std::to_string(options.length) + " and its successor");
  steps_ = (sequences_ - 1) / options.sequences + 1;
}

TokenBatch Batches::shape(std::int64_t step) const {
  TokenBatch batch{.step = step, .epoch = step / steps_, .length = options_.length};
  const std::int64_t first = step % steps_ * options_.sequences;
  batch.global_sequences = std::min(options_.sequences, sequences_ - first);
  const Blocks shares(options_.size, batch.global_sequences);
  batch.first_sequence = shares.begin(options_.rank);
  batch.sequences = shares.count(options_.rank);
  return batch;
}

std::vector<std::int64_t> Batches::sequences_of(std::int64_t step) const {
  const TokenBatch batch = shape(step);
  const Permutation order(sequences_, options_.seed, static_cast<std::uint64_t>(batch.epoch));
  std::vector<std::int64_t> out;
  out.reserve(static_cast<std::size_t>(batch.sequences));
  const std::int64_t first = step % steps_ * options_.sequences + batch.first_sequence;
  for (std::int64_t i = first; i < first + batch.sequences; ++i) {
    out.push_back(options_.shuffle ? order(i) : i);
  }
  return out;
}

TokenBatch Batches::at(std::int64_t step) const {
  TokenBatch batch = shape(step);
  const auto length = static_cast<std::size_t>(options_.length);
  std::vector<std::int64_t> row(length + 1);
  for (const std::int64_t sequence : sequences_of(step)) {
    source_->read(sequence * options_.length, row);
    batch.tokens.insert(batch.tokens.end(), row.begin(), row.end() - 1);
    batch.targets.insert(batch.targets.end(), row.begin() + 1, row.end());
  }
  return batch;
}

}  // namespace weft
