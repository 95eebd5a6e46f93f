// Ids that a step looks up in a table, without a model: what an outline says of them, and draws after it.
//
// A rank's own ids are Zipf-distributed: id i with a probability proportional to 1 / (i + 1)^zipf (words are
// numbered from the most frequent). Shared ones, as a sampled softmax draws them, are log-uniform and the same
// on all ranks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "workload/outline.h"

namespace weft {

// What a batch's ids say of a table: how many, of how many rows, and the exponent with which as many draws are
// expected to hit as many rows. The last `shared` of them are the same on all ranks.
void describe_lookups(OutlineTable& table, std::span<const std::int64_t> ids, std::int64_t shared);
// The same without a batch: so many ids, Zipf-distributed with exponent 1.
void assume_lookups(OutlineTable& table, std::int64_t own, std::int64_t shared);

// Threads: any, once it is made.
class TableDraws {
 public:
  explicit TableDraws(const OutlineTable& table);
  // A function of all of them, and of the table's name.
  std::vector<std::int64_t> ids(std::uint64_t seed, int rank, std::int64_t step) const;

 private:
  std::uint32_t purpose_;
  std::int64_t rows_, own_, shared_;
  std::vector<double> cumulative_;  // [i]: probability of ids 0..i
};

}  // namespace weft
