// How a rank's tokens of a step are cut into micro-batches: whole sequences, as a trainer deals them, where it is known how
// many there are; else evenly. Of few sequences some micro-batches are empty, and take no time.
//
// Thread: any.
#pragma once

#include <cstdint>
#include <vector>

#include "workload/emulate.h"

namespace weft {

class TokenCuts {
 public:
  TokenCuts(const Outline& outline, const EmulationOptions& options);
  std::int64_t of(int micro_batch) const { return tokens_[static_cast<std::size_t>(micro_batch)]; }
  std::int64_t most() const { return tokens_.front(); }
  const std::vector<std::int64_t>& all() const { return tokens_; }
  // Of its seconds, over those of an even share.
  double weight(int micro_batch) const { return weights_[static_cast<std::size_t>(micro_batch)]; }

 private:
  std::vector<std::int64_t> tokens_;
  std::vector<double> weights_;
};

}  // namespace weft
