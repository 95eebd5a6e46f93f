// Lists of row ids and the kernels on rows, against sets and maps: which rows are prior, which delayed, and
// what coalescing keeps.
#include "kernels/rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <numeric>
#include <set>

#include "embedding/row_lists.h"
#include "weft/random.h"

namespace weft {
namespace {

using Ids = std::vector<std::int32_t>;

// Of one rank, any order, ids several times: small ones more often.
std::vector<std::int64_t> draw(std::uint32_t seed, std::uint32_t rank, std::size_t tokens,
                               std::int64_t rows) {
  Random random(21, 1, seed, rank);
  std::vector<std::int64_t> out(tokens);
  for (std::int64_t& id : out) {
    const double u = random.uniform();
    id = static_cast<std::int64_t>(u * u * static_cast<double>(rows));
  }
  return out;
}

RowLists lists_of(std::uint32_t seed, int ranks, std::size_t tokens) {
  RowLists out;
  for (int r = 0; r < ranks; ++r) {
    // The last rank has nothing in some of them.
    const bool none = seed % 3 == 2 && r == ranks - 1;
    out.of_rank.push_back(unique_ids(draw(seed, static_cast<std::uint32_t>(r), none ? 0 : tokens, 50)));
  }
  out.unite();
  return out;
}

bool is_list(const Ids& ids) { return std::ranges::adjacent_find(ids, std::greater_equal()) == ids.end(); }
Ids both(const Ids& a, const Ids& b) {
  Ids out;
  std::ranges::set_intersection(a, b, std::back_inserter(out));
  return out;
}
Ids either(const Ids& a, const Ids& b) {
  Ids out;
  std::ranges::set_union(a, b, std::back_inserter(out));
  return out;
}

TEST(RowIds, ListsAreWhatSetsSay) {
  for (std::uint32_t seed = 0; seed < 20; ++seed) {
    const std::vector<std::int64_t> ids = draw(seed, 0, seed, 30);
    const std::set<std::int64_t> expected(ids.begin(), ids.end());
    const Ids list = unique_ids(ids);
    EXPECT_TRUE(is_list(list));
    EXPECT_TRUE(std::ranges::equal(list, expected));
    const Ids places = places_of(std::span<const std::int64_t>(ids), list);
    ASSERT_EQ(places.size(), ids.size());
    for (std::size_t i = 0; i < ids.size(); ++i) EXPECT_EQ(list[static_cast<std::size_t>(places[i])], ids[i]);
    const RowLists lists = lists_of(seed, 5, 12);
    std::set<std::int32_t> all;
    std::int64_t total = 0;
    for (const Ids& of : lists.of_rank) {
      all.insert(of.begin(), of.end());
      total += static_cast<std::int64_t>(of.size());
    }
    EXPECT_TRUE(is_list(lists.all));
    EXPECT_TRUE(std::ranges::equal(lists.all, all));
    EXPECT_EQ(lists.total(), total);
  }
  EXPECT_FALSE(is_list({1, 1}));  // controls
  EXPECT_FALSE(is_list({2, 1}));
}

// Prior rows of a rank: those of its list that any rank reads next.
TEST(RowIds, PriorAndDelayedAreTheTwoPartsOfAList) {
  int own_would_differ = 0;
  for (std::uint32_t seed = 0; seed < 30; ++seed) {
    const RowLists now = lists_of(2 * seed, 4, 25), next = lists_of(2 * seed + 1, 4, 25);
    for (std::size_t r = 0; r < now.of_rank.size(); ++r) {
      const Ids& list = now.of_rank[r];
      const SplitIds parts = split_ids(list, next.all);
      const Ids prior = ids_at(list, parts.in), delayed = ids_at(list, parts.out);
      EXPECT_TRUE(is_list(parts.in));
      EXPECT_TRUE(is_list(parts.out));
      EXPECT_TRUE(is_list(prior));
      EXPECT_TRUE(is_list(delayed));
      EXPECT_TRUE(both(prior, delayed).empty());
      EXPECT_EQ(either(prior, delayed), list);
      EXPECT_EQ(prior, both(list, next.all));
      own_would_differ += ids_at(list, split_ids(list, next.of_rank[r]).in) != prior ? 1 : 0;
    }
  }
  EXPECT_GT(own_would_differ, 60);  // control: by its own next list a rank would split most of 120 otherwise
}

TEST(RowIds, EdgesOfTheSplit) {
  const Ids list{1, 4, 7, 9};
  EXPECT_TRUE(split_ids(list, {}).in.empty());
  EXPECT_EQ(ids_at(list, split_ids(list, {}).out), list);
  EXPECT_TRUE(split_ids(list, list).out.empty());
  EXPECT_EQ(ids_at(list, split_ids(list, list).in), list);
  EXPECT_TRUE(split_ids({}, list).in.empty());
  EXPECT_TRUE(split_ids({}, list).out.empty());
  EXPECT_EQ(ids_at(list, split_ids(list, Ids{0, 4, 8, 9, 12}).in), (Ids{4, 9}));
  RowLists none{.of_rank = {{}, {}}, .all = {3}};
  none.unite();
  EXPECT_TRUE(none.all.empty());
  EXPECT_EQ(none.total(), 0);
}

// ---- coalescing ----

constexpr std::size_t kWidth = 5;

struct Tokens {
  std::vector<std::int64_t> ids;
  std::vector<double> rows;  // a gradient of each
};

Tokens tokens_of(std::uint32_t seed, std::size_t count, bool whole_numbers) {
  Tokens out{draw(seed, 0, count, 20), std::vector<double>(count * kWidth)};
  Random random(21, 2, seed);
  for (double& v : out.rows)
    v = whole_numbers ? static_cast<double>(random.below(2001)) - 1000 : random.uniform() - 0.5;
  return out;
}

struct Coalesced {
  Ids list;
  std::vector<double> sums;
};
Coalesced coalesced(const Tokens& tokens) {
  Coalesced out{unique_ids(tokens.ids), {}};
  out.sums.assign(out.list.size() * kWidth, 0);
  add_rows(std::span<const double>(tokens.rows), kWidth,
           places_of(std::span<const std::int64_t>(tokens.ids), out.list), std::span<double>(out.sums));
  return out;
}

Tokens shuffled(const Tokens& tokens, std::uint32_t seed, bool only_rows = false) {
  std::vector<std::size_t> order(tokens.ids.size());
  std::iota(order.begin(), order.end(), 0);
  Random random(21, 3, seed);
  for (std::size_t i = order.size(); i > 1; --i)
    std::swap(order[i - 1], order[random.below(static_cast<std::uint32_t>(i))]);
  Tokens out = tokens;
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (!only_rows) out.ids[i] = tokens.ids[order[i]];
    std::copy_n(tokens.rows.begin() + static_cast<std::ptrdiff_t>(order[i] * kWidth), kWidth,
                out.rows.begin() + static_cast<std::ptrdiff_t>(i * kWidth));
  }
  return out;
}

double distance(const std::vector<double>& a, const std::vector<double>& b) {
  double worst = a.size() == b.size() ? 0 : HUGE_VAL;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i)
    worst = std::max(worst, std::abs(a[i] - b[i]));
  return worst;
}

