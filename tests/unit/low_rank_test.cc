// Products with thin factors and orthonormal columns: the same bits as the plain twins, and near float64.
#include "kernels/low_rank.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "compressors/low_rank.h"
#include "kernels/scalar_low_rank.h"
#include "weft/random.h"
#include "wire/bfloat16.h"

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

// ---- sums of bfloat16 ----

constexpr int kRanks = 3;
constexpr MatrixShape kMatrix{.rows = 40, .columns = 30, .rank = 2};
constexpr std::size_t kElements = 40 * 30, kVector = 17;

// One rank of a few that compress a matrix and a vector.
struct Compressing {
  LowRank low_rank{LowRankOptions{.rank = kMatrix.rank, .bf16 = true}};
  WarmFactor factor;
  std::vector<float> gradient, residual, matrix, sum;
  Compressing() : residual(kElements + kVector), matrix(residual.size()), sum(residual.size()) {
    low_rank.add("matrix", kMatrix.rows, kElements, &factor);
    low_rank.add("vector", 0, kVector, nullptr);
  }
};

std::span<bfloat16> halves(const Dense& data) {
  EXPECT_EQ(data.dtype, DType::bfloat16);
  return {reinterpret_cast<bfloat16*>(data.data), static_cast<std::size_t>(data.count)};
}

// As an all-reduce adds them: in float32, rounded behind every addition. Every rank has the result.
template <class Of>
void add_up(std::vector<Compressing>& ranks, Of of) {
  const std::span<bfloat16> first = halves(of(ranks[0]));
  for (std::size_t i = 0; i < first.size(); ++i) {
    for (std::size_t r = 1; r < ranks.size(); ++r)
      first[i] = to_bfloat16(to_float(first[i]) + to_float(halves(of(ranks[r]))[i]));
    for (std::size_t r = 1; r < ranks.size(); ++r) halves(of(ranks[r]))[i] = first[i];
  }
}

std::vector<float> widened(std::span<const bfloat16> values) {
  std::vector<float> out(values.size());
  wire::widen(values, out);
  return out;
}

// A rank's share of y: what its factors, as they were rounded, put into the sums.
std::vector<float> share_of(Compressing& rank, std::span<const float> p, std::span<const bfloat16> vector) {
  std::vector<float> out(kElements), unused(kElements);
  scalar::reconstruct(kMatrix, p, widened(halves(rank.low_rank.second_sum())), 1, out, unused);
  for (const bfloat16 v : vector) out.push_back(to_float(v));
  return out;
}

// What went in is what each rank put into the sums and what it left behind, as exactly as float32 has it; and what came
// out is what was put in but for the rounding of the additions. Control: left behind is what factors have lost before
// they are rounded.
TEST(LowRank, RoundedSumsLoseWhatAdditionsRoundAway) {
  std::vector<Compressing> ranks(kRanks);
  double worst = 0, worst_before = 0, worst_sum = 0, left_of_vector = 0;
  for (std::uint32_t t = 0; t < 8; ++t) {
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      Compressing& rank = ranks[r];
      rank.gradient = drawn(kElements + kVector, 100 * t + static_cast<std::uint32_t>(r));
      rank.low_rank.begin(rank.gradient, rank.residual, rank.matrix, t);
    }
    const std::vector<Compressing> before = ranks;  // what was put in is in `matrix`
    std::vector<std::vector<bfloat16>> vectors;
    for (Compressing& rank : ranks) {
      const std::span<bfloat16> of_rank = halves(rank.low_rank.first_sum()).last(kVector);
      vectors.emplace_back(of_rank.begin(), of_rank.end());
    }
    add_up(ranks, [](Compressing& c) { return c.low_rank.first_sum(); });
    std::vector<float> p = widened(halves(ranks[0].low_rank.first_sum()));
    const std::vector<float> vector(p.end() - kVector, p.end());
    p.resize(static_cast<std::size_t>(kMatrix.rows * kMatrix.rank));
    std::vector<int> zeroed;
    scalar::orthonormalize(kMatrix.rows, kMatrix.rank, p, zeroed);
    std::vector<std::vector<float>> shares, exact;  // of each rank
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      ASSERT_TRUE(ranks[r].low_rank.project(ranks[r].matrix));
      shares.push_back(share_of(ranks[r], p, vectors[r]));
      std::vector<float> unused(kElements);
      exact.emplace_back(kElements);
      scalar::reconstruct(kMatrix, p, ranks[r].low_rank.second(), 1, exact.back(), unused);
    }
    add_up(ranks, [](Compressing& c) { return c.low_rank.second_sum(); });
    const std::vector<float> q = widened(halves(ranks[0].low_rank.second_sum()));
    std::vector<float> y(kElements), unused(kElements);
    scalar::reconstruct(kMatrix, p, q, 1, y, unused);
    y.insert(y.end(), vector.begin(), vector.end());
    for (Compressing& rank : ranks) {
      ASSERT_TRUE(rank.low_rank.finish(rank.matrix, rank.sum, kRanks));
      rank.factor.commit();
      rank.residual = rank.matrix;
      EXPECT_EQ(rank.sum, y) << "of the factors after the sums, the same bits on all ranks";
      EXPECT_EQ(rank.factor.columns, q) << "kept for the next step as all have it";
    }
    double all = 0;
    for (const std::vector<float>& share : shares)
      for (const float v : share) all = std::max(all, std::abs(static_cast<double>(v)));
    for (std::size_t i = 0; i < kElements + kVector; ++i) {
      double put_in = 0;
      for (std::size_t r = 0; r < ranks.size(); ++r) {
        const double in = before[r].matrix[i], share = shares[r][i], left = ranks[r].residual[i];
        // The share is rounded where it is made of factors, and the difference once more.
        const double bound = 1.01 * 3 * kUnit * (std::abs(in) + std::abs(share)) + 1e-30;
        worst = std::max(worst, std::abs(in - share - left) / bound);
        if (i < kElements)
          worst_before = std::max(worst_before, std::abs(in - share - (in - exact[r][i])) / bound);
        else
          left_of_vector += std::abs(left);
        put_in += share;
      }
      // Each addition rounds by 2^-9 of what it has so far; of a matrix, in elements of Q, of which rank many make one.
      worst_sum =
          std::max(worst_sum, std::abs(put_in - y[i]) / (kMatrix.rank * kRanks * kRanks * 0x1p-8 * all));
    }
  }
  EXPECT_LE(worst, 1);
  EXPECT_GT(worst_before, 100);
  EXPECT_LE(worst_sum, 1);
  EXPECT_GT(worst_sum, 0) << "nothing was rounded, and the test is blind";
  EXPECT_GT(left_of_vector, 0);
}

