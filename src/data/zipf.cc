#include "data/zipf.h"

#include <algorithm>

#include "weft/error.h"
#include "weft/random.h"

namespace weft {

namespace {

constexpr std::uint32_t kPurpose = 0x7a69'7066u;  // "zipf"

}  // namespace

ZipfSource::ZipfSource(std::int64_t vocabulary, std::int64_t tokens, std::uint64_t seed)
    : tokens_(tokens), seed_(seed) {
  if (vocabulary < 1 || vocabulary > std::int64_t{1} << 24 || tokens < 1) {
    throw UsageError("synthetic data needs a vocabulary of 1 to 2^24 words and at least 1 token, not " +
                     std::to_string(vocabulary) + " and " + std::to_string(tokens));
  }
  cumulative_.resize(static_cast<std::size_t>(vocabulary));
  double sum = 0;
  for (std::size_t w = 0; w < cumulative_.size(); ++w)
    cumulative_[w] = sum += 1.0 / static_cast<double>(w + 1);
  for (double& c : cumulative_) c /= sum;
}

void ZipfSource::read(std::int64_t first, std::span<std::int64_t> out) const {
  const PhiloxKey key{static_cast<std::uint32_t>(seed_), static_cast<std::uint32_t>(seed_ >> 32)};
  for (std::size_t i = 0; i < out.size(); ++i) {
    const std::uint64_t at = static_cast<std::uint64_t>(first) + i;
    const PhiloxCounter bits =
        philox({static_cast<std::uint32_t>(at), kPurpose, static_cast<std::uint32_t>(at >> 32), 0}, key);
    const double u = (bits[0] + 0.5) * 0x1p-32;
    const auto found = std::upper_bound(cumulative_.begin(), cumulative_.end() - 1, u);
    out[i] = found - cumulative_.begin();
  }
}

std::string ZipfSource::description() const {
  return "synthetic: " + std::to_string(tokens_) + " Zipf-distributed tokens of " +
         std::to_string(vocabulary()) + " words, seed " + std::to_string(seed_);
}

}  // namespace weft
