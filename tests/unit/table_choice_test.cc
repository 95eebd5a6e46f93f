// Which way a table takes, and what the ways send by formula.
#include "workload/table_choice.h"

#include <gtest/gtest.h>

#include <set>

#include "embedding/choose.h"
#include "embedding/formula.h"
#include "embedding/ways.h"
#include "message_of.h"
#include "weft/error.h"
#include "workload/table_draws.h"

namespace weft {
namespace {

constexpr LinkCost kNoLatency{.hop_seconds = 0, .seconds_per_byte = 1e-9, .fold_seconds_per_byte = 0};
constexpr LinkCost kGigabit{.hop_seconds = 50e-6, .seconds_per_byte = 8e-9, .fold_seconds_per_byte = 0};

double seconds_of(std::string_view way, const TableFigures& figures, const LinkCost& link) {
  for (const TableCost& cost : table_costs(figures, link)) {
    if (cost.way == way) return cost.seconds;
  }
  ADD_FAILURE() << way;
  return 0;
}

// Rows so wide that 4 bytes of an id are nothing.
TableFigures wide(int size, double share) {
  return {.rows = 1000, .columns = 1 << 20, .tokens = 1000 * share, .size = size};
}

// embrace.md, invariant 20: without latency the choice flips where a rank touches 2/P of the table.
TEST(TableChoice, FlipsFromAllGatherToDenseAtTwoOverTheRanks) {
  constexpr std::string_view kBoth[] = {"allgather", "dense"};
  for (const int size : {4, 5, 8, 16, 64}) {
    const double edge = 2.0 / size;
    const auto way = [&](double share) { return choose_table_way(wide(size, share), kNoLatency, kBoth).way; };
    EXPECT_EQ(way(edge * 0.999), "allgather") << size;
    EXPECT_EQ(way(edge * 1.001), "dense") << size;
  }
  // Controls: with latency it does not flip there, and with narrow rows the ids move the edge.
  const LinkCost late{.hop_seconds = 1e3, .seconds_per_byte = 1e-9, .fold_seconds_per_byte = 0};
  EXPECT_NE(choose_table_way(wide(8, 0.25 * 0.999), late, kBoth).way, "allgather");
  TableFigures narrow = wide(8, 0.25 * 0.999);
  narrow.columns = 1;
  EXPECT_EQ(choose_table_way(narrow, kNoLatency, kBoth).way, "dense");
}

TEST(TableChoice, CostsAreInTheRatiosOfTheirFormulas) {
  for (const int size : {2, 4, 8, 16}) {
    const TableFigures f = wide(size, 0.1);
    const double columns = seconds_of("embrace", f, kNoLatency);
    EXPECT_NEAR(columns / seconds_of("dense", f, kNoLatency), 0.1, 1e-4) << size;
    EXPECT_NEAR(columns / seconds_of("allgather", f, kNoLatency), 2.0 / size, 1e-4) << size;
    EXPECT_NEAR(columns / seconds_of("hashed", f, kNoLatency), 1, 1e-4) << size;
    const double servers = (size + 3) / 4;
    EXPECT_NEAR(columns / seconds_of("parallax", f, kNoLatency), servers / size, 1e-4) << size;
  }
}

TEST(TableChoice, TakesWhatIsFastestAndSaysWhy) {
  // The language model of the paper: few rows of a large table.
  TableFigures lm{
      .rows = 793471, .columns = 512, .tokens = 2560, .unique_ratio = 0.62, .prior_share = 0.35, .size = 8};
  TableChoice choice = choose_table_way(lm, kGigabit);
  EXPECT_EQ(choice.way, "embrace");
  EXPECT_TRUE(choice.splits);
  EXPECT_NE(choice.why.find("0.2 % of its rows"), std::string::npos) << choice.why;
  EXPECT_EQ(choice.costs.size(), 5U);
  for (const TableCost& cost : choice.costs) EXPECT_GE(cost.seconds, choice.costs[0].seconds);
  lm.prior_share = 0.81;
  choice = choose_table_way(lm, kGigabit);
  EXPECT_FALSE(choice.splits);
  EXPECT_NE(choice.why.find("81 % of its rows are read again"), std::string::npos) << choice.why;
  // Every row is touched by every rank: ids and two exchanges gain nothing.
  EXPECT_EQ(choose_table_way({.rows = 500, .columns = 64, .tokens = 500, .size = 8}, kGigabit).way, "dense");
  // 9 columns of 8 ranks: one rank has two of them, and would send twice as much as the others.
  EXPECT_EQ(choose_table_way({.rows = 1'000'000, .columns = 9, .tokens = 1e5, .size = 8}, kNoLatency).way,
            "hashed");
  // Two ranks: a gather and an exchange by columns send the same, but one has one phase less.
  EXPECT_EQ(choose_table_way({.rows = 1'000'000, .columns = 64, .tokens = 100, .size = 2}, kGigabit).way,
            "allgather");
  EXPECT_EQ(choose_table_way({.rows = 10, .columns = 4, .tokens = 5, .size = 1}, kGigabit).why,
            "one rank has all of it: 0 ms a step by cost, hashed 0 ms");
}

TEST(TableChoice, SharedRowsMakeAGatherCheaper) {
  TableFigures f{.rows = 1'000'000, .columns = 64, .tokens = 10000, .size = 8};
  const double apart = seconds_of("allgather", f, kNoLatency);
  f.shared_rows = 10000;
  EXPECT_NEAR(seconds_of("allgather", f, kNoLatency) / apart, (2.0 / 8 + 4.0 / 256) / (1 + 4.0 / 256), 1e-3);
  f.size = 2;
  const double two = seconds_of("allgather", f, kNoLatency);
  f.shared_rows = 0;
  EXPECT_EQ(seconds_of("allgather", f, kNoLatency), two);
}

TEST(TableChoice, RefusesWhatCannotBe) {
  EXPECT_THROW(choose_table_way({}, kGigabit), UsageError);
  EXPECT_THROW(choose_table_way({.rows = 1, .columns = 1, .tokens = 1, .unique_ratio = 2}, kGigabit),
               UsageError);
  EXPECT_THROW(choose_table_way({.rows = 1, .columns = 1, .tokens = 1, .shared_rows = 2}, kGigabit),
               UsageError);
  constexpr std::string_view kUnknown[] = {"allgather-raw"};
  EXPECT_THROW(choose_table_way({.rows = 1, .columns = 1, .tokens = 1}, kGigabit, kUnknown), UsageError);
}

// By hand: 4 ranks, 8 columns, lists of 2, 1, 0 and 3 rows, of which 1 is in no list of the third.
TEST(TableTrafficTest, OfASmallBatch) {
  const TableBatch batch{
      .rows = 16, .columns = 8, .lists = {{1, 5}, {1}, {}, {1, 2, 7}}, .tokens = {4, 1, 0, 3}};
  const auto sent = [&](const char* way, int rank) {
    const TableTraffic traffic = table_traffic(find_table_way(way), batch, kNoLatency);
    const TableTraffic::Port& port = traffic.ports[static_cast<std::size_t>(rank)];
    return std::vector<std::int64_t>(port.sent.begin(), port.sent.end());
  };
  using V = std::vector<std::int64_t>;
  EXPECT_EQ(sent("embrace", 0), (V{4 * 2 * 3, 2 * 4 * 4, 6 * 2 * 4, 0}));
  EXPECT_EQ(sent("alltoall", 3), (V{4 * 3 * 3, 2 * 3 * 4, 6 * 3 * 4, 0}));
  EXPECT_EQ(sent("allgather", 3), (V{4 * 3 * 3, 0, 3 * 32 * 3, 0}));
  EXPECT_EQ(sent("allgather-raw", 0), (V{0, 0, (8 + 4 * 40) * 3, 0}));
  EXPECT_EQ(sent("parallax", 0), (V{4 * 2 * 3, (1 + 3) * 32, 0, 0}));
  EXPECT_EQ(sent("parallax", 3), (V{4 * 3 * 3, 0, 3 * 32, 0}));
  EXPECT_EQ(sent("parallax-pushed", 0), (V{4 * 2 * 3, 0, 0, 4 * 32 * 3}));
  // Rows 1 and 5 are rank 1's, 2 is rank 2's, 7 rank 3's.
  EXPECT_EQ(sent("hashed", 1), (V{4 * 1 * 3, (2 + 1) * 32, 0, 0}));
  EXPECT_EQ(sent("dense", 2), (V{0, 0, 2 * 16 * 8 * 4 * 3 / 4, 0}));
  EXPECT_EQ(sent("push-pull", 2), sent("dense", 2));
  // The server's port is what all wait for: ids and rows out. What comes in is as much, less its own ids.
  const TableTraffic servers = table_traffic(find_table_way("parallax"), batch, kNoLatency);
  EXPECT_EQ(servers.busiest(), 4 * 2 * 3 + 4 * 32);
}

TEST(TableWays, ByTable) {
  const TableWays one("hashed");
  EXPECT_EQ(one.of("a").name, "hashed");
  EXPECT_TRUE(one.named().empty());
  const TableWays some("embrace/a=dense/b=embrace");
  EXPECT_EQ(some.of("a").name, "dense");
  EXPECT_EQ(some.of("b").name, "embrace");
  EXPECT_EQ(some.of("c").name, "embrace");
  EXPECT_EQ(some.all().size(), 2U);
  EXPECT_TRUE(some.any(TableWay::Kind::dense));
  EXPECT_FALSE(some.any(TableWay::Kind::scheme));
  EXPECT_EQ(TableWays("a=hashed").of("b").name, "scheme");
  const auto refused = [](const char* text) {
    return testing::message_of([text] { const TableWays ways(text); });
  };
  EXPECT_NE(refused("embrace/dense").find("no TABLE=WAY"), std::string::npos);
  EXPECT_NE(refused("embrace/a=dense/a=hashed").find("'a' has two ways"), std::string::npos);
  EXPECT_NE(refused("embrace/a=hashd").find("did you mean 'hashed'"), std::string::npos);
  EXPECT_NE(refused("").find("unknown way"), std::string::npos);
}

OutlineTable drawn_table(std::int64_t rows, std::int64_t own, std::int64_t shared) {
  OutlineTable out{.name = "t", .rows = rows, .width = 16};
  assume_lookups(out, own, shared);
  return out;
}

TEST(TableChoice, FiguresAreThoseOfTheIds) {
  constexpr int kRanks = 3;
  constexpr std::uint64_t kSeed = 5;
  const OutlineTable table = drawn_table(500, 120, 40);
  std::vector<std::set<std::int64_t>> now, next;
  const TableDraws draws(table);
  for (int r = 0; r < kRanks; ++r) {
    for (auto* lists : {&now, &next}) {
      const std::vector<std::int64_t> ids = draws.ids(kSeed, r, lists == &now ? 0 : 1);
      lists->emplace_back(ids.begin(), ids.end());
    }
  }
  double all = 0, prior = 0, shared = 0;
  for (const auto& list : now) {
    for (const std::int64_t row : list) {
      const auto has = [row](const auto& other) { return other.contains(row); };
      ++all;
      prior += std::ranges::any_of(next, has) ? 1 : 0;
      shared += std::ranges::all_of(now, has) ? 1.0 / kRanks : 0;
    }
  }
  const TableFigures figures = table_figures(table, kRanks, kSeed);
  EXPECT_EQ(figures.tokens, 160);
  EXPECT_NEAR(figures.unique_rows(), all / kRanks, 1e-9);
  EXPECT_NEAR(figures.shared_rows, shared, 1e-9);
  EXPECT_NEAR(figures.prior_share, prior / all, 1e-12);
  // Controls: other ids have other figures; who draws more of them has more rows, and repeats more.
  EXPECT_NE(table_figures(table, kRanks, kSeed + 1).unique_rows(), figures.unique_rows());
  const TableFigures more = table_figures(drawn_table(500, 480, 160), kRanks, kSeed);
  EXPECT_GT(more.unique_rows(), figures.unique_rows());
  EXPECT_LT(more.unique_ratio, figures.unique_ratio);
}

// A large table of which few rows are read, and a small one that is read whole.
Outline two_tables() {
  Outline out{.model = "made", .tokens_per_rank = 400};
  out.blocks = {{.name = "in"}, {.name = "out"}};
  for (const auto& [name, rows] : {std::pair{"large", 200000}, std::pair{"small", 64}}) {
    out.tensors.push_back({.name = name,
                           .length = rows * 16,
                           .rows = rows,
                           .columns = 16,
                           .block = static_cast<int>(out.tensors.size())});
    OutlineTable table = drawn_table(rows, 400, 0);
    table.name = name;
    out.tables.push_back(table);
    out.parameters += out.tensors.back().length;
  }
  return out;
}

TEST(TableChoice, EveryTableGetsItsOwn) {
  const auto chosen = [](const OptimizerOptions& optimizer, int ranks) {
    return choose_tables(two_tables(), {.way = "hashed", .scheduling = "both"}, optimizer, ranks, 1,
                         kGigabit);
  };
  const TablesChoice sgd = chosen(default_options("sgd"), 8);
  EXPECT_EQ(sgd.tables.way, "scheme/large=embrace/small=dense");
  EXPECT_EQ(sgd.tables.scheduling, "both");
  ASSERT_EQ(sgd.rows.size(), 2U);
  EXPECT_NE(sgd.why().find("large embrace, because a rank reads"), std::string::npos) << sgd.why();
  EXPECT_NE(sgd.why().find("small dense, because a rank reads"), std::string::npos) << sgd.why();
  check_tables(sgd.tables);
  // Under Adam a dense table is trained otherwise.
  for (const TablesChoice::Of& row : chosen(default_options("adam"), 8).rows) EXPECT_NE(row.way, "dense");
  OptimizerOptions momentum = default_options("sgd");
  momentum.momentum = 0.9;
  const TablesChoice none = chosen(momentum, 8);
  EXPECT_EQ(none.tables.way, "scheme");
  EXPECT_EQ(none.tables.scheduling, "");
  EXPECT_NE(none.why().find("momentum moves every row"), std::string::npos) << none.why();
  EXPECT_EQ(choose_tables(Outline{}, {}, default_options("sgd"), 8, 1, kGigabit).tables.way, "scheme");
}

}  // namespace
}  // namespace weft
