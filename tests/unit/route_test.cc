// Routes of tokens to experts, against a plain loop.
#include "experts/route.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "message_of.h"
#include "weft/random.h"

namespace weft {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;

std::vector<std::int64_t> random_choices(int tokens, const RouteOptions& o, std::uint32_t seed) {
  Random random(seed, 1, 0);
  std::vector<std::int64_t> out;
  for (int t = 0; t < tokens; ++t) {
    const auto first = random.below(static_cast<std::uint32_t>(o.experts));
    out.push_back(first);
    for (int i = 1; i < o.choices; ++i)
      out.push_back((first + static_cast<std::uint32_t>(i)) % static_cast<std::uint32_t>(o.experts));
  }
  return out;
}

// For each expert its places: which token stands there, or -1.
std::map<int, std::vector<std::int64_t>> places_of(const std::vector<std::int64_t>& experts,
                                                   const RouteOptions& o) {
  const auto tokens = static_cast<std::int64_t>(experts.size()) / o.choices;
  std::map<int, std::vector<std::int64_t>> out;
  for (int e = 0; e < o.experts; ++e) out[e];
  for (int choice = 0; choice < o.choices; ++choice) {
    for (std::int64_t t = 0; t < tokens; ++t)
      out[static_cast<int>(experts[static_cast<std::size_t>(t * o.choices + choice)])].push_back(t);
  }
  if (o.capacity_factor == 0) return out;
  const double even = static_cast<double>(tokens * o.choices) / o.experts;
  for (auto& [expert, row] : out)
    row.resize(static_cast<std::size_t>(std::ceil(even * o.capacity_factor)), -1);
  return out;
}

struct Case {
  RouteOptions options;
  int tokens = 0;
};

std::vector<Case> cases() {
  std::vector<Case> out;
  for (const int experts : {1, 2, 5, 8}) {
    for (const int choices : {1, 2}) {
      if (choices > experts) continue;
      for (const double factor : {0.0, 0.5, 1.0, 1.25, 4.0}) {
        for (const int slices : {1, 2, 3, 7}) {
          for (const int tokens : {0, 1, 3, 40})
            out.push_back(
                {{.experts = experts, .choices = choices, .capacity_factor = factor, .slices = slices},
                 tokens});
        }
      }
    }
  }
  return out;
}

TEST(Route, PutsEveryCopyWhereAPlainLoopDoes) {
  std::int64_t dropped = 0, empty = 0;
  for (const Case& c : cases()) {
    const RouteOptions& o = c.options;
    const std::vector<std::int64_t> experts = random_choices(c.tokens, o, 3);
    const Route way = route(experts, o);
    const std::map<int, std::vector<std::int64_t>> places = places_of(experts, o);
    // Slice by slice, expert by expert, the same tokens in the same order.
    std::vector<std::int64_t> expected;
    for (int s = 0; s < o.slices; ++s) {
      for (int e = 0; e < o.experts; ++e) {
        const std::vector<std::int64_t>& row = places.at(e);
        const std::size_t each = row.size() / static_cast<std::size_t>(o.slices),
                          longer = row.size() % static_cast<std::size_t>(o.slices);
        const auto at = static_cast<std::size_t>(s);
        const std::size_t begin = at * each + std::min(at, longer), count = each + (at < longer ? 1 : 0);
        expected.insert(expected.end(), row.begin() + static_cast<std::ptrdiff_t>(begin),
                        row.begin() + static_cast<std::ptrdiff_t>(begin + count));
        EXPECT_EQ(way.counts[at * static_cast<std::size_t>(o.experts) + static_cast<std::size_t>(e)],
                  static_cast<std::int64_t>(count));
      }
    }
    ASSERT_EQ(way.token_of_row, expected);
    // Every copy has one row, of its token, or none; every row that is not empty is a copy's.
    std::int64_t kept = 0;
    std::vector<int> used(expected.size());
    for (std::size_t copy = 0; copy < experts.size(); ++copy) {
      const std::int64_t row = way.row_of_copy[copy];
      if (row < 0) continue;
      ++kept;
      ++used[static_cast<std::size_t>(row)];
      EXPECT_EQ(expected[static_cast<std::size_t>(row)], static_cast<std::int64_t>(copy) / o.choices);
    }
    for (std::size_t row = 0; row < used.size(); ++row) EXPECT_EQ(used[row], expected[row] >= 0 ? 1 : 0);
    EXPECT_EQ(kept + way.num_dropped, static_cast<std::int64_t>(experts.size()));
    if (o.capacity_factor == 0) {
      EXPECT_EQ(way.num_dropped, 0);
      EXPECT_EQ(way.num_rows(), kept);
    } else {
      EXPECT_EQ(way.num_rows(), o.experts * capacity_of(o, c.tokens));
    }
    EXPECT_EQ(std::accumulate(way.chosen.begin(), way.chosen.end(), std::int64_t{0}),
              static_cast<std::int64_t>(experts.size()));
    dropped += way.num_dropped;
    empty += way.num_rows() - kept;
  }
  // The cases have what they are about.
  EXPECT_GT(dropped, 0);
  EXPECT_GT(empty, 0);
}

// Two tokens that choose expert 0 first come before one that chooses it second, though that one stands first.
TEST(Route, SecondChoicesStandBehindAllFirstOnes) {
  const std::vector<std::int64_t> experts{1, 0, 0, 1, 0, 1};
  const RouteOptions one{.experts = 2, .choices = 2, .capacity_factor = 2.0 / 3, .slices = 1};
  ASSERT_EQ(capacity_of(one, 3), 2);
  const Route way = route(experts, one);
  EXPECT_THAT(way.token_of_row, ElementsAre(1, 2, 0, 1));
  EXPECT_THAT(way.row_of_copy, ElementsAre(2, -1, 0, 3, 1, -1));
  EXPECT_EQ(way.num_dropped, 2);
}

TEST(Route, RowsThatArriveAreOrderedByExpertThenBySource) {
  // Source 0: 2 rows of expert 0, 1 of expert 1; source 1: none, 3.
  const std::vector<std::int64_t> counts{2, 1, 0, 3};
  EXPECT_THAT(by_expert(counts, 2), ElementsAre(0, 1, 2, 3, 4, 5));
  const std::vector<std::int64_t> mixed{1, 2, 2, 1};
  EXPECT_THAT(by_expert(mixed, 2), ElementsAre(0, 3, 4, 1, 2, 5));
}

TEST(Route, WhatCannotBeMeantIsRefused) {
  const auto refused = [](RouteOptions o) { return message_of([&] { check(o); }); };
  EXPECT_THAT(refused({.experts = 0}), HasSubstr("at least one"));
  EXPECT_THAT(refused({.experts = 2, .choices = 3}), HasSubstr("1 to 2 choices"));
  EXPECT_THAT(refused({.experts = 2, .capacity_factor = -1}), HasSubstr("capacity factor"));
  EXPECT_THAT(refused({.experts = 2, .slices = 0}), HasSubstr("at least one slice"));
  const std::vector<std::int64_t> wrong{0, 2};
  EXPECT_THAT(message_of([&] { static_cast<void>(route(wrong, {.experts = 2})); }),
              HasSubstr("token 1 chose expert 2 of 2"));
}

}  // namespace
}  // namespace weft
