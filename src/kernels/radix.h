// The k-th largest of many magnitude keys without sorting: three histograms of 11, 11 and 9 bits, from the
// highest bits down, each over the keys that share the bits found so far. Three passes, 8 KiB of stack, no
// memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace weft::kernels {

// The k largest keys are those above `key` and `ties` of those equal to it (the first, by index).
struct Bar {
  std::uint32_t key = 0;
  std::int64_t ties = 0;
};

// `each(f)` calls f(key) for every key, always the same ones. Keys are below 2^31; zeros do not count: where
// fewer than k keys are not zero the bar is {0, 0}, which they all pass. REQUIRES: k >= 1.
template <class Each>
Bar find_bar(std::int64_t k, Each&& each) {
  constexpr int kShifts[] = {20, 9, 0};
  constexpr int kAbove[] = {31, 20, 9};  // the bits from here up are known
  std::array<std::uint32_t, 2048> histogram;
  std::uint32_t known = 0;
  for (int level = 0; level < 3; ++level) {
    const int shift = kShifts[level];
    const int above = kAbove[level];
    const std::uint32_t mask = (1u << (above - shift)) - 1;
    histogram.fill(0);
    each([&](std::uint32_t key) {
      if (key != 0 && key >> above == known) ++histogram[key >> shift & mask];
    });
    int bin = static_cast<int>(mask);
    for (; bin >= 0 && k > histogram[static_cast<std::size_t>(bin)]; --bin)
      k -= histogram[static_cast<std::size_t>(bin)];
    if (bin < 0) return {};  // only on the first level
    known = known << (above - shift) | static_cast<std::uint32_t>(bin);
  }
  return {known, k};
}

}  // namespace weft::kernels
