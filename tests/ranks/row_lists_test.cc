// What all ranks know of a batch's ids, and how evenly looking its rows up loads them.
#include "embedding/row_lists.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "base/identity.h"
#include "embedding/row_fetch.h"
#include "kernels/rows.h"
#include "weft/world.h"
#include "workload/table_draws.h"

namespace weft {
namespace {

using Ids = std::vector<std::int32_t>;
constexpr std::int64_t kRows = 800;

// Zipf-distributed, of one rank in one step.
Ids drawn(int rank, std::int64_t step) {
  OutlineTable table{.name = "t", .rows = kRows, .width = 1};
  assume_lookups(table, 200, 0);
  return unique_ids(TableDraws(table).ids(5, rank, step));
}

std::uint64_t hash_of(const RowLists& lists) {
  std::uint64_t hash = 1;
  const auto add = [&](const Ids& ids) {
    hash = mix(hash ^ ids.size());
    for (const std::int32_t id : ids) hash = mix(hash ^ static_cast<std::uint64_t>(id));
  };
  for (const Ids& ids : lists.of_rank) add(ids);
  add(lists.all);
  return hash;
}

class RowListsOf : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, RowListsOf, ::testing::Values(1, 2, 3, 5, 8));

// With them all ranks make the same parts: what is sent and what is expected need no word between them.
TEST_P(RowListsOf, AreTheSameOnAllRanks) {
  const int size = GetParam();
  const auto at = [](int rank) { return static_cast<std::size_t>(rank); };
  // `changes`: a rank has an id more than it tells the others.
  const auto hashes = [&](bool changes) {
    std::vector<std::uint64_t> out(at(size));
    run_ranks(size, [&](World& world) {
      const int me = world.rank();
      std::uint64_t hash = 0;
      RowLists before;
      for (std::int64_t step = 0; step < 4; ++step) {
        RowLists lists;
        lists.of_rank.resize(at(size));
        if (me != step % size || size == 1) lists.of_rank[at(me)] = drawn(me, step);  // or none at all
        world.run({.name = "ids"}, [&](Comm comm) { return gather_ids(comm, &lists, kRows); });
        if (changes && me == 0 && step == 2) lists.of_rank[0].push_back(kRows);
        hash = mix(hash ^ hash_of(lists));
        RowLists prior = before, delayed = before;
        for (std::size_t r = 0; r < before.of_rank.size(); ++r) {
          const SplitIds parts = split_ids(before.of_rank[r], lists.all);
          prior.of_rank[r] = ids_at(before.of_rank[r], parts.in);
          delayed.of_rank[r] = ids_at(before.of_rank[r], parts.out);
        }
        hash = mix(hash ^ hash_of(prior)) ^ hash_of(delayed);
        before = lists;
        if (changes || size == 1) continue;
        for (int r = 0; r < size; ++r)
          EXPECT_EQ(lists.of_rank[at(r)], r == step % size ? Ids() : drawn(r, step));
      }
      out[at(me)] = hash;
    });
    return out;
  };
  const std::vector<std::uint64_t> same = hashes(false);
  EXPECT_EQ(std::ranges::count(same, same[0]), size);
  EXPECT_NE(hashes(true)[0], same[0]);  // control
}

// Values that everybody gets are packed once: the same arrives, by as many bytes, as from a copy for each.
TEST_P(RowListsOf, OneCopyServesAllRanks) {
  const int size = GetParam();
  const auto at = [](int rank) { return static_cast<std::size_t>(rank); };
  const auto value = [](int rank, int i) { return static_cast<float>(100 * rank + i); };
  const auto count = [](int rank) { return std::int64_t{3} * rank; };  // rank 0 has none
  const auto fill = [&](Flow<float>& flow, int me, int copies) {
    flow.resize(size);
    flow.same = copies == 1;
    flow.send.clear();
    for (int c = 0; c < copies; ++c)
      for (int i = 0; i < count(me); ++i) flow.send.push_back(value(me, i));
    for (int r = 0; r < size; ++r) {
      flow.send_counts[at(r)] = count(me);
      flow.recv_counts[at(r)] = count(r);
    }
    flow.make_room();
  };
  run_ranks(size, [&](World& world) {
    const int me = world.rank();
    std::vector<float> arrived[2];
    std::uint64_t sent[2] = {};
    for (const int which : {0, 1}) {
      Flow<float> flow;
      fill(flow, me, which == 0 && size > 1 ? size : 1);
      EXPECT_EQ(flow.send.size(), at(static_cast<int>(count(me))) * (which == 0 ? at(size) : 1u));
      const auto run = [](Comm comm, Flow<float>* f, std::uint64_t* bytes) -> Task<void> {
        co_await exchange(comm, f);
        *bytes = comm.bytes_sent();
      };
      world.run({.name = "rows"}, [&](Comm comm) { return run(comm, &flow, &sent[which]); });
      arrived[which] = flow.recv;
    }
    std::vector<float> expected;
    for (int r = 0; r < size; ++r)
      for (int i = 0; i < count(r); ++i) expected.push_back(value(r, i));
    EXPECT_EQ(arrived[1], expected);
    EXPECT_EQ(arrived[0], expected);
    EXPECT_EQ(sent[1], sent[0]);
    EXPECT_EQ(sent[1], at(static_cast<int>(count(me))) * 4 * at(size - 1));
  });
}

// ---- balance ----

struct Fetch {
  const RowLists* lists;
  RowFetch<double>::From from;
  RowFetch<double>::Into into;
  std::uint64_t* sent;
  RowFetch<double> fetch{};
};
Task<void> run(Comm comm, Fetch* f) {
  co_await f->fetch.run(comm, f->lists, f->from, f->into);
  *f->sent = comm.bytes_sent();
}

// Bytes of values that each rank sends so that all have the rows of their lists.
std::vector<std::uint64_t> fetched(const TableLayout& layout, std::int64_t columns,
                                   const std::vector<Ids>& lists) {
  const int size = static_cast<int>(lists.size());
  std::vector<std::uint64_t> sent(lists.size());
  run_ranks(size, [&](World& world) {
    RowLists all{.of_rank = lists, .all = {}};
    all.unite();
    const auto me = static_cast<std::size_t>(world.rank());
    const BlockRange mine = layout.columns(world.rank());
    std::vector<double> values(static_cast<std::size_t>(layout.num_rows(world.rank()) * mine.count));
    for (std::int32_t row = 0; row < kRows; ++row) {
      for (std::int64_t c = 0; c < mine.count && layout.holds(row, world.rank()); ++c)
        values[static_cast<std::size_t>(layout.place(row) * mine.count + c)] =
            static_cast<double>(row * columns + mine.first + c);
    }
    std::vector<double> rows;
    Fetch fetch{.lists = &all,
                .from = {&layout, columns, values},
                .into = {all.of_rank[me], &rows},
                .sent = &sent[me]};
    world.run({.name = "rows"}, [&](Comm comm) { return run(comm, &fetch); });
    const auto width = static_cast<std::size_t>(columns);
    ASSERT_EQ(rows.size(), lists[me].size() * width);
    for (std::size_t i = 0; i < rows.size(); ++i)
      EXPECT_EQ(rows[i], static_cast<double>(lists[me][i / width]) * static_cast<double>(columns) +
                             static_cast<double>(i % width));
  });
  return sent;
}

double imbalance(const std::vector<std::uint64_t>& bytes) {
  const auto [least, most] = std::ranges::minmax(bytes);
  return static_cast<double>(most) / static_cast<double>(least);
}

// Ids are Zipf-distributed. By columns, every rank serves all of them: only how many distinct rows a rank reads
// itself makes a difference, and none where these are as many on all ranks.
TEST(RowBalance, ColumnsServeAllIdsAlike) {
  constexpr int kSize = 4;
  constexpr std::int64_t kColumns = 12;  // as many on all ranks
  std::vector<Ids> lists;
  std::uint64_t total = 0;
  std::size_t fewest = kRows;
  for (int r = 0; r < kSize; ++r) {
    lists.push_back(drawn(r, 0));
    total += lists.back().size();
    fewest = std::min(fewest, lists.back().size());
  }
  const TableLayout columns(TableCut::columns, kRows, kColumns, kSize, kSize);
  const std::vector<std::uint64_t> sent = fetched(columns, kColumns, lists);
  for (std::size_t r = 0; r < kSize; ++r) EXPECT_EQ(sent[r], 8 * 3 * (total - lists[r].size()));
  // The same with equal lists: the most frequent ones of each.
  for (Ids& list : lists) list.resize(fewest);
  EXPECT_EQ(imbalance(fetched(columns, kColumns, lists)), 1);
  // Control: rows in contiguous ranges, row r with rank r / 200. They are dealt modulo the ranks, so a row is
  // renamed to what lies with that rank.
  std::vector<Ids> renamed = lists;
  for (Ids& list : renamed) {
    for (std::int32_t& id : list) id = id % (kRows / kSize) * kSize + id / (kRows / kSize);
    std::ranges::sort(list);
  }
  const TableLayout rows(TableCut::rows, kRows, kColumns, kSize, kSize);
  EXPECT_GT(imbalance(fetched(rows, kColumns, renamed)), 2);
}

}  // namespace
}  // namespace weft
