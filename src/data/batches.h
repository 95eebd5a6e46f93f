// Who trains on what: batch `step` as a function of the step alone, so a run resumes anywhere with nothing
// but its step, and any number of ranks sees the same global batch.
//
// The source is cut into windows of `length` tokens (a rest shorter than that is left out). What sequence i is
// made of depends on the kind of batch:
//   tokens   window i predicts each token's successor
//   pairs    the source is window i; window i + 1 predicts each token's successor
//   spans    window i, whose first question_length() tokens give way to a question: the tokens of a span
//            among the others, one of them and the places behind them masked. To be predicted: the places of
//            the span's first and last token. Span and mask are functions of (seed, epoch, i)
// Every epoch visits each sequence once, in an order that is a keyed permutation; its last batch may be
// short. Of each batch rank r takes the contiguous share r of `size` (even blocks of patterns/blocks.h),
// which may be uneven or empty.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "data/source.h"

namespace weft {

enum class BatchKind : std::uint8_t { tokens, pairs, spans };

// Of a sequence of spans.
constexpr std::int64_t kShortestSpans = 4;  // tokens of a sequence
constexpr std::int64_t question_length(std::int64_t length) {
  return length / 4 < 2 ? 2 : length / 4 > 16 ? 16 : length / 4;
}
// In place of a token that is masked: what stands for an unknown word in a vocabulary of words, and is in no
// text of bytes.
inline constexpr std::int64_t kMask = 0;

struct BatchOptions {
  // affects results
  BatchKind kind = BatchKind::tokens;
  std::int64_t sequences = 8;  // of a global batch
  std::int64_t length = 128;
  std::uint64_t seed = 1;
  bool shuffle = true;
  int rank = 0, size = 1;
};

// What one rank has of one step.
struct TokenBatch {
  BatchKind kind = BatchKind::tokens;
  std::int64_t step = 0;
  std::int64_t epoch = 0;
  std::int64_t global_sequences = 0;  // of all ranks
  std::int64_t first_sequence = 0;    // index of this rank's first one in the global batch
  std::int64_t sequences = 0;         // of this rank; may be 0
  std::int64_t length = 0;
  std::vector<std::int64_t> tokens;   // [sequences][length]
  std::vector<std::int64_t> targets;  // [sequences][targets_per_sequence()]
  std::vector<std::int64_t> source;   // of pairs: [sequences][length]

  std::int64_t targets_per_sequence() const { return kind == BatchKind::spans ? 2 : length; }
};

class Batches {
 public:
  // Throws UsageError for options that make no batch: no sequence in the source, a rank that is none ...
  Batches(std::shared_ptr<const DataSource> source, const BatchOptions& options);

  const BatchOptions& options() const { return options_; }
  const DataSource& source() const { return *source_; }
  std::int64_t sequences_per_epoch() const { return sequences_; }
  std::int64_t steps_per_epoch() const { return steps_; }

  TokenBatch at(std::int64_t step) const;  // any thread. REQUIRES: step >= 0
  // The sequences of the source that this rank reads in a step, in order.
  std::vector<std::int64_t> sequences_of(std::int64_t step) const;

 private:
  TokenBatch shape(std::int64_t step) const;
  void add_tokens(std::int64_t first, TokenBatch& batch) const;
  void add_span(std::int64_t sequence, TokenBatch& batch) const;

  std::shared_ptr<const DataSource> source_;
  BatchOptions options_;
  std::int64_t sequences_ = 0;
  std::int64_t steps_ = 0;
};

}  // namespace weft