std::vector<double> column_sums(const std::vector<double>& rows) {
  std::vector<double> out(kWidth, 0);
  for (std::size_t i = 0; i < rows.size(); ++i) out[i % kWidth] += rows[i];
  return out;
}

// 64 values below 1/2 have partial sums below 32: two orders of addition differ by less than
// 2 * 64 * 32 * 2^-53 = 4.5e-13.
constexpr double kSame = 1e-12;

TEST(Coalesce, KeepsColumnSumsWhateverTheOrder) {
  for (std::uint32_t seed = 0; seed < 10; ++seed) {
    for (const std::size_t count : {0, 1, 7, 64}) {
      for (const bool whole_numbers : {false, true}) {
        const double same = whole_numbers ? 0 : kSame;  // whole numbers are summed exactly
        const Tokens tokens = tokens_of(seed, count, whole_numbers);
        const Coalesced once = coalesced(tokens), again = coalesced(shuffled(tokens, seed));
        EXPECT_TRUE(is_list(once.list));
        EXPECT_LE(distance(column_sums(once.sums), column_sums(tokens.rows)), same);
        EXPECT_EQ(again.list, once.list);
        EXPECT_LE(distance(again.sums, once.sums), same);
        // Coalesced once more, a list of rows is itself.
        Tokens rows{{once.list.begin(), once.list.end()}, once.sums};
        EXPECT_EQ(coalesced(rows).sums, once.sums);
        if (count < 64) continue;
        EXPECT_LT(once.list.size(), count);  // some had to be added
        // Controls: a row that is lost, and rows under others' ids.
        Tokens lost = tokens;
        std::fill_n(lost.rows.begin(), kWidth, 0.0);
        EXPECT_GT(distance(column_sums(coalesced(lost).sums), column_sums(tokens.rows)), 1e-6);
        EXPECT_GT(distance(coalesced(shuffled(tokens, seed, true)).sums, once.sums), 1e-3);
      }
    }
  }
}

// Columns that are gathered for each rank and placed where they were are the rows again.
TEST(Rows, GatheredColumnsArePlacedWhereTheyWere) {
  const Tokens tokens = tokens_of(3, 12, true);
  const Ids some{2, 5, 11};
  std::vector<double> out(tokens.rows.size(), 0);
  for (const Columns& columns : {Columns{kWidth, 0, 2}, Columns{kWidth, 2, 0}, Columns{kWidth, 2, 3}}) {
    std::vector<double> part(some.size() * columns.count);
    gather_rows(std::span<const double>(tokens.rows), columns, some, std::span<double>(part));
    place_rows(std::span<const double>(part), columns, some, std::span<double>(out));
  }
  for (std::size_t i = 0; i < out.size(); ++i) {
    const bool moved = std::ranges::binary_search(some, static_cast<std::int32_t>(i / kWidth));
    EXPECT_EQ(out[i], moved ? tokens.rows[i] : 0);
  }
}

}  // namespace
}  // namespace weft
