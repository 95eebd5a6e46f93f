// The vectors that selection is tested and measured on are what their names say, and can be made in parts.
#include "workload/distributions.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "weft/error.h"

namespace weft {
namespace {

struct Moments {
  double mean = 0, magnitude = 0, square = 0, above_three = 0;
};
Moments moments_of(std::span<const float> x) {
  Moments m;
  for (const float v : x) {
    m.mean += v;
    m.magnitude += std::fabs(v);
    m.square += static_cast<double>(v) * v;
    m.above_three += std::fabs(v) > 3 ? 1 : 0;
  }
  const auto n = static_cast<double>(x.size());
  return {m.mean / n, m.magnitude / n, m.square / n, m.above_three / n};
}

// A million elements: a mean of elements with deviation s is within 5 s / 1000 of its own (once in a million
// seeds it is not).
TEST(Distributions, HaveTheirMoments) {
  std::vector<float> x(1'000'000);
  draw({.distribution = Distribution::gaussian, .seed = 1}, x);
  Moments m = moments_of(x);
  EXPECT_NEAR(m.mean, 0, 0.005);
  EXPECT_NEAR(m.magnitude, std::sqrt(2 / M_PI), 0.005);
  EXPECT_NEAR(m.square, 1, 0.008);           // deviation of z^2 is 1.42
  EXPECT_NEAR(m.above_three, 0.0027, 3e-4);  // deviation 0.052
  draw({.distribution = Distribution::laplace, .seed = 1}, x);
  m = moments_of(x);
  EXPECT_NEAR(m.mean, 0, 0.008);
  EXPECT_NEAR(m.magnitude, 1, 0.005);
  EXPECT_NEAR(m.above_three, std::exp(-3), 2e-3);
  draw({.distribution = Distribution::heavy, .seed = 1}, x);
  m = moments_of(x);
  EXPECT_NEAR(m.mean, 0, 0.05);  // deviation exp(1.5^2) = 9.5
  EXPECT_NEAR(m.magnitude, std::exp(1.125), 0.05);
  for (const float v : x) ASSERT_TRUE(std::isfinite(v));
}

TEST(Distributions, LayersDifferAHundredTimes) {
  std::vector<float> x(160'000);
  draw({.distribution = Distribution::layered, .seed = 2}, x);
  const auto deviation = [&](std::size_t layer) {
    return std::sqrt(moments_of(std::span(x).subspan(layer * 10'000, 10'000)).square);
  };
  EXPECT_NEAR(deviation(0), 1, 0.04);
  EXPECT_NEAR(deviation(15), 0.01, 0.0004);
  EXPECT_NEAR(deviation(3) / deviation(4), std::pow(100, 1.0 / 15), 0.08);
}

TEST(Distributions, PartsAreOfTheWhole) {
  for (const Distribution distribution : kDistributions) {
    std::vector<float> whole(1003);
    const Draw what{.distribution = distribution, .seed = 3, .rank = 2, .step = 9};
    draw(what, whole);
    for (const std::size_t first : {0, 1, 2, 500, 1002}) {
      std::vector<float> part(1003 - first);
      draw(what, 1003, static_cast<std::int64_t>(first), part);
      EXPECT_TRUE(std::equal(part.begin(), part.end(), whole.begin() + static_cast<std::ptrdiff_t>(first)));
    }
    for (const Draw& other :
         {Draw{distribution, 4, 2, 9}, Draw{distribution, 3, 1, 9}, Draw{distribution, 3, 2, 8}}) {
      std::vector<float> x(1003);
      draw(other, x);
      EXPECT_NE(x, whole);
    }
    EXPECT_EQ(distribution_of(name_of(distribution)), distribution);
  }
  EXPECT_THROW(distribution_of("uniform"), UsageError);
}

}  // namespace
}  // namespace weft
