// Who trains on what: batch `step` as a function of the step alone, so a run resumes anywhere with nothing
// but its step, and any number of ranks sees the same global batch.
//
// The source is cut into sequences of `length` tokens (a rest shorter than that is left out). Sequence i has
// the tokens [i length, (i + 1) length) and predicts each one's successor. Every epoch visits each sequence
// once, in an order that is a keyed permutation; its last batch may be short. Of each batch rank r takes the
// contiguous share r of `size` (even blocks of patterns/blocks.h), which may be uneven or empty.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "data/source.h"

namespace weft {

struct BatchOptions {
  // affects results
  std::int64_t sequences = 8;  // of a global batch
  std::int64_t length = 128;
  std::uint64_t seed = 1;
  bool shuffle = true;
  int rank = 0, size = 1;
};

// What one rank has of one step.
struct TokenBatch {
  std::int64_t step = 0;
  std::int64_t epoch = 0;
  std::int64_t global_sequences = 0;  // of all ranks
  std::int64_t first_sequence = 0;    // index of this rank's first one in the global batch
  std::int64_t sequences = 0;         // of this rank; may be 0
  std::int64_t length = 0;
  std::vector<std::int64_t> tokens, targets;  // [sequences][length]
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

  std::shared_ptr<const DataSource> source_;
  BatchOptions options_;
  std::int64_t sequences_ = 0;
  std::int64_t steps_ = 0;
};

}  // namespace weft
