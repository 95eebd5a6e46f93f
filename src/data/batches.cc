#include "data/batches.h"

#include <algorithm>
#include <string>

#include "data/permutation.h"
#include "patterns/blocks.h"
#include "weft/error.h"
#include "weft/random.h"

namespace weft {

namespace {

constexpr std::uint32_t kSpan = 0x7370'616eu;  // "span"

}  // namespace

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
  require(options.kind != BatchKind::spans || options.length >= kShortestSpans,
          "a sequence with a question has at least " + std::to_string(kShortestSpans) + " tokens, not " +
              std::to_string(options.length));
  const std::int64_t windows = (source_->tokens() - 1) / options.length;
  sequences_ = options.kind == BatchKind::pairs ? windows - 1 : windows;
  const std::string_view one = options.kind == BatchKind::pairs ? "one pair of sequences" : "one sequence";
  require(source_->tokens() > 0 && sequences_ >= 1,
          "the data has " + std::to_string(source_->tokens()) + " tokens, too few for " + std::string(one) +
              " of " + std::to_string(options.length) + " and its successor");
  steps_ = (sequences_ - 1) / options.sequences + 1;
}

TokenBatch Batches::shape(std::int64_t step) const {
  TokenBatch batch{.kind = options_.kind, .step = step, .epoch = step / steps_, .length = options_.length};
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
  for (const std::int64_t sequence : sequences_of(step)) {
    const std::int64_t first = sequence * options_.length;
    switch (options_.kind) {
      case BatchKind::tokens:
        add_tokens(first, batch);
        break;
      case BatchKind::pairs: {
        std::vector<std::int64_t> row(static_cast<std::size_t>(options_.length));
        source_->read(first, row);
        batch.source.insert(batch.source.end(), row.begin(), row.end());
        add_tokens(first + options_.length, batch);
        break;
      }
      case BatchKind::spans:
        add_span(sequence, batch);
        break;
    }
  }
  return batch;
}

void Batches::add_tokens(std::int64_t first, TokenBatch& batch) const {
  std::vector<std::int64_t> row(static_cast<std::size_t>(options_.length) + 1);
  source_->read(first, row);
  batch.tokens.insert(batch.tokens.end(), row.begin(), row.end() - 1);
  batch.targets.insert(batch.targets.end(), row.begin() + 1, row.end());
}

// A span has at least two tokens: of one that is masked nothing would be left to find it by.
void Batches::add_span(std::int64_t sequence, TokenBatch& batch) const {
  const std::int64_t length = options_.length, question = question_length(length);
  std::vector<std::int64_t> row(static_cast<std::size_t>(length));
  source_->read(sequence * length, row);
  Random random(options_.seed, kSpan, static_cast<std::uint32_t>(batch.epoch),
                static_cast<std::uint32_t>(sequence));
  const auto below = [&](std::int64_t bound) {
    return static_cast<std::int64_t>(random.below(static_cast<std::uint32_t>(bound)));
  };
  const std::int64_t longest = std::min(question, length - question);
  const std::int64_t span = 2 + below(longest - 1);
  const std::int64_t first = question + below(length - question - span + 1);
  const std::int64_t masked = below(span);
  for (std::int64_t i = 0; i < question; ++i) {
    const bool shown = i < span && i != masked;
    row[static_cast<std::size_t>(i)] = shown ? row[static_cast<std::size_t>(first + i)] : kMask;
  }
  batch.tokens.insert(batch.tokens.end(), row.begin(), row.end());
  batch.targets.insert(batch.targets.end(), {first, first + span - 1});
}

}  // namespace weft
