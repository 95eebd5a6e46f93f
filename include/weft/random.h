// Random numbers that depend on what is drawn and not on who draws it when: a counter-based generator (Philox
// 4x32-10). The key says what (seed, purpose), the counter says which one (step, layer, token, ...), so that
// ranks, restarts, recomputation and any order of evaluation agree.
#pragma once

#include <array>
#include <cstdint>

namespace weft {

using PhiloxCounter = std::array<std::uint32_t, 4>;
using PhiloxKey = std::array<std::uint32_t, 2>;

// The ten rounds of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
constexpr PhiloxCounter philox(PhiloxCounter counter, PhiloxKey key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53u} * counter[0];
    const std::uint64_t b = std::uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<std::uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(b),
               static_cast<std::uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(a)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return counter;
}

// A stream of numbers for one drawn thing. Satisfies UniformRandomBitGenerator.
class Random {
 public:
  using result_type = std::uint32_t;
  // What is drawn: e.g. Random(seed, kDropout, step, layer).
  explicit constexpr Random(std::uint64_t seed, std::uint32_t purpose = 0, std::uint32_t a = 0,
                            std::uint32_t b = 0)
      : key_{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)},
        counter_{0, purpose, a, b} {}

  static constexpr result_type min() { return 0; }
  static constexpr result_type max() { return 0xffff'ffffu; }
  constexpr result_type operator()() {
    if (used_ == 4) {
      block_ = philox(counter_, key_);
      ++counter_[0];
      used_ = 0;
    }
    return block_[used_++];
  }
  constexpr double uniform() { return ((*this)() + 0.5) * 0x1p-32; }  // in (0, 1)
  // Below `bound` without bias worth mentioning (2^-32 relative). REQUIRES: bound > 0.
  constexpr std::uint32_t below(std::uint32_t bound) {
    return static_cast<std::uint32_t>((std::uint64_t{(*this)()} * bound) >> 32);
  }

 private:
  PhiloxKey key_;
  PhiloxCounter counter_;
  PhiloxCounter block_{};
  unsigned used_ = 4;
};

}  // namespace weft
