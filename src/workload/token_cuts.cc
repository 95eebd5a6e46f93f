#include "workload/token_cuts.h"

#include "patterns/blocks.h"

namespace weft {

TokenCuts::TokenCuts(const Outline& outline, const EmulationOptions& options) {
  const std::int64_t tokens = outline.tokens_per_rank, sequences = options.sequences;
  const bool whole = sequences > 0 && tokens % sequences == 0;
  const std::int64_t length = whole ? tokens / sequences : 1;
  const Blocks cuts(options.micro_batches, tokens / length);
  const double even = static_cast<double>(tokens) / options.micro_batches;
  for (int m = 0; m < options.micro_batches; ++m) {
    tokens_.push_back(cuts.count(m) * length);
    // (To the bit where sequences divide evenly. Single tokens take what an even share does: nobody deals them.)
    weights_.push_back(whole && tokens > 0 ? static_cast<double>(tokens_.back()) / even : 1);
  }
}

}  // namespace weft
