// Every way to exchange a table that a HybridEmbedding has, against one process (hybrid_reference.h), and
// what each rank sends against formulas that are written out once more here.
#include "embedding/ways.h"
#include "hybrid_toy.h"

namespace weft::toy {
namespace {

constexpr int kNegatives = 3;

Job job_of(const TableWay& way, int size) {
  const HybridOptions o = hybrid_options(way, {.way = std::string(way.name)}, size);
  return {.schedule = {way.name.data(), true, o.horizontal, o.vertical, o.two_sided},
          .cut = o.cut,
          .owners = o.owners,
          .gather = o.gather,
          .negatives = kNegatives};
}

std::vector<TableWay> hybrid_ways() {
  std::vector<TableWay> out;
  for (const TableWay& way : table_ways()) {
    if (way.kind == TableWay::Kind::hybrid) out.push_back(way);
  }
  return out;
}

class TableWays : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, TableWays, ::testing::Values(1, 2, 3, 5, 8));

TEST_P(TableWays, EqualOneProcessWithEveryOptimizer) {
  for (const char* name : {"sgd", "adagrad", "adam", "adamw"}) {
    const OneProcess one(name, kSteps, {.negatives = kNegatives});
    for (const TableWay& way : hybrid_ways()) {
      Job job = job_of(way, GetParam());
      job.optimizer = name;
      const Outcome many = train(GetParam(), job);
      EXPECT_LE(difference(one, many), kTolerance) << way.name << " " << name;
      EXPECT_TRUE(many.same_bits) << way.name << " " << name;
      EXPECT_EQ(many.counted, kSteps);
    }
  }
}

TEST_P(TableWays, EverySchedulingEqualsOneProcess) {
  const OneProcess one("adam", kSteps, {.negatives = kNegatives});
  for (const TableWay& way : hybrid_ways()) {
    for (const Schedule& schedule : kSchedules) {
      Job job = job_of(way, GetParam());
      job.schedule = schedule;
      const Outcome many = train(GetParam(), job);
      EXPECT_LE(difference(one, many), kTolerance) << way.name << " " << schedule.name;
      EXPECT_TRUE(many.same_bits) << way.name << " " << schedule.name;
    }
  }
}

TEST_P(TableWays, ClippingIsThatOfOneProcess) {
  const OneProcess one("adam", kSteps, {.clip = 0.15, .negatives = kNegatives});
  EXPECT_GT(one.norms[0], 0.15);  // it was clipped at all
  for (const TableWay& way : hybrid_ways()) {
    Job job = job_of(way, GetParam());
    job.clip = 0.15;
    const Outcome many = train(GetParam(), job);
    EXPECT_LE(difference(one, many), kTolerance) << way.name;
    EXPECT_TRUE(many.same_bits) << way.name;
    ASSERT_EQ(many.norms.size(), one.norms.size());
    for (std::size_t s = 0; s < one.norms.size(); ++s) EXPECT_NEAR(many.norms[s], one.norms[s], kTolerance);
  }
}

TEST(TableWaysOnce, AStepThatIsNotFiniteIsLeftOutOnAllRanks) {
  const OneProcess one("adam", kSteps, {.size = 3, .bad = 4, .negatives = kNegatives});
  for (const TableWay& way : hybrid_ways()) {
    Job job = job_of(way, 3);
    job.bad = {1, 4};
    job.skips = true;
    Outcome many = train(3, job);
    ASSERT_EQ(many.losses.size(), static_cast<std::size_t>(kSteps)) << way.name;
    // The loss of the step that was left out is known all the same.
    many.losses.erase(many.losses.begin() + 4);
    EXPECT_LE(difference(one, many), kTolerance) << way.name;
    EXPECT_TRUE(many.same_bits) << way.name;
    EXPECT_EQ(many.counted, kSteps - 1) << way.name;
    EXPECT_EQ(many.skipped.size(), 1U) << way.name;
  }
}

TEST(TableWaysOnce, WhatCouldBeWrongIsSeen) {
  const int size = 4;
  std::vector<std::pair<const char*, Faults>> faults{{"duplicates", {.duplicates = true}},
                                                     {"divides_twice", {.divides_twice = true}},
                                                     {"drops_zeros", {.drops_zeros = true}},
                                                     {"updates_padding", {.updates_padding = true}},
                                                     {"touches_all", {.touches_all = true}}};
  for (const TableWay& way : hybrid_ways()) {
    const Outcome many = train(size, job_of(way, size));
    EXPECT_LE(difference(OneProcess("adam", kSteps, {.negatives = kNegatives}), many), kTolerance);
    for (const auto& [name, fault] : faults) {
      const OneProcess wrong("adam", kSteps, {.faults = fault, .size = size, .negatives = kNegatives});
      EXPECT_GT(difference(wrong, many), 1e-6) << way.name << " " << name;
    }
    EXPECT_GT(difference(OneProcess("adam", kSteps, {.negatives = kNegatives - 1}), many), 1e-6) << way.name;
    if (!TableLayout(way.cut, 1, 1, size, size).replicated())
      continue;  // a lookup asks one and the same rank
    Job spoilt = job_of(way, size);
    spoilt.spoils = true;
    EXPECT_FALSE(train(size, spoilt).same_bits) << way.name;
  }
}

// ---- bytes ----

struct Sent {
  std::uint64_t ids = 0, rows = 0, gradients = 0;  // of the operations ids; rows; prior and delayed
};

// What rank `me` of `size` sends for a table in a step, by the ways' names.
Sent formula(std::string_view way, int table, std::int64_t step, int me, int size) {
  const auto lists = lists_of(table, step, size, kNegatives);
  const auto at = [](int rank) { return static_cast<std::size_t>(rank); };
  const auto others = static_cast<std::uint64_t>(size - 1);
  std::set<std::int64_t> mine = lists[at(me)], read_by_all, shared = mine;
  std::uint64_t all = 0, tokens = 0;
  for (const auto& list : lists) {
    all += list.size();
    read_by_all.insert(list.begin(), list.end());
    std::erase_if(shared, [&](std::int64_t id) { return !list.contains(id); });
  }
  const std::uint64_t read = mine.size(), row = 8 * kColumns;
  if (table == 0) {
    for (std::set<std::int64_t>* ids : {&mine, &read_by_all, &shared}) ids->erase(kPadding);
  }
  const std::vector<Token> batch = batch_of(step);
  for (std::size_t i = 0; i < batch.size(); ++i)
    tokens += rank_of(step, i, size) == me && (table == 1 || batch[i].in != kPadding) ? 1 : 0;
  if (table == 1) tokens += kNegatives;
  const std::uint64_t width = kColumns / at(size) + (at(me) < kColumns % at(size) ? 1 : 0);

  Sent out{.ids = 4 * read * others};
  if (way == "alltoall" || way == "embrace") {
    out.rows = 8 * width * (all - read);
    out.gradients = 8 * (kColumns - width) * mine.size();
  } else if (way == "allgather") {
    const std::uint64_t reduced = size > 2 ? shared.size() * kColumns : 0;  // elements
    out.gradients = row * (mine.size() - (size > 2 ? shared.size() : 0)) * others;
    // A ring sends every block twice, less its own and the next.
    const auto block = [&](int r) { return reduced / at(size) + (at(r) < reduced % at(size) ? 1 : 0); };
    out.gradients += 8 * (2 * reduced - block(me) - block((me + 1) % size));
  } else if (way == "allgather-raw") {
    out.ids = 0;
    out.gradients = (8 + tokens * (8 + row)) * others;
  } else {
    const int servers = way == "hashed" ? size : (size + 3) / 4;
    const auto server = [&](std::int64_t id) { return static_cast<int>(id % servers) * size / servers; };
    const auto of = [&](const std::set<std::int64_t>& ids, int rank) {
      return static_cast<std::uint64_t>(
          std::ranges::count_if(ids, [&](std::int64_t id) { return server(id) == rank; }));
    };
    out.gradients = row * (mine.size() - of(mine, me));
    if (way == "parallax-pushed") {
      out.gradients += row * of(read_by_all, me) * others;
    } else {
      for (int r = 0; r < size; ++r) out.rows += r == me ? 0 : row * of(lists[at(r)], me);
    }
  }
  return out;
}

Sent measured(const HybridTable& table) {
  return {table.sent_bytes(TableExchange::ids),
          table.sent_bytes(TableExchange::rows) + table.sent_bytes(TableExchange::early),
          table.sent_bytes(TableExchange::prior) + table.sent_bytes(TableExchange::delayed) +
              table.sent_bytes(TableExchange::update)};
}

TEST_P(TableWays, BytesAreThoseOfTheFormulas) {
  const int size = GetParam();
  // A link without latency: the shared rows go around a ring.
  constexpr LinkCost kLink{.hop_seconds = 1e-15, .seconds_per_byte = 1e-9, .fold_seconds_per_byte = 0};
  std::mutex mutex;
  for (const TableWay& way : hybrid_ways()) {
    for (const double clip : {0.0, 0.15}) {
      run_ranks(size, [&](World& world) {
        world.plan_by(kLink);
        Job job = job_of(way, size);
        job.clip = clip;
        Toy toy(world, job);
        toy.run();
        for (int t = 0; t < 2; ++t) {
          // The ids, and where the chain goes on the rows, of a step behind the last one travel too.
          const std::int64_t looked_up = kSteps + (job.schedule.horizontal && clip == 0 ? 1 : 0);
          Sent expected;
          for (std::int64_t step = 0; step < kSteps + 1; ++step) {
            const Sent one = formula(way.name, t, step, world.rank(), size);
            expected.ids += one.ids;
            if (step < looked_up) expected.rows += one.rows;
            if (step < kSteps) expected.gradients += one.gradients;
          }
          const Sent sent = measured(toy.hybrid->table(t));
          const std::lock_guard lock(mutex);
          EXPECT_EQ(sent.ids, expected.ids) << way.name << " rank " << world.rank() << " clip " << clip;
          EXPECT_EQ(sent.rows, expected.rows) << way.name << " rank " << world.rank() << " clip " << clip;
          EXPECT_EQ(sent.gradients, expected.gradients)
              << way.name << " rank " << world.rank() << " clip " << clip;
        }
      });
    }
  }
}

// Control: no way has the bytes of another, but for the two that send the same in another order.
TEST(TableWaysOnce, FormulasTellTheWaysApart) {
  const int size = 5;
  const auto total = [&](std::string_view way) {
    Sent sum;
    for (std::int64_t step = 0; step < kSteps; ++step) {
      for (int r = 0; r < size; ++r) {
        const Sent one = formula(way, 1, step, r, size);
        sum.ids += one.ids;
        sum.rows += one.rows;
        sum.gradients += one.gradients;
      }
    }
    return std::tuple(sum.ids, sum.rows, sum.gradients);
  };
  for (const TableWay& a : hybrid_ways()) {
    for (const TableWay& b : hybrid_ways()) {
      const bool same = a.name == b.name || (a.cut == TableCut::columns && b.cut == TableCut::columns);
      EXPECT_EQ(total(a.name) == total(b.name), same) << a.name << " " << b.name;
    }
  }
}

// Shared negatives are what the all-reduce is for: with as many ranks as that it sends less than a gather.
TEST(TableWaysOnce, SharedRowsAreAllReduced) {
  const auto bytes = [](int size, TableGather gather) {
    std::uint64_t most = 0;
    std::mutex mutex;
    run_ranks(size, [&](World& world) {
      world.plan_by({.hop_seconds = 1e-15, .seconds_per_byte = 1e-9, .fold_seconds_per_byte = 0});
      Job job = job_of(find_table_way("allgather"), size);
      job.gather = gather;
      Toy toy(world, job);
      toy.run();
      const std::lock_guard lock(mutex);
      most = std::max(most, toy.hybrid->table(1).sent_bytes(TableExchange::prior));
    });
    return most;
  };
  EXPECT_EQ(bytes(2, TableGather::shared), bytes(2, TableGather::rows));
  EXPECT_LT(bytes(3, TableGather::shared), bytes(3, TableGather::rows));
  EXPECT_LT(4 * bytes(8, TableGather::shared), 3 * bytes(8, TableGather::rows));
}

}  // namespace
}  // namespace weft::toy
