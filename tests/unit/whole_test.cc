// Rows as whole numbers of few bits against the definition written out, bit by bit.
#include "kernels/whole.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "weft/random.h"

namespace weft {
namespace {

using Values = std::vector<float>;
using Bytes = std::vector<std::byte>;

Bytes coded_of(const WholeShape& shape, Values& matrix, bool finite = true) {
  Bytes out(static_cast<std::size_t>(whole_bytes(shape)), std::byte{0xa5});
  EXPECT_EQ(to_whole(shape, matrix, out), finite);
  return out;
}
Values values_of(const WholeShape& shape, const Bytes& coded) {
  Values out(static_cast<std::size_t>(shape.rows * shape.columns));
  from_whole(shape, coded, out);
  return out;
}

// By hand: 7 steps of 0.5; ties go to even.
TEST(Whole, IsTheNearestMultiple) {
  const WholeShape shape{.rows = 2, .columns = 5, .bits = 4};
  Values matrix{3.5F, -3.5F, 0.25F, 0.75F, -1.2F, 0, 0, 0, 0, 0};
  const Values given = matrix;
  const Bytes coded = coded_of(shape, matrix);
  ASSERT_EQ(coded.size(), 2 * 4 + 2 * 3 + 2U);  // scales, five codes of 4 bits in three bytes, filling
  const Bytes expected{std::byte{0x0e}, std::byte{0x97}, std::byte{0x05},  // 7 -7 | 0 2 | -2
                       std::byte{0x77}, std::byte{0x77}, std::byte{0x07},  // zeros
                       std::byte{0},    std::byte{0}};
  EXPECT_EQ(Bytes(coded.begin() + 8, coded.end()), expected);
  const Values got = values_of(shape, coded);
  EXPECT_EQ(got, (Values{3.5F, -3.5F, 0, 1, -1, 0, 0, 0, 0, 0}));
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_EQ(matrix[i], given[i] - got[i]);
}

TEST(Whole, SizesAreTheFormula) {
  for (const int bits : {4, 8}) {
    for (const std::int64_t rows : {0, 1, 3, 7}) {
      for (const std::int64_t columns : {1, 2, 5, 8, 33}) {
        const std::int64_t bytes = rows * (4 + (columns * bits + 7) / 8);
        EXPECT_EQ(whole_bytes({rows, columns, bits}), (bytes + 3) / 4 * 4);
      }
    }
  }
}

// What is left is exact, and the largest of a row is where it was to a rounding, at any size of numbers: of huge ones, of
// denormal ones, and of rows too small for a scale, which are left whole.
TEST(Whole, LeavesExactlyTheRest) {
  Random random(3);
  for (const int bits : {4, 8}) {
    for (const float size : {1.0F, 1e30F, 1e-30F, 1e-38F, 1e-44F, 0.0F}) {
      const WholeShape shape{.rows = 9, .columns = 31, .bits = bits};
      Values matrix(static_cast<std::size_t>(shape.rows * shape.columns));
      for (float& v : matrix) v = static_cast<float>(2 * random.uniform() - 1) * size;
      const Values given = matrix, got = values_of(shape, coded_of(shape, matrix));
      const double levels = bits == 4 ? 7 : 127;
      for (std::int64_t r = 0; r < shape.rows; ++r) {
        double most = 0;
        for (std::int64_t c = 0; c < shape.columns; ++c)
          most = std::max(most, std::abs(static_cast<double>(given[static_cast<std::size_t>(r * 31 + c)])));
        for (std::int64_t c = 0; c < shape.columns; ++c) {
          const auto i = static_cast<std::size_t>(r * 31 + c);
          EXPECT_EQ(static_cast<double>(matrix[i]),
                    static_cast<double>(given[i]) - static_cast<double>(got[i]));
          // (Below float's normal numbers a scale is rounded as well.)
          if (size >= 1e-30F) {
            EXPECT_LE(std::abs(matrix[i]), 0.500001 * most / levels);
          }
        }
      }
    }
  }
}

TEST(Whole, WhatIsNotFiniteIsItsRowsAlone) {
  const WholeShape shape{.rows = 3, .columns = 4, .bits = 8};
  for (const float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::quiet_NaN()}) {
    Values matrix(12, 1.0F);
    matrix[6] = bad;
    const Values got = values_of(shape, coded_of(shape, matrix, false));
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_EQ(std::isnan(got[i]), i >= 4 && i < 8) << i;
  }
}

// The largest float over 127 is rounded up: 127 times that would be infinite, and so what is left.
TEST(Whole, OfTheLargestNumbersIsFinite) {
  constexpr float kMost = std::numeric_limits<float>::max();
  EXPECT_TRUE(std::isinf(kMost / 127.0F * 127.0F));
  for (const int bits : {4, 8}) {
    const WholeShape shape{.rows = 1, .columns = 5, .bits = bits};
    Values matrix{kMost, -kMost, kMost / 2, 1.0F, std::nextafter(kMost, 0.0F)};
    const Values given = matrix, got = values_of(shape, coded_of(shape, matrix));
    const double half = 0.500001 * kMost / (bits == 4 ? 7 : 127);
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_TRUE(std::isfinite(got[i]) && std::isfinite(matrix[i])) << bits << " bits, " << i;
      EXPECT_LE(std::abs(static_cast<double>(given[i]) - got[i]), half) << bits << " bits, " << i;
    }
  }
}

}  // namespace
}  // namespace weft
