// Inverse transformation of a uniform number for each element. Logarithm and exponential are written out: the
// C library's differ in their last bits between processors, and ranks must agree about each other's data.
#include "workload/distributions.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <string>

#include "weft/error.h"
#include "weft/random.h"

namespace weft {

namespace {

constexpr std::uint32_t kPurpose = 0x6472'6177u;  // "draw"
constexpr std::int64_t kLayers = 16;
constexpr float kLn2 = 0.69314718f;

// ln x for normal x > 0, within 1e-6: x = m 2^e with m around 1, and ln m = 2 artanh((m - 1) / (m + 1)).
float natural_log(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x) - 0x3f35'04f3u;  // sqrt(1/2)
  const int exponent = static_cast<std::int32_t>(bits) >> 23;
  const float m = std::bit_cast<float>((bits & 0x007f'ffffu) + 0x3f35'04f3u);
  const float s = (m - 1.0f) / (m + 1.0f);
  const float q = s * s;
  return 2.0f * s * (1.0f + q * (1.0f / 3 + q * (1.0f / 5 + q * (1.0f / 7)))) +
         static_cast<float>(exponent) * kLn2;
}

// e^x for |x| < 80, within 1e-5 relative.
float exponential(float x) {
  const float scaled = x * (1.0f / kLn2);
  const int whole = static_cast<int>(scaled + (scaled < 0 ? -0.5f : 0.5f));
  const float f = (scaled - static_cast<float>(whole)) * kLn2;
  const float power =
      1.0f + f * (1.0f + f * (1.0f / 2 + f * (1.0f / 6 + f * (1.0f / 24 + f * (1.0f / 120)))));
  return power * std::bit_cast<float>(static_cast<std::uint32_t>(whole + 127) << 23);
}

// The quantile of the normal distribution at (1 + x) / 2, for x in (-1, 1); `w` is -ln(1 - x^2). Giles,
// "Approximating the erfinv function", GPU Computing Gems 2011, single precision.
float gaussian_at(float x, float w) {
  constexpr std::array<float, 9> kCentre = {2.81022636e-08f,  3.43273939e-07f, -3.5233877e-06f,
                                            -4.39150654e-06f, 0.00021858087f,  -0.00125372503f,
                                            -0.00417768164f,  0.246640727f,    1.50140941f};
  constexpr std::array<float, 9> kTails = {-0.000200214257f, 0.000100950558f, 0.00134934322f,
                                           -0.00367342844f,  0.00573950773f,  -0.0076224613f,
                                           0.00943887047f,   1.00167406f,     2.83297682f};
  const bool centre = w < 5.0f;
  const float v = centre ? w - 2.5f : std::sqrt(w) - 3.0f;
  const std::array<float, 9>& c = centre ? kCentre : kTails;
  float p = c[0];
  for (std::size_t i = 1; i < c.size(); ++i) p = p * v + c[i];
  return 1.41421356f * p * x;
}

// From 32 random bits: a sign and a tail probability of 31 bits, so that the tails are as fine as they can
// be.
float gaussian_of(std::uint32_t bits) {
  const float tail = (static_cast<float>(bits >> 1) + 0.5f) * 0x1p-31f;  // in (0, 1]: P(|z| > result)
  const float inside = 1.0f - tail;
  const float z = gaussian_at(inside, -natural_log(tail * (2.0f - tail)));
  return (bits & 1) != 0 ? z : -z;
}
float laplace_of(std::uint32_t bits) {
  const float x = -natural_log((static_cast<float>(bits >> 1) + 0.5f) * 0x1p-31f);
  return (bits & 1) != 0 ? x : -x;
}
// The lowest bit is the sign, the others are for the exponent.
float heavy_of(std::uint32_t bits) {
  const float x = exponential(1.5f * gaussian_of((bits & ~3u) | (bits >> 1 & 1)));
  return (bits & 1) != 0 ? x : -x;
}

template <class Of>
void fill(const Draw& what, std::int64_t first, std::span<float> out, Of of) {
  const PhiloxKey key{static_cast<std::uint32_t>(what.seed), static_cast<std::uint32_t>(what.seed >> 32)};
  PhiloxCounter block{};
  for (std::size_t i = 0; i < out.size(); ++i) {
    const auto at = static_cast<std::uint64_t>(first) + i;
    if (i == 0 || at % 4 == 0) {
      block = philox({static_cast<std::uint32_t>(at / 4), kPurpose, what.rank, what.step}, key);
    }
    out[i] = of(block[at % 4]);
  }
}

float layer_scale(std::int64_t layer) {  // 100^(-layer / 15)
  return exponential(-4.60517019f * static_cast<float>(layer) / static_cast<float>(kLayers - 1));
}

}  // namespace

Distribution distribution_of(std::string_view name) {
  for (const Distribution d : kDistributions) {
    if (name_of(d) == name) return d;
  }
  throw UsageError("unknown distribution '" + std::string(name) + "': gaussian, laplace, layered or heavy");
}

void draw(const Draw& what, std::int64_t total, std::int64_t first, std::span<float> out) {
  switch (what.distribution) {
    case Distribution::gaussian:
      return fill(what, first, out, gaussian_of);
    case Distribution::laplace:
      return fill(what, first, out, laplace_of);
    case Distribution::heavy:
      return fill(what, first, out, heavy_of);
    case Distribution::layered:
      break;
  }
  fill(what, first, out, gaussian_of);
  const std::int64_t length = (total + kLayers - 1) / kLayers;  // of a layer
  for (std::size_t i = 0; i < out.size();) {
    const std::int64_t layer = (first + static_cast<std::int64_t>(i)) / length;
    const auto end = std::min(out.size(), static_cast<std::size_t>((layer + 1) * length - first));
    const float scale = layer_scale(layer);
    for (; i < end; ++i) out[i] *= scale;
  }
}

}  // namespace weft
