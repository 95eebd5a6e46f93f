// Where experts are placed, and who decides: counted by hand and by plain loops.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "experts/placement.h"
#include "experts/placer.h"
#include "experts/popularity.h"
#include "message_of.h"
#include "weft/random.h"
#include "workload/drawn_router.h"

namespace weft {
namespace {

using ::testing::HasSubstr;
using testing::message_of;

double sum(std::span<const double> values) { return std::accumulate(values.begin(), values.end(), 0.0); }

// Rows of a rank by quotas, counted one by one.
std::vector<double> loads_of(const ExpertPlacement& placement, std::span<const double> rows, int ranks) {
  std::vector<double> out(static_cast<std::size_t>(ranks));
  for (std::size_t e = 0; e < rows.size(); ++e) {
    for (const int rank : placement.replicas[e])
      out[static_cast<std::size_t>(rank)] += rows[e] / static_cast<double>(placement.replicas[e].size());
  }
  return out;
}

// Every expert is somewhere, nowhere twice, and no rank has too many.
void expect_legal(const ExpertPlacement& placement, const PlacementOptions& o) {
  ASSERT_EQ(placement.replicas.size(), static_cast<std::size_t>(o.experts));
  std::vector<int> experts(static_cast<std::size_t>(o.ranks));
  for (const std::vector<int>& on : placement.replicas) {
    EXPECT_FALSE(on.empty());
    EXPECT_TRUE(std::ranges::is_sorted(on));
    EXPECT_EQ(std::ranges::adjacent_find(on), on.end());
    for (const int rank : on) {
      ASSERT_TRUE(rank >= 0 && rank < o.ranks);
      ++experts[static_cast<std::size_t>(rank)];
    }
  }
  EXPECT_LE(*std::ranges::max_element(experts), o.most);
}

std::vector<double> skewed(Random& random, int experts) {
  std::vector<double> out(static_cast<std::size_t>(experts));
  for (double& rows : out) {
    const double u = random.uniform();
    rows = random.below(6) == 0 ? 0 : std::floor(1000 * u * u * u);
  }
  return out;
}

TEST(ExpertPlacement, IsLegalAndNeverWorseThanStaticWhateverTheRows) {
  Random random(1);
  for (int i = 0; i < 300; ++i) {
    PlacementOptions o;
    o.ranks = 1 + static_cast<int>(random.below(9));
    o.most = 1 + static_cast<int>(random.below(5));
    o.experts = 1 + static_cast<int>(random.below(static_cast<std::uint32_t>(o.ranks * o.most)));
    o.expert_rows = random.below(2) == 0 ? 0 : 20;
    const std::vector<double> rows = skewed(random, o.experts);
    const ExpertPlacement plan = plan_placement(rows, o);
    expect_legal(plan, o);
    EXPECT_EQ(plan, plan_placement(rows, o));
    EXPECT_LE(max_load(plan, rows, o), max_load(static_placement(o), rows, o));
    if (o.expert_rows == 0) {
      EXPECT_NEAR(max_load(plan, rows, o), std::ranges::max(loads_of(plan, rows, o.ranks)), 1e-9);
    }
  }
}

TEST(ExpertPlacement, HotExpertsHaveSeveralRanksAndColdOnesShareOne) {
  const PlacementOptions o{.ranks = 4, .experts = 5};
  const std::vector<double> rows{200, 100, 34, 33, 33};
  const ExpertPlacement plan = plan_placement(rows, o);
  expect_legal(plan, o);
  EXPECT_GE(plan.replicas[0].size(), 2u);
  EXPECT_NEAR(max_load(plan, rows, o), 100, 1e-6);  // nobody has more than the mean
  EXPECT_NEAR(max_load(static_placement(o), rows, o), 200 + 33,
              1e-6);  // control: experts 0 and 4 share rank 0
}

TEST(ExpertPlacement, AZipfLawIsBalancedWithinAFewPercentAndOneExpertARankIsNot) {
  PlacementOptions o{.ranks = 8, .experts = 8};
  std::vector<double> rows;
  for (int i = 1; i <= 8; ++i) rows.push_back(1000 * std::pow(i, -0.8));
  const double mean = sum(rows) / 8;
  EXPECT_LT(max_load(plan_placement(rows, o), rows, o), 1.05 * mean);
  o.most = 1;
  EXPECT_GT(max_load(plan_placement(rows, o), rows, o), 1.5 * mean);
  EXPECT_EQ(plan_placement(rows, o), static_placement(o));
}

TEST(ExpertPlacement, WhatAnExpertCostsBesideItsRowsKeepsReplicasFew) {
  PlacementOptions o{.ranks = 8, .experts = 8};
  std::vector<double> rows;
  for (int i = 1; i <= 8; ++i) rows.push_back(1000 * std::pow(i, -0.8));
  const auto replicas = [&] {
    std::size_t out = 0;
    for (const std::vector<int>& on : plan_placement(rows, o).replicas) out += on.size();
    return out;
  };
  const std::size_t free = replicas();
  o.expert_rows = 200;
  EXPECT_LT(replicas(), free);
}

TEST(ExpertPlacement, QuotasSumToTheRowsAndDifferByOneAtMost) {
  EXPECT_EQ(quotas(10, 4), (std::vector<std::int64_t>{3, 3, 2, 2}));
  EXPECT_EQ(quotas(0, 2), (std::vector<std::int64_t>{0, 0}));
  EXPECT_EQ(quotas(2, 3), (std::vector<std::int64_t>{1, 1, 0}));
}

TEST(ExpertPlacement, RowsAreDealtAsTheQuotasSayAndNoneIsLost) {
  Random random(2);
  for (int i = 0; i < 100; ++i) {
    PlacementOptions o;
    o.ranks = 1 + static_cast<int>(random.below(6));
    o.experts = 1 + static_cast<int>(random.below(static_cast<std::uint32_t>(o.ranks * o.most)));
    const auto ranks = static_cast<std::size_t>(o.ranks), experts = static_cast<std::size_t>(o.experts);
    std::vector<std::int64_t> counts(ranks * experts);
    for (std::int64_t& n : counts) n = random.below(3) == 0 ? 0 : random.below(40);
    std::vector<double> all(experts);
    for (std::size_t at = 0; at < counts.size(); ++at) all[at % experts] += static_cast<double>(counts[at]);
    const ExpertPlacement plan = plan_placement(all, o);
    const std::vector<std::int64_t> dealt = deal_rows(plan, counts, o);
    for (std::size_t e = 0; e < experts; ++e) {
      std::vector<std::int64_t> got(ranks);
      for (std::size_t s = 0; s < ranks; ++s) {
        std::int64_t left = 0;
        for (std::size_t r = 0; r < ranks; ++r) {
          const std::int64_t rows = dealt[(s * ranks + r) * experts + e];
          EXPECT_GE(rows, 0);
          left += rows;
          got[r] += rows;
        }
        EXPECT_EQ(left, counts[s * experts + e]);
      }
      std::vector<std::int64_t> expected(ranks);
      const std::vector<std::int64_t> of_replica =
          quotas(static_cast<std::int64_t>(all[e]), plan.replicas[e].size());
      for (std::size_t j = 0; j < of_replica.size(); ++j)
        expected[static_cast<std::size_t>(plan.replicas[e][j])] = of_replica[j];
      EXPECT_EQ(got, expected);
    }
  }
}

TEST(ExpertPlacement, ARankKeepsItsOwnRowsWhereItHasTheirExpert) {
  const PlacementOptions o{.ranks = 2, .experts = 1};
  const ExpertPlacement both{{{0, 1}}};
  EXPECT_EQ(deal_rows(both, std::vector<std::int64_t>{5, 5}, o), (std::vector<std::int64_t>{5, 0, 0, 5}));
  EXPECT_EQ(deal_rows(both, std::vector<std::int64_t>{9, 2}, o), (std::vector<std::int64_t>{6, 3, 0, 2}));
}

TEST(ExpertPlacement, RefusesWhatDoesNotFit) {
  EXPECT_THAT(message_of([] { check(PlacementOptions{.ranks = 2, .experts = 9}); }), HasSubstr("do not fit"));
  EXPECT_THAT(message_of([] { check(PlacementOptions{.ranks = 0}); }), HasSubstr("at least one rank"));
  EXPECT_THAT(message_of([] { find_placement("linna"); }), HasSubstr("did you mean 'lina'?"));
  EXPECT_THAT(message_of([] { check(PlacerOptions{.check = "luck"}); }), HasSubstr("load or sets"));
}

// ---- who decides ----

PlacerOptions options_of(const std::string& placement, const std::string& check) {
  return {.placement = placement, .place = {.ranks = 8, .experts = 8}, .layers = 1, .check = check};
}

std::vector<std::int64_t> zipf_counts(int turned) {
  std::vector<std::int64_t> out(8);
  for (int i = 0; i < 8; ++i)
    out[static_cast<std::size_t>((i + turned) % 8)] = static_cast<std::int64_t>(1000 * std::pow(i + 1, -0.8));
  return out;
}

TEST(Placer, APerfectEstimateIsNeverPlannedAgain) {
  for (const char* check : {"load", "sets"}) {
    Placer placer(options_of("lina", check));
    for (int i = 0; i < 8; ++i) {
      const std::vector<std::int64_t> counts = zipf_counts(i);
      placer.plan(0, std::vector<double>(counts.begin(), counts.end()));
      placer.settle(0, counts);
    }
    EXPECT_EQ(placer.replans(), 0) << check;
    EXPECT_EQ(placer.checks(), 8);
  }
}

TEST(Placer, AnAdversarialEstimateAlwaysIsAndIsThenAsGoodAsAPlanWithoutOne) {
  for (const char* check : {"load", "sets"}) {
    Placer placer(options_of("lina", check));
    for (int i = 0; i < 8; ++i) {
      const std::vector<std::int64_t> counts = zipf_counts(i);
      const std::vector<double> real(counts.begin(), counts.end());
      const auto [least, most] = std::ranges::minmax(real);
      std::vector<double> wrong;  // the hottest is expected to be the coldest
      wrong.reserve(real.size());
      for (const double rows : real) wrong.push_back(least + most - rows);
      placer.plan(0, wrong);
      const double misled = max_load(placer.placement(0), real, placer.options().place);
      const double settled = max_load(placer.settle(0, counts), real, placer.options().place);
      EXPECT_TRUE(placer.replanned(0));
      EXPECT_LE(settled,
                max_load(plan_placement(real, placer.options().place), real, placer.options().place));
      EXPECT_LT(settled, misled);
    }
    EXPECT_EQ(placer.replans(), placer.checks()) << check;
  }
}

TEST(Placer, SetsAreComparedInAnyOrderAndLoadByWhatTheBusiestRankGets) {
  PlacerOptions o = options_of("lina", "sets");
  const std::vector<double> expected{50, 40, 10, 10, 10, 10, 10, 10}, swapped{40, 50, 10, 10, 10, 10, 10, 10},
      flat{50, 10, 40, 10, 10, 10, 10, 10};
  const ExpertPlacement plan = plan_placement(expected, o.place);
  EXPECT_TRUE(keeps(plan, expected, swapped, o));
  EXPECT_FALSE(keeps(plan, expected, flat, o));
  o.check = "load";
  o.tolerance = 0;
  EXPECT_TRUE(keeps(plan, expected, expected, o));
  EXPECT_FALSE(keeps(plan, expected, flat, o));
  o.tolerance = 10;
  EXPECT_TRUE(keeps(plan, expected, flat, o));
  // An estimate of fewer rows that are shared alike promises as much.
  std::vector<double> half = expected;
  for (double& rows : half) rows /= 2;
  o.tolerance = 0.001;
  EXPECT_TRUE(keeps(plan, half, expected, o));
}

TEST(Placer, AllRanksDecideTheSameFromTheSameNumbers) {
  Placer one(options_of("lina", "load")), other(options_of("lina", "load"));
  for (int i = 0; i < 6; ++i) {
    const std::vector<std::int64_t> counts = zipf_counts(i), guess = zipf_counts(i + i % 2);
    for (Placer* placer : {&one, &other}) {
      placer->plan(0, std::vector<double>(guess.begin(), guess.end()));
      placer->settle(0, counts);
    }
    EXPECT_EQ(one.placement(0), other.placement(0));
  }
  EXPECT_GT(one.replans(), 0);
  EXPECT_LT(one.replans(), one.checks());
}

TEST(Placer, HistoryPlacesAnewByItsWindowAndStaticNever) {
  PlacerOptions o = options_of("history", "load");
  o.window = 2;
  o.every = 2;
  Placer history(o), never(options_of("static", "load"));
  const ExpertPlacement plain = static_placement(o.place);
  const auto serve = [&](int turned) {
    for (Placer* placer : {&history, &never}) {
      placer->settle(0, zipf_counts(turned));
      placer->batch_end();
    }
  };
  serve(0);
  EXPECT_EQ(history.placement(0), plain);  // not yet
  serve(0);
  const std::vector<std::int64_t> counts = zipf_counts(0);
  const ExpertPlacement first = plan_placement(std::vector<double>(counts.begin(), counts.end()), o.place);
  EXPECT_EQ(history.placement(0), first);
  serve(3);
  EXPECT_EQ(history.placement(0), first);
  serve(3);
  EXPECT_NE(history.placement(0), first);  // what came before the window is forgotten
  EXPECT_EQ(never.placement(0), plain);
}

// On the drawn router, both phases together: the busiest rank has little more than the mean to do.
TEST(Placer, PathsTellWhatANewBatchDoesAndAnEstimateWithoutThemDoesNot) {
  const DrawnRouter router({.layers = 6, .drifts = true, .period = 32});
  std::vector<std::int64_t> replans;
  for (const int path : {3, 0}) {
    Popularity profile({.layers = 6, .experts = 8, .path = path});
    for (int b = 0; b < 32; ++b) {
      const std::vector<std::int32_t> paths = router.draw(1, b, 0, 1024);
      for (std::size_t at = 0; at < paths.size(); at += 6) profile.record(std::span(paths).subspan(at, 6));
    }
    PlacerOptions o = options_of("lina", "load");
    o.layers = 6;
    Placer placer(o);
    for (int b = 0; b < 32; ++b) {
      const std::vector<std::int32_t> paths = router.draw(2, b, 0, 2048);
      for (int l = 3; l < 6; ++l) {
        std::vector<double> expected(8);
        std::vector<std::int64_t> counts(8);
        for (std::size_t at = 0; at < paths.size(); at += 6) {
          profile.estimate(l, std::span(paths).subspan(at, static_cast<std::size_t>(l)), expected);
          ++counts[static_cast<std::size_t>(paths[at + static_cast<std::size_t>(l)])];
        }
        placer.plan(l, expected);
        placer.settle(l, counts);
        const std::vector<double> real(counts.begin(), counts.end());
        EXPECT_LT(max_load(placer.placement(l), real, o.place), 1.2 * 2048 / 8);
      }
    }
    replans.push_back(placer.replans());
  }
  EXPECT_LT(replans[0], 5);   // of 96
  EXPECT_GT(replans[1], 30);  // control: all tokens alike
}

}  // namespace
}  // namespace weft
