// The codec of what goes back between stages: what arrives and what is left behind against plain loops in float64.
#include "pipeline/stage_codec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/scalar_low_rank.h"
#include "weft/random.h"
#include "wire/bfloat16.h"

namespace weft {
namespace {

constexpr std::int64_t kTokens = 24, kWidth = 18;
using Values = std::vector<float>;

Values drawn(std::uint32_t seed, std::int64_t tokens = kTokens) {
  Random random(seed);
  Values out(static_cast<std::size_t>(tokens * kWidth));
  for (float& v : out) v = static_cast<float>(2 * random.uniform() - 1);
  return out;
}

double norm(const std::vector<double>& values) {
  double sum = 0;
  for (const double v : values) sum += v * v;
  return std::sqrt(sum);
}
std::vector<double> wide(const Values& values) { return {values.begin(), values.end()}; }

Values passed(StageCodec& codec, const Values& gradient) {
  const auto tokens = static_cast<std::int64_t>(gradient.size()) / kWidth;
  std::vector<std::byte> coded(static_cast<std::size_t>(codec.form().bytes(tokens)));
  Values out(gradient.size());
  codec.encode(gradient, coded);
  StageCodec::decode(codec.form(), coded, out);
  return out;
}

// sum of what arrived = sum of what was sent + e before - e after, over any run of messages.
TEST(StageCodec, WhatIsLeftBehindJoinsTheNextMessage) {
  for (const int columns : {1, 3, 6}) {
    StageCodec codec("link", {kWidth, {.columns = columns}});
    std::vector<double> balance(kTokens * kWidth);
    for (std::uint32_t i = 0; i < 12; ++i) {
      const Values sent = drawn(i), before = codec.working().error, got = passed(codec, sent);
      const Values& after = codec.working().error;
      std::vector<double> one(balance.size());
      for (std::size_t k = 0; k < one.size(); ++k) {
        one[k] = static_cast<double>(got[k]) + after[k] - sent[k] - (before.empty() ? 0.0 : before[k]);
        balance[k] += static_cast<double>(got[k]) - sent[k];
      }
      EXPECT_LT(norm(one), 1e-5 * norm(wide(sent)));
      for (std::size_t k = 0; k < balance.size(); ++k) EXPECT_NEAR(balance[k] + after[k], 0, 1e-4) << i;
    }
    // Control: without it what is lost is never made good.
    StageCodec forgets("link", {kWidth, {.columns = columns, .lazy_error = false}});
    std::vector<double> lost(balance.size());
    for (std::uint32_t i = 0; i < 12; ++i) {
      const Values sent = drawn(i), got = passed(forgets, sent);
      for (std::size_t k = 0; k < lost.size(); ++k) lost[k] += static_cast<double>(got[k]) - sent[k];
    }
    EXPECT_TRUE(forgets.working().error.empty());
    EXPECT_GT(norm(lost), 1);
  }
}

// The same micro-batch again and again: the mean of what arrives comes to it, by what is left behind over how many.
TEST(StageCodec, TheSameMessageAgainTelescopes) {
  StageCodec codec("link", {kWidth, {.columns = 2}}),
      forgets("link", {kWidth, {.columns = 2, .lazy_error = false}});
  const Values sent = drawn(5);
  std::vector<double> mean(sent.size()), without(sent.size());
  constexpr int kTimes = 64;
  for (int i = 0; i < kTimes; ++i) {
    const Values got = passed(codec, sent), other = passed(forgets, sent);
    for (std::size_t k = 0; k < mean.size(); ++k) {
      mean[k] += (static_cast<double>(got[k]) - sent[k]) / kTimes;
      without[k] += (static_cast<double>(other[k]) - sent[k]) / kTimes;
    }
  }
  EXPECT_NEAR(norm(mean), norm(wide(codec.working().error)) / kTimes, 1e-4);
  EXPECT_LT(norm(mean), 0.3 * norm(without));
}

TEST(StageCodec, MatricesOfThatRankPassWhole) {
  Values left = drawn(1, 1), sent(static_cast<std::size_t>(kTokens * kWidth));
  for (std::int64_t t = 0; t < kTokens; ++t) {
    for (std::int64_t c = 0; c < kWidth; ++c)
      sent[static_cast<std::size_t>(t * kWidth + c)] =
          static_cast<float>(t + 1) * left[static_cast<std::size_t>(c)];
  }
  StageCodec codec("link", {kWidth, {.columns = 2}});
  passed(codec, sent);
  passed(codec, sent);
  EXPECT_LT(norm(wide(codec.working().error)), 1e-4 * norm(wide(sent)));
}

// Factors that would be no shorter are not made: the message is what it was, with what was left behind.
TEST(StageCodec, NeverExpands) {
  const BackwardOptions wide_factors{.columns = 12};
  for (const bool rounds : {false, true}) {
    const int each = rounds ? 2 : 4;
    const auto bytes = [&](const BackwardOptions& options, std::int64_t tokens, std::int64_t width) {
      return MessageForm{width, options, rounds}.bytes(tokens);
    };
    EXPECT_EQ(bytes(wide_factors, kTokens, kWidth), each * kTokens * kWidth);  // 12 (24 + 18) > 24 * 18
    EXPECT_EQ(bytes({.columns = 3}, kTokens, kWidth), each * 3 * (kTokens + kWidth));
    EXPECT_EQ(bytes({.columns = 3}, 0, kWidth), 0);
    EXPECT_EQ(bytes({}, kTokens, kWidth), each * kTokens * kWidth);
    EXPECT_EQ(bytes({.bits = 4}, kTokens, kWidth), kTokens * (4 + kWidth / 2));
    EXPECT_EQ(bytes({.bits = 8}, kTokens, kWidth), kTokens * (4 + kWidth));
    EXPECT_EQ(bytes({.bits = 8}, 1, 5), rounds ? 10 : 12);  // 9 and filling to 12: of bfloat16 it is shorter
    EXPECT_EQ(bytes({.bits = 8}, 1, 1), each);              // 8 would be longer
    EXPECT_EQ(bytes({.bits = 4}, 0, kWidth), 0);
  }
  StageCodec codec("link", {kWidth, wide_factors});
  const Values sent = drawn(3);
  EXPECT_EQ(passed(codec, sent), sent);
  // A message of few tokens takes the first rows of what a long one left behind.
  StageCodec mixed("link", {kWidth, {.columns = 2}});
  passed(mixed, sent);
  const Values left = mixed.working().error, few = drawn(4, 2), got = passed(mixed, few);
  for (std::size_t k = 0; k < few.size(); ++k) EXPECT_EQ(got[k], few[k] + left[k]);
  for (std::size_t k = 0; k < few.size(); ++k) EXPECT_EQ(mixed.working().error[k], 0);
  for (std::size_t k = few.size(); k < left.size(); ++k) EXPECT_EQ(mixed.working().error[k], left[k]);
}

TEST(StageCodec, StateIsCommittedOrRolledBack) {
  StageCodec codec("link", {kWidth, {.columns = 2}}), twin("link", {kWidth, {.columns = 2}});
  passed(codec, drawn(1));
  passed(twin, drawn(1));
  codec.commit();
  twin.commit();
  passed(codec, drawn(2));  // of a step that is left out
  codec.roll_back();
  EXPECT_EQ(passed(codec, drawn(3)), passed(twin, drawn(3)));
  // And moves to another object.
  twin.commit();
  StageCodec loaded("link", {kWidth, {.columns = 2}});
  loaded.load(twin.state());
  EXPECT_EQ(passed(loaded, drawn(4)), passed(twin, drawn(4)));
  // Control: what was left out would have mattered.
  passed(codec, drawn(2));
  EXPECT_NE(passed(codec, drawn(4)), passed(loaded, drawn(4)));
}

TEST(StageCodec, AnotherScaleIsThatOfTheError) {
  StageCodec codec("link", {kWidth, {.columns = 2}});
  codec.set_scale(0.5);
  passed(codec, drawn(1));
  const Values before = codec.working().error;
  codec.set_scale(0.125);
  for (std::size_t k = 0; k < before.size(); ++k) EXPECT_EQ(codec.working().error[k], before[k] / 4);
  codec.roll_back();
  EXPECT_TRUE(codec.working().error.empty());
}

// As if float32 had come over a link of bfloat16: rounded to it, and wide again.
void round_values(std::vector<std::byte>& coded) {
  Values values(coded.size() / sizeof(float));
  std::memcpy(values.data(), coded.data(), coded.size());
  std::vector<bfloat16> halves(values.size());
  wire::narrow(values, halves);
  wire::widen(halves, values);
  std::memcpy(coded.data(), values.data(), coded.size());
}

// The receiver has P' Q'^T of rounded factors, and what is left behind is taken from that: the sums above hold. Control:
// where it is taken from factors that were not rounded, they do not.
TEST(StageCodec, RoundedFactorsTelescopeToo) {
  for (const int columns : {1, 3, 12}) {  // 12: it travels as it is
    for (const bool rounds : {true, false}) {
      StageCodec codec("link", {kWidth, {.columns = columns}, rounds});
      std::vector<double> balance(kTokens * kWidth);
      for (std::uint32_t i = 0; i < 12; ++i) {
        const Values sent = drawn(i);
        std::vector<std::byte> coded(static_cast<std::size_t>(codec.form().bytes(kTokens)));
        Values got(sent.size());
        codec.encode(sent, coded);
        if (!rounds) round_values(coded);
        StageCodec::decode(codec.form(), coded, got);
        for (std::size_t k = 0; k < balance.size(); ++k) balance[k] += static_cast<double>(got[k]) - sent[k];
      }
      const Values& left = codec.working().error;
      for (std::size_t k = 0; k < balance.size(); ++k) balance[k] += left[k];
      // Of 12 messages of values up to 1 in float32; a rounding to 8 bits is larger by 2^16.
      if (rounds)
        EXPECT_LT(norm(balance), 1e-4) << columns;
      else
        EXPECT_GT(norm(balance), 1e-2) << columns;
      if (rounds && columns == 12) {
        for (const float v : left) EXPECT_LE(std::abs(v), 0x1p-8F);
        EXPECT_GT(norm(wide(left)), 0);
      }
    }
  }
}

// Where the loss counts otherwise from some message on, what telescopes are gradients of the same loss. Control: without
// the scale they do not.
TEST(StageCodec, TelescopesAcrossAnotherScale) {
  for (const bool told : {true, false}) {
    StageCodec codec("link", {kWidth, {.columns = 2}});
    std::vector<double> balance(kTokens * kWidth);
    double scale = 0.5;
    for (std::uint32_t i = 0; i < 12; ++i) {
      if (i == 6) scale = 0.125;
      if (told) codec.set_scale(scale);
      Values sent = drawn(i);
      for (float& v : sent) v *= static_cast<float>(scale);
      const Values got = passed(codec, sent);
      for (std::size_t k = 0; k < balance.size(); ++k)
        balance[k] += (static_cast<double>(got[k]) - sent[k]) / scale;
    }
    for (std::size_t k = 0; k < balance.size(); ++k) balance[k] += codec.working().error[k] / scale;
    if (told)
      EXPECT_LT(norm(balance), 1e-3);
    else
      EXPECT_GT(norm(balance), 1);
  }
}

TEST(StageCodec, AnErrorOfOtherTokensIsForgotten) {
  StageCodec codec("link", {kWidth, {.columns = 2}});
  passed(codec, drawn(1));
  codec.commit();
  const StageCodec::State before = codec.state();
  for (const std::int64_t tokens :
       {kTokens, kTokens / 2, std::int64_t{0}}) {  // a short batch keeps what a longer one left
    EXPECT_FALSE(codec.fit(tokens, 0));
    EXPECT_FALSE(codec.fit(tokens, kTokens));
  }
  EXPECT_EQ(codec.state().error, before.error);
  EXPECT_TRUE(codec.fit(kTokens + 1, 0));
  EXPECT_TRUE(codec.state().error.empty());
  codec.load(before);
  EXPECT_TRUE(codec.fit(kTokens / 2, kTokens / 2));
  EXPECT_TRUE(codec.state().error.empty());
  EXPECT_EQ(codec.state().factor, before.factor);
  StageCodec twin("link", {kWidth, {.columns = 2}}), kept("link", {kWidth, {.columns = 2}});
  StageCodec::State forgets = before;
  forgets.error.clear();
  twin.load(forgets);
  kept.load(before);
  const Values next = drawn(2, kTokens / 2), got = passed(codec, next);
  EXPECT_EQ(got, passed(twin, next));
  EXPECT_NE(got, passed(kept, next));  // control
  EXPECT_FALSE(StageCodec("link", {kWidth, {.columns = 2}}).fit(7, 7));
}

// A codec whose factors would be no shorter changes no bit, of negative zeros either.
TEST(StageCodec, OneThatCompressesNothingChangesNoBit) {
  StageCodec codec("link", {kWidth, {.columns = 18}});
  for (std::uint32_t i = 0; i < 3; ++i) {
    Values sent = drawn(i);
    sent[i] = -0.0F;
    const Values got = passed(codec, sent);
    EXPECT_EQ(std::memcmp(got.data(), sent.data(), sent.size() * sizeof(float)), 0);
    for (const float v : codec.working().error) EXPECT_EQ(v, 0);
  }
}

// Of factors all values, of whole numbers those of the token.
TEST(StageCodec, WhatIsNotFiniteArrivesSo) {
  // (Factors of so many columns would be no shorter: rounded, such a matrix leaves something behind as well.)
  const MessageForm plain{kWidth, {.columns = kWidth}, true};
  EXPECT_FALSE(plain.shortens(kTokens));
  for (const MessageForm& form : {MessageForm{kWidth, {.columns = 2}}, {kWidth, {.bits = 4}}, plain}) {
    const BackwardOptions& options = form.options;
    StageCodec codec("link", form);
    passed(codec, drawn(1));
    codec.commit();
    Values bad = drawn(2);
    bad[7] = std::numeric_limits<float>::infinity();
    const Values left = codec.working().error, got = passed(codec, bad);
    for (std::size_t k = 0; k < got.size(); ++k)
      EXPECT_EQ(!std::isfinite(got[k]), form.rounds ? k == 7 : options.columns > 0 || k < kWidth) << k;
    EXPECT_EQ(codec.working().error, left);
    for (const float v : passed(codec, drawn(2))) EXPECT_TRUE(std::isfinite(v));
    codec.roll_back();
    for (const float v : passed(codec, drawn(2))) EXPECT_TRUE(std::isfinite(v));
  }
}

// Whole numbers: every value arrives within half a step of its token's scale, what is left behind is the rest to the bit,
// and over any run of messages it telescopes as factors do; bfloat16 on the link changes no bit of it. Control: forgotten,
// it does not.
TEST(StageCodec, WholeNumbersTelescope) {
  for (const int bits : {4, 8}) {
    StageCodec codec("link", {kWidth, {.bits = bits}}), on_halves("link", {kWidth, {.bits = bits}, true}),
        forgets("link", {kWidth, {.bits = bits, .lazy_error = false}});
    std::vector<double> balance(kTokens * kWidth), lost(balance.size());
    const float levels = bits == 4 ? 7 : 127;
    for (std::uint32_t i = 0; i < 12; ++i) {
      Values a = drawn(i);
      const Values sent = a, before = codec.working().error, got = passed(codec, sent);
      EXPECT_EQ(passed(on_halves, sent), got);
      for (std::size_t k = 0; k < before.size(); ++k) a[k] += before[k];
      for (std::size_t t = 0; t < kTokens; ++t) {
        float most = 0;
        for (std::size_t c = 0; c < kWidth; ++c) most = std::max(most, std::abs(a[t * kWidth + c]));
        for (std::size_t k = t * kWidth; k < (t + 1) * kWidth; ++k)
          EXPECT_LE(std::abs(got[k] - a[k]), 0.500001F * most / levels);
      }
      for (std::size_t k = 0; k < a.size(); ++k) EXPECT_EQ(codec.working().error[k], a[k] - got[k]);
      const Values other = passed(forgets, sent);
      for (std::size_t k = 0; k < balance.size(); ++k) {
        balance[k] += static_cast<double>(got[k]) - sent[k];
        lost[k] += static_cast<double>(other[k]) - sent[k];
      }
    }
    EXPECT_TRUE(codec.working().factor.empty());
    EXPECT_TRUE(forgets.working().error.empty());
    // Twelve additions of values up to 1.2 to what was left, each rounded to 2^-24 of them.
    for (std::size_t k = 0; k < balance.size(); ++k)
      EXPECT_NEAR(balance[k] + static_cast<double>(codec.working().error[k]), 0, 12 * 0x1p-23) << k;
    EXPECT_GT(norm(lost), bits == 4 ? 1 : 0.1);
  }
}

// ---- in float64, where what the mathematics promises holds to 1e-12 ----

using Wide = std::vector<double>;
constexpr double kSame = 1e-12;

Wide wide_drawn(std::uint32_t seed, std::int64_t count = kTokens * kWidth) {
  Random random(seed, 64);
  Wide out(static_cast<std::size_t>(count));
  for (double& v : out) v = 2 * random.uniform() - 1;
  return out;
}

double apart(const Wide& a, const Wide& b) {
  Wide out(a);
  for (std::size_t k = 0; k < out.size(); ++k) out[k] -= b[k];
  return norm(out);
}

// The codec over again, of the plain kernels.
struct WideCodec {
  MatrixShape shape;
  Wide q, p{}, matrix{}, error = Wide(kTokens * kWidth);

