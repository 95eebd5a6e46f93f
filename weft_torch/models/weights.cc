#include "weft_torch/models/weights.h"

#include <algorithm>
#include <cmath>

#include "weft/random.h"
#include "workload/distributions.h"

namespace weft {

namespace {

constexpr std::uint32_t kWords = 0x776f'7264u;  // "word"

// FNV-1a.
std::uint64_t hash_of(std::string_view name) {
  std::uint64_t hash = 0xcbf2'9ce4'8422'2325u;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x0000'0100'0000'01b3u;
  return hash;
}

}  // namespace

void fill_normal(std::uint64_t seed, std::string_view name, float deviation, std::int64_t first,
                 std::span<float> out) {
  const std::uint64_t hash = hash_of(name);
  const Draw what{.distribution = Distribution::gaussian,
                  .seed = seed,
                  .rank = static_cast<std::uint32_t>(hash),
                  .step = static_cast<std::uint32_t>(hash >> 32)};
  draw(what, first + static_cast<std::int64_t>(out.size()), first, out);
  for (float& x : out) x *= deviation;
}

// As Random draws them, from any element on.
void fill_uniform(std::uint64_t seed, std::string_view name, float bound, std::int64_t first,
                  std::span<float> out) {
  const std::uint64_t hash = hash_of(name);
  const PhiloxKey key{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)};
  PhiloxCounter block{};
  for (std::size_t i = 0; i < out.size(); ++i) {
    const auto at = static_cast<std::uint64_t>(first) + i;
    if (i == 0 || at % 4 == 0) {
      block = philox({static_cast<std::uint32_t>(at / 4), static_cast<std::uint32_t>(hash),
                      static_cast<std::uint32_t>(hash >> 32), 0},
                     key);
    }
    // 24 bits, so that the float is exact and never the bound itself.
    out[i] = bound * ((static_cast<float>(block[at % 4] >> 8) + 0.5f) * 0x1p-23f - 1.0f);
  }
}

void draw_words(std::uint64_t seed, std::int64_t step, std::int64_t vocabulary, std::span<std::int64_t> out) {
  const double range = std::log(static_cast<double>(vocabulary) + 1);
  Random random(seed, kWords, static_cast<std::uint32_t>(step), static_cast<std::uint32_t>(step >> 32));
  for (std::int64_t& word : out) {
    const auto drawn = static_cast<std::int64_t>(std::exp(random.uniform() * range)) - 1;
    word = std::clamp<std::int64_t>(drawn, 0, vocabulary - 1);
  }
}

}  // namespace weft
