// Products with thin factors and orthonormal columns: the same bits as the plain twins, and near float64.
#include "kernels/low_rank.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "compressors/low_rank.h"
#include "kernels/scalar_low_rank.h"
#include "weft/random.h"

namespace weft {
namespace {

constexpr double kUnit = 0x1p-24;  // one rounding of float32, relative

std::vector<float> drawn(std::int64_t count, std::uint32_t what) {
  std::vector<float> out(static_cast<std::size_t>(count));
  Random random(3, what);
  for (float& v : out) v = static_cast<float>((random.uniform() - 0.5) * std::exp2(random.below(8)));
  return out;
}

struct Case {
  MatrixShape shape;
  std::vector<float> m, p, q;
  explicit Case(const MatrixShape& s)
      : shape(s),
        m(drawn(s.rows * s.columns, 1)),
        p(drawn(s.rows * s.rank, 2)),
        q(drawn(s.columns * s.rank, 3)) {}
  double at_m(std::int64_t i, std::int64_t j) const {
    return m[static_cast<std::size_t>(i * shape.columns + j)];
  }
  double at_p(std::int64_t i, int k) const { return p[static_cast<std::size_t>(k * shape.rows + i)]; }
  double at_q(std::int64_t j, int k) const { return q[static_cast<std::size_t>(k * shape.columns + j)]; }
};

std::vector<MatrixShape> shapes() {
  std::vector<MatrixShape> out;
  for (const int rank : {1, 2, 3, 4, 7, 32}) {
    for (const std::int64_t rows : {1, 3, 4, 8, 37}) {
      for (const std::int64_t columns : {1, 5, 8, 19, 64}) out.push_back({rows, columns, rank});
    }
  }
  out.push_back({1024, 1000, 4});
  out.push_back({50, 150, 40});
  out.push_back({0, 8, 2});
  return out;
}

TEST(LowRankKernels, EqualTheirTwinsToTheBit) {
  for (const MatrixShape& s : shapes()) {
    const Case c(s);
    std::vector<float> fast(c.p.size(), 9), plain(c.p.size());
    multiply(s, c.m, c.q, fast);
    scalar::multiply(s, c.m, c.q, plain);
    ASSERT_EQ(fast, plain) << s.rows << " x " << s.columns << ", rank " << s.rank;
    fast.assign(c.q.size(), 9);
    plain = fast;
    multiply_transposed(s, c.m, c.p, fast);
    scalar::multiply_transposed(s, c.m, c.p, plain);
    ASSERT_EQ(fast, plain) << s.rows << " x " << s.columns << ", rank " << s.rank;
    std::vector<float> y(c.m.size()), plain_y(c.m.size()), left = c.m, plain_left = c.m;
    reconstruct(s, c.p, c.q, 3.0F, y, left);
    scalar::reconstruct(s, c.p, c.q, 3.0F, plain_y, plain_left);
    ASSERT_EQ(y, plain_y);
    ASSERT_EQ(left, plain_left);
    std::vector<float> columns = c.p, plain_columns = c.p;
    std::vector<int> zeroed, plain_zeroed;
    orthonormalize(s.rows, s.rank, columns, zeroed);
    scalar::orthonormalize(s.rows, s.rank, plain_columns, plain_zeroed);
    ASSERT_EQ(columns, plain_columns);
    ASSERT_EQ(zeroed, plain_zeroed);
  }
  // Control: another order of additions gives other bits.
  const Case c({1, 1000, 1});
  float forward = 0;
  for (std::size_t j = 0; j < c.m.size(); ++j) forward += c.m[j] * c.q[j];
  std::vector<float> lanes(1);
  multiply(c.shape, c.m, c.q, lanes);
  EXPECT_NE(lanes[0], forward);
}

TEST(LowRankKernels, AreNearFloat64) {
  for (const MatrixShape& s : shapes()) {
    const Case c(s);
    std::vector<float> p(c.p.size()), q(c.q.size()), y(c.m.size()), left = c.m;
    multiply(s, c.m, c.q, p);
    multiply_transposed(s, c.m, c.p, q);
    reconstruct(s, c.p, c.q, 3.0F, y, left);
    // A sum of n products: each product and each addition rounds once, so n + 1 roundings of the sum of
    // magnitudes at most (to first order, hence the 1.01).
    for (int k = 0; k < s.rank; ++k) {
      for (std::int64_t i = 0; i < s.rows; ++i) {
        double sum = 0, size = 0;
        for (std::int64_t j = 0; j < s.columns; ++j) {
          sum += c.at_m(i, j) * c.at_q(j, k);
          size += std::abs(c.at_m(i, j) * c.at_q(j, k));
        }
        ASSERT_LE(std::abs(static_cast<double>(p[static_cast<std::size_t>(k * s.rows + i)]) - sum),
                  1.01 * kUnit * static_cast<double>(s.columns + 1) * size);
      }
      for (std::int64_t j = 0; j < s.columns; ++j) {
        double sum = 0, size = 0;
        for (std::int64_t i = 0; i < s.rows; ++i) {
          sum += c.at_m(i, j) * c.at_p(i, k);
          size += std::abs(c.at_m(i, j) * c.at_p(i, k));
        }
        ASSERT_LE(std::abs(static_cast<double>(q[static_cast<std::size_t>(k * s.columns + j)]) - sum),
                  1.01 * kUnit * static_cast<double>(s.rows + 1) * size);
      }
    }
    for (std::int64_t i = 0; i < s.rows; ++i) {
      for (std::int64_t j = 0; j < s.columns; ++j) {
        const auto at = static_cast<std::size_t>(i * s.columns + j);
        double sum = 0, size = 0;
        for (int k = 0; k < s.rank; ++k) {
          sum += c.at_p(i, k) * c.at_q(j, k);
          size += std::abs(c.at_p(i, k) * c.at_q(j, k));
        }
        const double bound = 1.01 * kUnit * (s.rank + 1) * size;
        ASSERT_LE(std::abs(static_cast<double>(y[at]) - sum), bound);
        // The division and the difference round once more each.
        const double rest = c.at_m(i, j) - sum / 3;
        ASSERT_LE(std::abs(static_cast<double>(left[at]) - rest),
                  bound / 3 + 1.01 * kUnit * (std::abs(sum) / 3 + std::abs(rest) + bound));
      }
    }
  }
}

double dot(const std::vector<float>& columns, std::int64_t length, int a, int b) {
  double sum = 0;
  for (std::int64_t i = 0; i < length; ++i) {
    sum += static_cast<double>(columns[static_cast<std::size_t>(a * length + i)]) *
           static_cast<double>(columns[static_cast<std::size_t>(b * length + i)]);
  }
  return sum;
}

// Largest difference from orthonormal columns; those that were zeroed must be zeros.
double skew(const std::vector<float>& columns, std::int64_t length, int rank,
            const std::vector<int>& zeroed) {
  double worst = 0;
  for (int a = 0; a < rank; ++a) {
    const bool zero = std::find(zeroed.begin(), zeroed.end(), a) != zeroed.end();
    for (int b = 0; b <= a; ++b) {
      worst = std::max(worst, std::abs(dot(columns, length, a, b) - (a == b && !zero ? 1.0 : 0.0)));
    }
  }
  return worst;
}

TEST(Orthonormalize, ColumnsAreOrthonormal) {
  for (const int rank : {1, 2, 4, 8, 32}) {
    for (const std::int64_t length : {32, 37, 1024}) {
      std::vector<float> columns = drawn(length * rank, 4);
      std::vector<int> zeroed;
      EXPECT_GT(skew(columns, length, rank, {}), 0.1) << "control";
      orthonormalize(length, rank, columns, zeroed);
      EXPECT_TRUE(zeroed.empty() || length == rank);
      // Each of up to `rank` subtractions leaves a rounding of the column, which is at most halved by then,
      // and as much comes back because the columns before are not orthogonal to more than that; normalising
      // rounds once.
      EXPECT_LE(skew(columns, length, rank, zeroed), (4 * rank + 2) * kUnit) << rank << " of " << length;
    }
  }
}

TEST(Orthonormalize, ZeroAndDependentColumnsBecomeZeros) {
  constexpr std::int64_t kLength = 100;
  const std::vector<float> a = drawn(kLength, 5), b = drawn(kLength, 6);
  std::vector<float> columns(5 * kLength);
  for (std::size_t i = 0; i < kLength; ++i) {
    columns[i] = a[i];
    columns[kLength + i] = 0;
    columns[2 * kLength + i] = 3 * a[i];
    columns[3 * kLength + i] = b[i];
    columns[4 * kLength + i] = a[i] - 2 * b[i];
  }
  std::vector<int> zeroed;
  orthonormalize(kLength, 5, columns, zeroed);
  EXPECT_EQ(zeroed, (std::vector<int>{1, 2, 4}));
  EXPECT_LE(skew(columns, kLength, 5, zeroed), 22 * kUnit);
  // More columns than dimensions.
  std::vector<float> square = drawn(3 * 7, 7);
  orthonormalize(3, 7, square, zeroed);
  EXPECT_EQ(zeroed.size(), 4u);
}

TEST(Orthonormalize, AnyFiniteScaleWorks) {
  constexpr std::int64_t kLength = 64;
  for (const float scale : {std::numeric_limits<float>::denorm_min(), 1e-40F, 1e-20F, 1.0F, 1e30F,
                            std::numeric_limits<float>::max()}) {
    std::vector<float> columns(2 * kLength);
    for (std::size_t i = 0; i < columns.size(); ++i)
      columns[i] = (i * i + i / kLength) % 3 == 0 ? -scale : scale;
    std::vector<int> zeroed;
    std::vector<float> plain = columns;
    orthonormalize(kLength, 2, columns, zeroed);
    scalar::orthonormalize(kLength, 2, plain, zeroed);
    EXPECT_EQ(columns, plain);
    for (const float v : columns) ASSERT_TRUE(std::isfinite(v)) << scale;
    EXPECT_FALSE(std::find(zeroed.begin(), zeroed.end(), 0) != zeroed.end()) << scale;
    EXPECT_NEAR(dot(columns, kLength, 0, 0), 1, 10 * kUnit) << scale;
  }
}

TEST(LowRank, CompressesWhereItPays) {
  const LowRankOptions options{.rank = 4};
  EXPECT_EQ(low_rank_of(64, 64 * 64, options), 4);  // 128 * 4 * 2 < 4096
  EXPECT_EQ(low_rank_of(16, 16 * 16, options), 0);  // 32 * 4 * 2 = 256: not less
  EXPECT_EQ(low_rank_of(16, 16 * 17, options), 4);
  EXPECT_EQ(low_rank_of(0, 4096, options), 0) << "a vector";
  EXPECT_EQ(low_rank_of(1, 4096, options), 0);
  EXPECT_EQ(low_rank_of(4096, 4096, options), 0);
  EXPECT_EQ(low_rank_of(3, 3 * 1000, {.rank = 4, .min_compression = 0}), 3);
  EXPECT_EQ(low_rank_of(8, 0, options), 0);
}

}  // namespace
}  // namespace weft