// How far the last of so many steps is off, of the size of its mean, where each rank's gradients differ from the others'
// for good. `from_mean`: what is left behind is taken from the mean.
double off_after(int steps, bool from_mean) {
  std::vector<Compressing> ranks(kRanks);
  double away = 0, size = 0;
  for (int t = 0; t < steps; ++t) {
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      Compressing& rank = ranks[r];
      rank.gradient = drawn(kElements + kVector,
                            1000 + static_cast<std::uint32_t>(kRanks * t) + static_cast<std::uint32_t>(r));
      for (float& v : rank.gradient) v += 32 * (static_cast<float>(r) - 1);  // nothing in the mean
      rank.low_rank.begin(rank.gradient, rank.residual, rank.matrix, static_cast<std::uint32_t>(t));
    }
    const std::vector<Compressing> before = ranks;
    add_up(ranks, [](Compressing& c) { return c.low_rank.first_sum(); });
    for (Compressing& rank : ranks) rank.low_rank.project(rank.matrix);
    add_up(ranks, [](Compressing& c) { return c.low_rank.second_sum(); });
    away = size = 0;
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      Compressing& rank = ranks[r];
      EXPECT_TRUE(rank.low_rank.finish(rank.matrix, rank.sum, kRanks));
      rank.factor.commit();
      rank.residual = rank.matrix;
      for (std::size_t i = 0; from_mean && i < rank.residual.size(); ++i)
        rank.residual[i] = before[r].matrix[i] - rank.sum[i] / kRanks;
    }
    for (std::size_t i = kElements; i < kElements + kVector; ++i) {
      double mean = 0;
      for (const Compressing& rank : ranks) mean += static_cast<double>(rank.gradient[i]);
      away += std::pow(mean - ranks[0].sum[i], 2);
      size += mean * mean;
    }
  }
  return std::sqrt(away / size);
}

TEST(LowRank, RoundingDoesNotGrowWithTheSteps) {
  EXPECT_LT(off_after(1000, false), 0.05);
  EXPECT_GT(off_after(1000, true), 0.5);  // control
}

TEST(LowRank, RoundedSumsSayWhatIsNotFinite) {
  std::vector<Compressing> ranks(kRanks);
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::max() / 2}) {
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      ranks[r].gradient = drawn(kElements + kVector, static_cast<std::uint32_t>(r));
      if (r == 1) ranks[r].gradient[7] = bad;
      ranks[r].low_rank.begin(ranks[r].gradient, {}, ranks[r].matrix, 0);
    }
    add_up(ranks, [](Compressing& c) { return c.low_rank.first_sum(); });
    for (Compressing& rank : ranks) EXPECT_FALSE(rank.low_rank.project(rank.matrix)) << bad;
  }
}

}  // namespace
}  // namespace weft
