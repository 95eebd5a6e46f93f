// The codec of what goes back between stages: what arrives and what is left behind against plain loops in float64.
#include "pipeline/stage_codec.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

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
  Values coded(static_cast<std::size_t>(coded_count(codec.options(), tokens, kWidth))), out(gradient.size());
  codec.encode(gradient, coded);
  StageCodec::decode(codec.options(), kWidth, coded, out);
  return out;
}

// sum of what arrived = sum of what was sent + e before - e after, over any run of messages.
TEST(StageCodec, WhatIsLeftBehindJoinsTheNextMessage) {
  for (const int columns : {1, 3, 6}) {
    StageCodec codec("link", kWidth, {.columns = columns});
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
    StageCodec forgets("link", kWidth, {.columns = columns, .lazy_error = false});
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
  StageCodec codec("link", kWidth, {.columns = 2}),
      forgets("link", kWidth, {.columns = 2, .lazy_error = false});
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
  StageCodec codec("link", kWidth, {.columns = 2});
  passed(codec, sent);
  passed(codec, sent);
  EXPECT_LT(norm(wide(codec.working().error)), 1e-4 * norm(wide(sent)));
}

// Factors that would be no shorter are not made: the message is what it was, with what was left behind.
TEST(StageCodec, NeverExpands) {
  const BackwardOptions wide_factors{.columns = 12};
  EXPECT_EQ(coded_count(wide_factors, kTokens, kWidth), kTokens * kWidth);  // 12 (24 + 18) > 24 * 18
  EXPECT_EQ(coded_count({.columns = 3}, kTokens, kWidth), 3 * (kTokens + kWidth));
  EXPECT_EQ(coded_count({.columns = 3}, 0, kWidth), 0);
  EXPECT_EQ(coded_count({}, kTokens, kWidth), kTokens * kWidth);
  StageCodec codec("link", kWidth, wide_factors);
  const Values sent = drawn(3);
  EXPECT_EQ(passed(codec, sent), sent);
  // A message of few tokens takes the first rows of what a long one left behind.
  StageCodec mixed("link", kWidth, {.columns = 2});
  passed(mixed, sent);
  const Values left = mixed.working().error, few = drawn(4, 2), got = passed(mixed, few);
  for (std::size_t k = 0; k < few.size(); ++k) EXPECT_EQ(got[k], few[k] + left[k]);
  for (std::size_t k = 0; k < few.size(); ++k) EXPECT_EQ(mixed.working().error[k], 0);
  for (std::size_t k = few.size(); k < left.size(); ++k) EXPECT_EQ(mixed.working().error[k], left[k]);
}

TEST(StageCodec, StateIsCommittedOrRolledBack) {
  StageCodec codec("link", kWidth, {.columns = 2}), twin("link", kWidth, {.columns = 2});
  passed(codec, drawn(1));
  passed(twin, drawn(1));
  codec.commit();
  twin.commit();
  passed(codec, drawn(2));  // of a step that is left out
  codec.roll_back();
  EXPECT_EQ(passed(codec, drawn(3)), passed(twin, drawn(3)));
  // And moves to another object.
  twin.commit();
  StageCodec loaded("link", kWidth, {.columns = 2});
  loaded.load(twin.state());
  EXPECT_EQ(passed(loaded, drawn(4)), passed(twin, drawn(4)));
  // Control: what was left out would have mattered.
  passed(codec, drawn(2));
  EXPECT_NE(passed(codec, drawn(4)), passed(loaded, drawn(4)));
}

TEST(StageCodec, AnotherScaleIsThatOfTheError) {
  StageCodec codec("link", kWidth, {.columns = 2});
  codec.set_scale(0.5);
  passed(codec, drawn(1));
  const Values before = codec.working().error;
  codec.set_scale(0.125);
  for (std::size_t k = 0; k < before.size(); ++k) EXPECT_EQ(codec.working().error[k], before[k] / 4);
  codec.roll_back();
  EXPECT_TRUE(codec.working().error.empty());
}

// As it comes over a link of bfloat16: rounded to it, and wide again.
Values carried(const Values& values) {
  std::vector<bfloat16> halves(values.size());
  Values out(values.size());
  wire::narrow(values, halves);
  wire::widen(halves, out);
  return out;
}

// The receiver has P' Q'^T of rounded factors, and what is left behind is taken from that: the sums above hold. Control:
// where it is taken from factors that were not rounded, they do not.
TEST(StageCodec, RoundedFactorsTelescopeToo) {
  for (const int columns : {1, 3, 12}) {  // 12: it travels as it is
    for (const bool rounds : {true, false}) {
      StageCodec codec("link", kWidth, {.columns = columns}, rounds);
      std::vector<double> balance(kTokens * kWidth);
      for (std::uint32_t i = 0; i < 12; ++i) {
        const Values sent = drawn(i);
        Values coded(static_cast<std::size_t>(coded_count(codec.options(), kTokens, kWidth))),
            got(sent.size());
        codec.encode(sent, coded);
        if (rounds) {
          EXPECT_EQ(carried(coded), coded);
        }
        StageCodec::decode(codec.options(), kWidth, carried(coded), got);
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
    StageCodec codec("link", kWidth, {.columns = 2});
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
  StageCodec codec("link", kWidth, {.columns = 2});
  passed(codec, drawn(1));
  codec.commit();
  const StageCodec::State before = codec.state();
  EXPECT_FALSE(codec.fit(kTokens));
  EXPECT_EQ(codec.state().error, before.error);
  EXPECT_TRUE(codec.fit(kTokens / 2));
  EXPECT_TRUE(codec.state().error.empty());
  EXPECT_EQ(codec.state().factor, before.factor);
  StageCodec twin("link", kWidth, {.columns = 2}), kept("link", kWidth, {.columns = 2});
  StageCodec::State forgets = before;
  forgets.error.clear();
  twin.load(forgets);
  kept.load(before);
  const Values next = drawn(2, kTokens / 2), got = passed(codec, next);
  EXPECT_EQ(got, passed(twin, next));
  EXPECT_NE(got, passed(kept, next));  // control
  EXPECT_FALSE(StageCodec("link", kWidth, {.columns = 2}).fit(7));
}

// A codec whose factors would be no shorter changes no bit, of negative zeros either.
TEST(StageCodec, OneThatCompressesNothingChangesNoBit) {
  StageCodec codec("link", kWidth, {.columns = 18});
  for (std::uint32_t i = 0; i < 3; ++i) {
    Values sent = drawn(i);
    sent[i] = -0.0F;
    const Values got = passed(codec, sent);
    EXPECT_EQ(std::memcmp(got.data(), sent.data(), sent.size() * sizeof(float)), 0);
    for (const float v : codec.working().error) EXPECT_EQ(v, 0);
  }
}

TEST(StageCodec, WhatIsNotFiniteArrivesSo) {
  StageCodec codec("link", kWidth, {.columns = 2});
  passed(codec, drawn(1));
  codec.commit();
  Values bad = drawn(2);
  bad[7] = std::numeric_limits<float>::infinity();
  for (const float v : passed(codec, bad)) EXPECT_TRUE(std::isnan(v));
  codec.roll_back();
  for (const float v : passed(codec, drawn(2))) EXPECT_TRUE(std::isfinite(v));
}

}  // namespace
}  // namespace weft
