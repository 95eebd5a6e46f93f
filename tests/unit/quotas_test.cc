// Quotas of buckets: sums, bounds, and that adaptive ones find the common threshold.
#include "data_parallel/quotas.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

#include "data_parallel/buckets.h"
#include "weft/error.h"
#include "weft/random.h"

namespace weft {
namespace {

using Quotas = std::vector<std::int64_t>;

std::int64_t sum_of(const Quotas& v) { return std::accumulate(v.begin(), v.end(), std::int64_t{0}); }

// Sums to k, or to what is possible; every bucket between 1 and its length.
void expect_sound(const Quotas& quotas, const Quotas& lengths, std::int64_t k) {
  ASSERT_EQ(quotas.size(), lengths.size());
  std::int64_t ones = 0;
  for (std::size_t b = 0; b < lengths.size(); ++b) {
    EXPECT_GE(quotas[b], std::min<std::int64_t>(1, lengths[b]));
    EXPECT_LE(quotas[b], lengths[b]);
    ones += lengths[b] > 0 ? 1 : 0;
  }
  EXPECT_EQ(sum_of(quotas), std::min(std::max(k, ones), sum_of(lengths)));
}

TEST(Quotas, SumToKWithinTheirBoundsForAnyScales) {
  for (std::uint32_t seed = 0; seed < 500; ++seed) {
    Random random(seed);
    Quotas lengths;
    std::vector<QuotaPart> parts;
    const int buckets = 1 + static_cast<int>(random.below(20));
    for (int b = 0; b < buckets; ++b) {
      std::int64_t length = 0;
      for (std::uint32_t p = random.below(4); p > 0; --p) {
        const std::int64_t count = random.below(random.below(3) == 0 ? 5 : 100'000);
        const double scale = random.below(5) == 0   ? kUnmeasured
                             : random.below(5) == 0 ? 0
                                                    : std::exp(20 * random.uniform() - 10);
        parts.push_back({b, count, scale});
        length += count;
      }
      lengths.push_back(length);
    }
    for (const double density : {0.0, 1e-5, 0.001, 0.01, 0.3, 0.99, 1.0, 2.0}) {
      const auto k = static_cast<std::int64_t>(density * static_cast<double>(sum_of(lengths)));
      expect_sound(adaptive_quotas(lengths, parts, k), lengths, k);
      expect_sound(proportional_quotas(lengths, k), lengths, k);
    }
  }
}

TEST(Quotas, EdgesAreDefined) {
  EXPECT_EQ(adaptive_quotas({}, {}, 5), Quotas{});
  EXPECT_EQ(proportional_quotas(Quotas{0, 0}, 5), (Quotas{0, 0}));
  EXPECT_EQ(proportional_quotas(Quotas{100, 0, 300}, 40), (Quotas{10, 0, 30}));
  EXPECT_EQ(proportional_quotas(Quotas{100, 100, 100}, 2), (Quotas{1, 1, 1})) << "an entry each";
  EXPECT_EQ(proportional_quotas(Quotas{10, 5}, 1000), (Quotas{10, 5}));
  const QuotaPart zeros[] = {{0, 100, 0}, {1, 300, 0}};
  EXPECT_EQ(adaptive_quotas(Quotas{100, 300}, zeros, 40), (Quotas{10, 30})) << "zeros say nothing";
  EXPECT_THROW(quota_kind_of("fair"), UsageError);
  EXPECT_EQ(quota_kind_of("proportional"), QuotaKind::proportional);
}

TEST(Quotas, NobodyFallsBelowTheFloor) {
  const Quotas lengths{10'000, 10'000};
  const QuotaPart parts[] = {{0, 10'000, 1e6}, {1, 10'000, 1e-6}};
  const Quotas quotas = adaptive_quotas(lengths, parts, 200);
  EXPECT_EQ(quotas, (Quotas{200 - 100 / 16, 100 / 16}));
}

// What one selection over all layers would take, per layer.
Quotas one_selection(const std::vector<std::vector<float>>& layers, std::int64_t k) {
  std::vector<float> all;
  for (const auto& layer : layers) all.insert(all.end(), layer.begin(), layer.end());
  std::nth_element(all.begin(), all.begin() + (k - 1), all.end(), std::greater<>());
  const float threshold = all[static_cast<std::size_t>(k - 1)];
  Quotas out;
  for (const auto& layer : layers) {
    out.push_back(std::count_if(layer.begin(), layer.end(), [&](float v) { return v >= threshold; }));
  }
  return out;
}

// Magnitudes whose scale falls from 1 to 1/spread.
std::vector<std::vector<float>> layers_of(int count, double spread, bool heavy) {
  std::vector<std::vector<float>> layers;
  for (int layer = 0; layer < count; ++layer) {
    Random random(3, 1, static_cast<std::uint32_t>(layer));
    const double scale = std::pow(spread, -layer / (count - 1.0));
    std::vector<float> values(20'000);
    for (float& v : values) {
      const double z = std::sqrt(-2 * std::log(random.uniform())) * std::cos(6.283185307 * random.uniform());
      v = static_cast<float>(scale * (heavy ? std::exp(1.5 * z) : std::abs(z)));
    }
    layers.push_back(std::move(values));
  }
  return layers;
}

double energy(const std::vector<std::vector<float>>& layers, const Quotas& quotas) {
  double sum = 0;
  for (std::size_t b = 0; b < layers.size(); ++b) {
    std::vector<float> sorted = layers[b];
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    for (std::int64_t i = 0; i < quotas[b]; ++i) {
      sum += static_cast<double>(sorted[static_cast<std::size_t>(i)]) * sorted[static_cast<std::size_t>(i)];
    }
  }
  return sum;
}

TEST(Quotas, AdaptiveOnesSettleNearOneSelection) {
  for (const bool heavy : {false, true}) {
    const std::vector<std::vector<float>> layers = layers_of(16, 100, heavy);
    const Quotas lengths(16, 20'000);
    const std::int64_t k = 3200;
    std::vector<QuotaPart> parts;
    parts.reserve(16);
    for (int b = 0; b < 16; ++b) parts.push_back({b, 20'000, kUnmeasured});
    Quotas quotas;
    for (int step = 0; step < 12; ++step) {
      quotas = adaptive_quotas(lengths, parts, k);
      if (step == 0) {
        EXPECT_EQ(quotas, proportional_quotas(lengths, k)) << "nothing is known";
      }
      for (std::size_t b = 0; b < 16; ++b) {
        std::vector<float> top = layers[b];
        std::sort(top.begin(), top.end(), std::greater<>());
        top.resize(static_cast<std::size_t>(quotas[b]));
        parts[b].scale = blend_scales(parts[b].scale, scale_of(top, lengths[b]));
      }
    }
    const double ideal = energy(layers, one_selection(layers, k));
    EXPECT_GT(energy(layers, quotas), 0.95 * ideal) << (heavy ? "heavy" : "gaussian");
    // Control: equal density loses. (Less of it where a few outliers of each layer hold its energy.)
    EXPECT_LT(energy(layers, proportional_quotas(lengths, k)), (heavy ? 0.92 : 0.5) * ideal) << heavy;
    EXPECT_LT(energy(layers, proportional_quotas(lengths, k)), energy(layers, quotas));
  }
}

TEST(Quotas, AScaleIsThatOfTheTail) {
  // Of 4,000 elements 40 were selected, 30 of them reach 2: tail(2 / s) = 30/4000.
  std::vector<float> selected(30, 2.5F);
  selected[7] = 2.0F;
  selected.insert(selected.end(), 10, 1.9F);
  // (1 + y/256)^-256 lies within y^2/512 of exp(-y), relatively.
  EXPECT_NEAR(scale_of(selected, 4000), 2 / std::log(4000 / 30.0), 0.02);
  std::vector<float> none;
  EXPECT_EQ(scale_of(none, 4000), 0);
  std::vector<float> one{3.0F};
  EXPECT_GT(scale_of(one, 1), 0) << "a bucket of one element";
  EXPECT_EQ(blend_scales(kUnmeasured, 4), 4);
  EXPECT_EQ(blend_scales(2, 4), 3);
}

std::vector<ParameterInfo> some_parameters() {
  return {{"head", 3000, 9},    {"embed", 5000, 0}, {"a.bias", 10, 2},     {"a.weight", 2000, 1},
          {"b.weight", 900, 3}, {"b.norm", 7, 4},   {"c.weight", 1500, 5}, {"empty", 0, 6}};
}

TEST(Buckets, FollowTheOrderOfUse) {
  const BucketPlan plan(some_parameters(), {.bucket_bytes = 4 * 4000, .dense_below = 100});
  std::vector<std::vector<std::string>> names;
  for (const Bucket& b : plan.buckets()) {
    names.emplace_back();
    std::int64_t at = 0;
    for (const BucketPiece& piece : b.pieces) {
      EXPECT_EQ(piece.first, at);
      at += plan.parameter(piece.parameter).count;
      names.back().push_back(plan.parameter(piece.parameter).name);
    }
    EXPECT_EQ(b.count, at);
  }
  const std::vector<std::vector<std::string>> expected{{"embed"},  // larger than a bucket: alone
                                                       {"a.weight", "b.weight"},
                                                       {"a.bias", "b.norm", "empty"},
                                                       {"c.weight"},
                                                       {"head"}};
  EXPECT_EQ(names, expected);
  EXPECT_TRUE(plan.bucket(2).dense);
  EXPECT_FALSE(plan.bucket(1).dense);
  EXPECT_EQ(plan.sparse_count(), 3000 + 5000 + 2000 + 900 + 1500);
  for (int p = 0; p < plan.num_parameters(); ++p) EXPECT_EQ(plan.find(plan.parameter(p).name), p);
  EXPECT_EQ(plan.find("zebra"), -1);
}

TEST(Buckets, TheHashTellsPlansApart) {
  const BucketOptions options{.bucket_bytes = 4 * 4000, .dense_below = 100};
  const std::uint64_t hash = BucketPlan(some_parameters(), options).hash();
  EXPECT_EQ(hash, BucketPlan(some_parameters(), options).hash());
  auto renamed = some_parameters();
  renamed[3].name = "a.Weight";
  EXPECT_NE(hash, BucketPlan(renamed, options).hash());
  auto moved = some_parameters();
  moved[0].use = -1;
  EXPECT_NE(hash, BucketPlan(moved, options).hash());
  EXPECT_NE(hash, BucketPlan(some_parameters(), {.bucket_bytes = 1 << 20, .dense_below = 100}).hash());
  EXPECT_NE(hash, BucketPlan(some_parameters(), {.bucket_bytes = 4 * 4000, .dense_below = 0}).hash());
}

TEST(Buckets, BadListsAreRefused) {
  EXPECT_THROW(BucketPlan({{"a", 1, 0}, {"a", 2, 1}}, {}), UsageError);
  EXPECT_THROW(BucketPlan({{"", 1, 0}}, {}), UsageError);
  EXPECT_THROW(BucketPlan({{"a", -1, 0}}, {}), UsageError);
  EXPECT_THROW(BucketPlan({{"a", 1, 0}}, {.bucket_bytes = 3}), UsageError);
  EXPECT_EQ(BucketPlan({}, {}).num_buckets(), 0);
}

}  // namespace
}  // namespace weft
