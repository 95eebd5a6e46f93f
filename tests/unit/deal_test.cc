// How elements are dealt to blocks: every element once, quotas that sum to k, and no layer or column left to
// one block.
#include "patterns/deal.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

namespace weft {
namespace {

constexpr Deal::Kind kKinds[] = {Deal::Kind::dealt, Deal::Kind::contiguous};
constexpr std::int64_t kLengths[] = {0, 1, 2, 5, 63, 64, 65, 127, 128, 129, 640, 1000, 4096, 10'007};
constexpr int kSizes[] = {1, 2, 3, 5, 7, 8, 16, 33, 100};

TEST(Deal, EveryElementHasOnePlaceAndComesBackFromIt) {
  for (const Deal::Kind kind : kKinds) {
    for (const int m : kSizes) {
      for (const std::int64_t n : kLengths) {
        ASSERT_TRUE(detail::deal_is_right(kind, m, n)) << "m " << m << " n " << n;
        const Deal deal(kind, m, n);
        std::vector<std::int64_t> next(static_cast<std::size_t>(m), 0);
        for (std::int64_t i = 0; i < n; ++i) {
          const Deal::Place place = deal.place(i);
          ASSERT_GE(place.block, 0);
          ASSERT_LT(place.block, m);
          ASSERT_EQ(place.local, next[static_cast<std::size_t>(place.block)]++) << "increasing, without gaps";
          ASSERT_EQ(deal.global(place.block, place.local), i);
        }
        for (int b = 0; b < m; ++b) ASSERT_EQ(next[static_cast<std::size_t>(b)], deal.count(b));
      }
    }
  }
}

TEST(Deal, RunsOfPartsAreTheRunsOfTheWhole) {
  for (const Deal::Kind kind : kKinds) {
    for (const int m : {1, 3, 8}) {
      const Deal deal(kind, m, 3000);
      for (const std::int64_t cut : {0, 1, 64, 100, 1024, 2999, 3000}) {
        std::int64_t at = 0;
        const auto check = [&](const Deal::Run& run) {
          ASSERT_EQ(run.first, at);
          for (std::int64_t i = 0; i < run.length; ++i) {
            ASSERT_EQ(deal.place(run.first + i), (Deal::Place{run.block, run.local + i}));
          }
          at += run.length;
        };
        deal.for_each_run(0, cut, check);
        ASSERT_EQ(at, cut);
        deal.for_each_run(cut, 3000, check);
        ASSERT_EQ(at, 3000);
      }
    }
  }
}

TEST(Deal, QuotasFollowTheFormulaAndSumToK) {
  for (const Deal::Kind kind : kKinds) {
    for (const int m : kSizes) {
      for (const std::int64_t n : kLengths) {
        const Deal deal(kind, m, n);
        for (const std::int64_t k : {std::int64_t{0}, std::int64_t{1}, n / 100, n / 3, n, n + 5}) {
          std::int64_t sum = 0;
          std::int64_t raised = 0;
          for (int b = 0; b < m; ++b) {
            const std::int64_t quota = deal.quota(b, k);
            ASSERT_LE(quota, deal.count(b));
            if (k > 0 && deal.count(b) > 0) {
              ASSERT_GE(quota, 1);
            }
            if (n > 0) {
              const std::int64_t least = std::min(k, n);
              const std::int64_t share =
                  least * (deal.first(b) + deal.count(b)) / n - least * deal.first(b) / n;
              raised += quota - share;
              ASSERT_TRUE(quota == share || (share == 0 && quota == 1)) << quota << " " << share;
            }
            sum += quota;
          }
          ASSERT_EQ(sum - raised, n > 0 ? std::min(k, n) : 0);
        }
      }
    }
  }
}

TEST(Deal, LargeVectorsDoNotOverflow) {
  const std::int64_t n = (1ll << 40) - 3;
  for (const Deal::Kind kind : kKinds) {
    const Deal deal(kind, 1000, n);
    std::int64_t sum = 0;
    for (int b = 0; b < 1000; ++b) sum += deal.quota(b, n / 100 + 7);
    EXPECT_EQ(sum, n / 100 + 7);
    for (const std::int64_t i : {std::int64_t{0}, n / 3, n - 1}) {
      const Deal::Place place = deal.place(i);
      EXPECT_EQ(deal.global(place.block, place.local), i);
    }
  }
}

// A matrix whose rows are whole rows of the deal: how many blocks hold a part of column 0?
template <class BlockOf>
std::size_t blocks_of_a_column(int m, BlockOf block_of) {
  const std::int64_t row_length = Deal::kRun * m;
  std::set<int> blocks;
  for (std::int64_t row = 0; row < 200; ++row) blocks.insert(block_of(row * row_length));
  return blocks.size();
}
TEST(Deal, AColumnOfAMatrixIsSpreadOverAllBlocks) {
  for (const int m : {2, 8, 33}) {
    const Deal deal(Deal::Kind::dealt, m, 200 * Deal::kRun * m);
    EXPECT_EQ(blocks_of_a_column(m, [&](std::int64_t i) { return deal.place(i).block; }),
              static_cast<std::size_t>(m));
    // Control: by index modulo m, or dealt without rotation, it is all in one.
    EXPECT_EQ(blocks_of_a_column(m, [&](std::int64_t i) { return static_cast<int>(i % m); }), 1u);
    EXPECT_EQ(blocks_of_a_column(m, [&](std::int64_t i) { return static_cast<int>(i / Deal::kRun % m); }),
              1u);
  }
}

}  // namespace
}  // namespace weft