  explicit WideCodec(int columns) : shape{kTokens, kWidth, columns}, q(wide_drawn(99, columns * kWidth)) {}

  // What arrives. Behind it: p, q, the remainder, and the matrix that was cut.
  Wide passed(const Wide& gradient) {
    matrix = gradient;
    for (std::size_t k = 0; k < matrix.size(); ++k) matrix[k] += error[k];
    p.resize(static_cast<std::size_t>(shape.rows * shape.rank));
    std::vector<int> zeroed;
    scalar::orthonormalize<double>(shape.columns, shape.rank, q, zeroed);
    scalar::multiply<double>(shape, matrix, q, p);
    scalar::orthonormalize<double>(shape.rows, shape.rank, p, zeroed);
    EXPECT_TRUE(zeroed.empty());
    scalar::multiply_transposed<double>(shape, matrix, p, q);
    Wide out(matrix.size());
    error = matrix;
    scalar::reconstruct<double>(shape, p, q, 1, out, error);
    return out;
  }
  // Of P^T M, over that of M.
  double along(const Wide& m) const {
    Wide out(static_cast<std::size_t>(shape.rank * shape.columns));
    scalar::multiply_transposed<double>(shape, m, p, out);
    return norm(out) / norm(m);
  }
};

// sum += by * X^T e, X being [kTokens, inputs].
void add_product(Wide& sum, const Wide& x, const Wide& e, double by) {
  const auto inputs = static_cast<std::int64_t>(x.size()) / kTokens;
  for (std::int64_t t = 0; t < kTokens; ++t) {
    for (std::int64_t i = 0; i < inputs; ++i) {
      for (std::int64_t c = 0; c < kWidth; ++c)
        sum[static_cast<std::size_t>(i * kWidth + c)] +=
            by * x[static_cast<std::size_t>(t * inputs + i)] * e[static_cast<std::size_t>(t * kWidth + c)];
    }
  }
}

enum class Forgets : std::uint8_t { nothing, one_remainder, all_remainders };

// How far the gradient of a linear layer is from what is said of it:
//   sum_i X_i^T dh_i = sum_i X_i^T d_i + X_1^T e_0 + sum_i (X_(i+1) - X_i)^T e_i - X_M^T e_M
double weight_gradient_apart(int columns, Forgets forgets) {
  constexpr int kMessages = 8;
  constexpr std::int64_t kInputs = 7;
  WideCodec codec(columns);
  for (std::uint32_t i = 0; i < 3; ++i) codec.passed(wide_drawn(40 + i));  // so that e_0 is something
  Wide found(kInputs * kWidth), said(kInputs * kWidth);
  Wide x = wide_drawn(60, kTokens * kInputs);
  add_product(said, x, codec.error, 1);
  for (std::uint32_t i = 1; i <= kMessages; ++i) {
    const Wide sent = wide_drawn(i);
    if (forgets == Forgets::all_remainders || (forgets == Forgets::one_remainder && i == 5))
      codec.error.assign(codec.error.size(), 0);
    add_product(found, x, codec.passed(sent), 1);
    add_product(said, x, sent, 1);
    add_product(said, x, codec.error, -1);
    if (i == kMessages) break;
    x = wide_drawn(60 + i, kTokens * kInputs);
    add_product(said, x, codec.error, 1);
  }
  return apart(found, said) / norm(said);
}

TEST(StageCodec, InFloat64TheGradientOfALinearLayerTelescopes) {
  for (const int columns : {1, 3, 6}) {
    EXPECT_LT(weight_gradient_apart(columns, Forgets::nothing), kSame);
    EXPECT_GT(weight_gradient_apart(columns, Forgets::one_remainder), 1e-2);  // controls
    EXPECT_GT(weight_gradient_apart(columns, Forgets::all_remainders), 1e-2);
  }
}

// P's columns are orthonormal and Q = A^T P: nothing of A - P Q^T is along P, and it is no longer than A.
TEST(StageCodec, WhatIsLeftBehindIsOrthogonalToWhatWasSentAndNoLonger) {
  for (const int columns : {1, 3, 6}) {
    WideCodec codec(columns);
    StageCodec narrow("link", {kWidth, {.columns = columns}});
    for (std::uint32_t i = 0; i < 12; ++i) {
      const Wide before = codec.passed(wide_drawn(i));
      EXPECT_LT(codec.along(codec.error), kSame);
      EXPECT_GT(codec.along(codec.matrix), 0.2);  // control
      EXPECT_LE(norm(codec.error), norm(codec.matrix));
      // So it is of float32, up to that rounding.
      const Values sent = drawn(i), left = narrow.working().error;
      Wide matrix = wide(sent);
      for (std::size_t k = 0; k < left.size(); ++k) matrix[k] += static_cast<double>(left[k]);
      Values coded(static_cast<std::size_t>(columns * (kTokens + kWidth)));
      narrow.encode(sent, std::as_writable_bytes(std::span(coded)));
      WideCodec factors(columns);
      factors.p.assign(coded.begin(), coded.begin() + columns * kTokens);
      const Wide error = wide(narrow.working().error);
      EXPECT_LT(factors.along(error), 1e-5);
      EXPECT_GT(factors.along(matrix), 0.2);
      EXPECT_LE(norm(error), norm(matrix));
      // Control: what another message's factors leave is longer than the matrix.
      EXPECT_GT(apart(matrix, before), norm(matrix));
    }
  }
}

// From one Q on, what arrives is what arrives in float64: roundings of 2^-24, which Q and what is left carry on and make
// some hundred times as large in twelve messages. Control: from another Q it is not.
TEST(StageCodec, ArrivesAsInFloat64) {
  for (const int columns : {1, 3, 6}) {
    WideCodec exact(columns);
    StageCodec codec("link", {kWidth, {.columns = columns}}), other("link", {kWidth, {.columns = columns}});
    codec.load({.error = {}, .factor = Values(exact.q.begin(), exact.q.end())});
    for (std::uint32_t i = 0; i < 12; ++i) {
      const Values sent = drawn(i);
      const Wide expected = exact.passed(wide(sent));
      EXPECT_LT(apart(wide(passed(codec, sent)), expected), 1e-4 * norm(expected)) << columns << ", " << i;
      EXPECT_LT(apart(wide(codec.working().error), exact.error), 1e-4 * norm(exact.error));
      EXPECT_GT(apart(wide(passed(other, sent)), expected), 1e-2 * norm(expected));
    }
  }
}

// What is left of matrices that are the same, or move slowly, over them: message by message.
Wide shares_left(int columns, bool warm, double moves) {
  StageCodec codec("link", {kWidth, {.columns = columns, .lazy_error = false}});
  Wide out;
  for (std::uint32_t i = 0; i < 40; ++i) {
    Values matrix = drawn(0);
    const Values other = drawn(1 + i);
    for (std::size_t k = 0; k < matrix.size(); ++k) matrix[k] += static_cast<float>(moves) * other[k];
    StageCodec::State state = codec.working();
    if (!warm) state.factor.clear();
    codec.load(state);
    out.push_back(apart(wide(passed(codec, matrix)), wide(matrix)) / norm(wide(matrix)));
  }
  return out;
}

TEST(StageCodec, AWarmStartCutsTheSameMatrixBetterEveryTime) {
  for (const int columns : {1, 2, 4}) {
    const Wide warm = shares_left(columns, true, 0), fresh = shares_left(columns, false, 0);
    for (std::size_t i = 1; i < warm.size(); ++i) EXPECT_LE(warm[i], warm[i - 1] + 1e-6) << i;
    EXPECT_LE(warm.back(), *std::ranges::min_element(fresh) + 1e-6);
    EXPECT_LT(warm.back(), warm.front() - 0.01);
    EXPECT_GT(*std::ranges::max_element(fresh), *std::ranges::min_element(fresh) + 0.01);  // a control
    EXPECT_EQ(warm.front(), fresh.front());
    // Of one that moves slowly it is better on the average of all but the first.
    const Wide moving = shares_left(columns, true, 0.1), anew = shares_left(columns, false, 0.1);
    const auto mean = [](const Wide& of) {
      return std::accumulate(of.begin() + 1, of.end(), 0.0) / static_cast<double>(of.size() - 1);
    };
    EXPECT_LT(mean(moving), mean(anew) - 0.01);
    // Control: of matrices that have nothing in common it is not.
    const Wide unlike = shares_left(columns, true, 100), drawn_anew = shares_left(columns, false, 100);
    EXPECT_NEAR(mean(unlike), mean(drawn_anew), 0.01);
  }
}

}  // namespace
}  // namespace weft
