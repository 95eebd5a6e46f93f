// Philox 4x32-10 with the counter (eight features, token, step) under a key of (seed, site): each call gives
// 16 bits for eight features. Calls of a token are done kLanes at a time, word by word, so that the compiler
// can keep a word of all lanes in vector registers; the rounds are those of weft/random.h, and a test
// compares them.
#include "weft_torch/models/dropout_mask.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>

#include "weft/random.h"

namespace weft {

namespace {

constexpr std::uint32_t kDropout = 0x6472'6f70u, kJitter = 0x6a69'7474u;  // "drop", "jitt"
constexpr std::size_t kLanes = 16;
constexpr std::size_t kPerCall = 8;
using Lanes = std::array<std::uint32_t, kLanes>;

struct Words {
  Lanes a, b, c, d;
};

void rounds(Words& w, PhiloxKey key) {
  for (int round = 0; round < 10; ++round) {
    for (std::size_t i = 0; i < kLanes; ++i) {
      const std::uint64_t x = std::uint64_t{0xD2511F53u} * w.a[i];
      const std::uint64_t y = std::uint64_t{0xCD9E8D57u} * w.c[i];
      w.a[i] = static_cast<std::uint32_t>(y >> 32) ^ w.b[i] ^ key[0];
      w.b[i] = static_cast<std::uint32_t>(y);
      w.c[i] = static_cast<std::uint32_t>(x >> 32) ^ w.d[i] ^ key[1];
      w.d[i] = static_cast<std::uint32_t>(x);
    }
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
}

// 16 random bits of every token's every feature, as `of_bits` makes numbers of them.
template <class OfBits>
void write(const DropoutKey& key, std::uint32_t purpose, const DropoutRows& rows, std::span<float> out,
           OfBits of_bits) {
  const PhiloxKey seed{static_cast<std::uint32_t>(key.seed), static_cast<std::uint32_t>(key.seed >> 32)};
  const PhiloxCounter mixed = philox({purpose, key.site, 0, 0}, seed);
  const auto step = static_cast<std::uint64_t>(key.step);
  const auto features = static_cast<std::size_t>(rows.features);
  const std::size_t tokens = features == 0 ? 0 : out.size() / features;

  for (std::size_t t = 0; t < tokens; ++t) {
    const std::uint64_t token = static_cast<std::uint64_t>(rows.first_token) + t;
    const std::uint64_t high = token >> 32 ^ (step >> 32) << 16;
    const std::span<float> row = out.subspan(t * features, features);
    for (std::size_t first = 0; first < features; first += kLanes * kPerCall) {
      Words w;
      for (std::size_t i = 0; i < kLanes; ++i) {
        w.a[i] = static_cast<std::uint32_t>(first / kPerCall + i);
        w.b[i] = static_cast<std::uint32_t>(token);
        w.c[i] = static_cast<std::uint32_t>(step);
        w.d[i] = static_cast<std::uint32_t>(high);
      }
      rounds(w, {mixed[0], mixed[1]});
      // Feature first + half * kLanes + lane: every half-word of every lane is one run of neighbours.
      std::array<float, kLanes * kPerCall> values;
      const Lanes* const words[] = {&w.a, &w.b, &w.c, &w.d};
      for (std::size_t word = 0; word < 4; ++word) {
        for (std::size_t i = 0; i < kLanes; ++i) {
          values[2 * word * kLanes + i] = of_bits((*words[word])[i] & 0xffffu);
          values[(2 * word + 1) * kLanes + i] = of_bits((*words[word])[i] >> 16);
        }
      }
      std::copy_n(values.begin(), std::min(values.size(), features - first),
                  row.begin() + static_cast<std::ptrdiff_t>(first));
    }
  }
}

}  // namespace

void write_dropout_mask(const DropoutKey& key, double probability, const DropoutRows& rows,
                        std::span<float> out) {
  const auto threshold = static_cast<std::uint32_t>(std::lround(probability * 65536));
  const float scale = threshold < 65536 ? 65536.0f / static_cast<float>(65536 - threshold) : 0.0f;
  write(key, kDropout, rows, out,
        [threshold, scale](std::uint32_t bits) { return bits < threshold ? 0.0f : scale; });
}

void write_jitter(const DropoutKey& key, double amount, const DropoutRows& rows, std::span<float> out) {
  const auto wide = static_cast<float>(amount);
  write(key, kJitter, rows, out,
        [wide](std::uint32_t bits) { return 1 + wide * ((static_cast<float>(bits) + 0.5f) / 32768.0f - 1); });
}

}  // namespace weft
