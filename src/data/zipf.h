// Synthetic tokens, Zipf-distributed: word w with a probability proportional to 1 / (w + 1), independent of
// each other. Token i is a function of (seed, i): nothing is stored.
#pragma once

#include <vector>

#include "data/source.h"

namespace weft {

class ZipfSource final : public DataSource {
 public:
  // Throws UsageError unless vocabulary and tokens are positive.
  ZipfSource(std::int64_t vocabulary, std::int64_t tokens, std::uint64_t seed);

  std::int64_t vocabulary() const override { return static_cast<std::int64_t>(cumulative_.size()); }
  std::int64_t tokens() const override { return tokens_; }
  void read(std::int64_t first, std::span<std::int64_t> out) const override;
  std::string description() const override;

 private:
  std::vector<double> cumulative_;  // [w]: probability of words 0..w
  std::int64_t tokens_;
  std::uint64_t seed_;
};

}  // namespace weft
