// Vectors to test and measure selection on. Every element is a function of (seed, rank, step, index): any
// rank can compute another's, and any part of a vector can be made alone.
//
//   gaussian  mean 0, standard deviation 1
//   laplace   density exp(-|x|) / 2
//   layered   gaussian in 16 layers of equal length, whose scales fall geometrically from 1 to 1/100
//   heavy     log-normal magnitudes, exp(1.5 z) with z gaussian, either sign: a few elements hold most of the
//             energy
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace weft {

enum class Distribution : std::uint8_t { gaussian, laplace, layered, heavy };
inline constexpr Distribution kDistributions[] = {Distribution::gaussian, Distribution::laplace,
                                                  Distribution::layered, Distribution::heavy};

constexpr std::string_view name_of(Distribution d) {
  constexpr std::string_view names[] = {"gaussian", "laplace", "layered", "heavy"};
  return static_cast<std::size_t>(d) < std::size(names) ? names[static_cast<std::size_t>(d)] : "unknown";
}
// Throws UsageError that lists them.
Distribution distribution_of(std::string_view name);

struct Draw {
  Distribution distribution = Distribution::gaussian;
  std::uint64_t seed = 0;
  std::uint32_t rank = 0;
  std::uint32_t step = 0;
};

// Elements [first, first + out.size()) of a vector of `total` elements. About 10 ns an element. REQUIRES:
// total <= 2^34.
void draw(const Draw& what, std::int64_t total, std::int64_t first, std::span<float> out);
inline void draw(const Draw& what, std::span<float> out) {
  draw(what, static_cast<std::int64_t>(out.size()), 0, out);
}

}  // namespace weft
