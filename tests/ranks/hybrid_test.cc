// Hybrid embeddings that are cut by columns, against one process (hybrid_toy.h).
#include "embedding/hybrid.h"

#include <atomic>
#include <numeric>
#include <thread>

#include "hybrid_toy.h"
#include "transports/faulty.h"
#include "weft/error.h"

namespace weft::toy {
namespace {

class HybridSizes : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, HybridSizes, ::testing::Values(1, 2, 3, 4, 8));  // 8: more than columns

TEST_P(HybridSizes, EqualOneProcessWithEveryOptimizer) {
  for (const char* name : {"sgd", "adagrad", "adam", "adamw"}) {
    const Outcome many = train(GetParam(), {.optimizer = name});
    EXPECT_LE(difference(OneProcess(name, kSteps), many), kTolerance) << name;
    EXPECT_EQ(many.counted, kSteps);
    EXPECT_TRUE(many.same_bits) << name;
  }
}

TEST_P(HybridSizes, SchedulingChangesNoBit) {
  const Outcome expected = train(GetParam(), {.schedule = kSchedules[0]});
  EXPECT_LE(difference(OneProcess("adam", kSteps), expected), kTolerance);
  for (const Schedule& schedule : kSchedules) {
    for (const std::int64_t settle_every : {0, 3}) {
      const Outcome many = train(GetParam(), {.schedule = schedule, .settle_every = settle_every});
      EXPECT_EQ(many.in, expected.in) << schedule.name;
      EXPECT_EQ(many.out, expected.out) << schedule.name;
      EXPECT_EQ(many.moments, expected.moments) << schedule.name;
      EXPECT_EQ(many.losses, expected.losses) << schedule.name;
    }
  }
}

// Delayed rows that are long on their way: whatever reads or updates their rows next waits for them. A lookup
// in advance does itself, one behind the prior rows does because they wait.
TEST(Hybrid, DelayedRowsAreAppliedBeforeTheyAreReadHoweverSlow) {
  constexpr std::int64_t kFew = 8;
  const auto slow = [](Transport& inner) {
    const FaultOptions faults{.delay = 1, .max_delay = 40ms, .delay_only = TrafficClass::delayed};
    return std::make_unique<FaultyTransport>(inner, faults);
  };
  const OneProcess one("adam", kFew);
  for (const Schedule& schedule : kSchedules) {
    if (!schedule.vertical || !schedule.lookahead) continue;
    const Outcome many = train(4, {.schedule = schedule, .steps = kFew, .decorate = slow});
    EXPECT_LE(difference(one, many), kTolerance) << schedule.name;
  }
  // Control: rows that were read too early would be seen in as few steps.
  const OneProcess wrong("adam", kFew, {.faults = {.delayed_too_late = true}, .size = 4});
  EXPECT_GT(difference(wrong, train(4, {.steps = kFew})), 1e-6);
}

TEST_P(HybridSizes, MicroBatchesAreCoalesced) {
  const Outcome many = train(GetParam(), {.micro_batches = 3});
  EXPECT_LE(difference(OneProcess("adam", kSteps), many), kTolerance);
}

TEST_P(HybridSizes, ClippingIsThatOfOneProcess) {
  const double clip = 0.15;
  const OneProcess one("adam", kSteps, {.clip = clip});
  for (const Schedule& schedule : kSchedules) {
    const Outcome many = train(GetParam(), {.schedule = schedule, .clip = clip});
    EXPECT_LE(difference(one, many), kTolerance) << schedule.name;
    ASSERT_EQ(many.norms.size(), one.norms.size());
    for (std::size_t s = 0; s < one.norms.size(); ++s) EXPECT_NEAR(many.norms[s], one.norms[s], kTolerance);
  }
  EXPECT_GT(one.norms[0], clip);  // it was clipped at all
  EXPECT_GT(difference(OneProcess("adam", kSteps), train(GetParam(), {.clip = clip})), 1e-3);  // control
}

// A job of one size is saved between steps and goes on with another: as if it had always had that size.
TEST(Hybrid, StateMovesToAnotherNumberOfRanks) {
  const std::int64_t half = 9;
  const auto registered = [](Toy& toy, const Comm& comm) {
    const Peers peers{comm.rank(), comm.size()};
    toy.strategies.state().add(
        "model", {.rows = [&toy, peers] { return toy.hybrid->value_rows("model", "value", peers); },
                  .missing = {},
                  .commit = {},
                  .roll_back = {}});
    toy.strategies.state().add("optimizer",
                               {.rows = [&toy, peers] { return toy.hybrid->optimizer_rows(peers); },
                                .missing = {},
                                .commit = {},
                                .roll_back = {}});
  };
  for (const TableCut cut : {TableCut::columns, TableCut::none}) {
    std::vector<StateSnapshot> saved(4);
    std::vector<double> w;
    run_ranks(4, [&](World& world) {
      Toy toy(world, {.steps = half, .cut = cut});
      registered(toy, world.comm());
      toy.run();
      saved[static_cast<std::size_t>(world.rank())] = toy.strategies.state().save(world.rank(), world.size());
      if (world.rank() == 0) w = toy.w;
    });
    const OneProcess one("adam", kSteps);
    for (const int size : {1, 2, 3, 4, 8}) {
      const auto go_on = [&](bool loads) {
        double worst = 0;
        std::mutex mutex;
        run_ranks(size, [&](World& world) {
          Toy toy(world, {.first = half, .cut = cut});
          registered(toy, world.comm());
          if (loads) toy.strategies.state().load(saved, world.rank(), world.size());
          toy.w = w;
          toy.run();
          std::vector<std::int64_t> ids(kRowsIn);
          std::iota(ids.begin(), ids.end(), 0);
          std::vector<double> rows(ids.size() * kColumns);
          toy.hybrid->table(0).look_up(ids, Dense(std::span(rows))).wait();
          const std::lock_guard lock(mutex);
          EXPECT_EQ(toy.hybrid->optimizer().step(0), loads ? kSteps : kSteps - half);
          for (const auto& [id, row] : one.in) {
            for (std::size_t c = 0; c < kColumns; ++c)
              worst = std::max(worst, std::abs(row[c] - rows[static_cast<std::size_t>(id) * kColumns + c]));
          }
        });
        return worst;
      };
      EXPECT_LE(go_on(true), kTolerance) << size;
      EXPECT_GT(go_on(false), 1e-3) << size;  // control
    }
  }
}

TEST(Hybrid, WhatCouldBeWrongIsSeen) {
  const auto broken = [](Faults faults) {
    return difference(OneProcess("adam", kSteps, {.faults = faults, .size = 4}), train(4, {}));
  };
  EXPECT_LE(broken({}), kTolerance);
  EXPECT_GT(broken({.counts_each_part = true}), 1e-6);
  EXPECT_GT(broken({.own_next_only = true}), 1e-6);
  EXPECT_GT(broken({.delayed_too_late = true}), 1e-6);
  EXPECT_GT(broken({.early_of_all = true}), 1e-6);
  EXPECT_GT(broken({.duplicates = true}), 1e-6);
  EXPECT_GT(broken({.divides_twice = true}), 1e-6);
  EXPECT_GT(OneProcess("adam", kSteps).num_zeros, 10);  // of either table, in half of the steps
  EXPECT_GT(broken({.drops_zeros = true}), 1e-6);
  EXPECT_GT(broken({.updates_padding = true}), 1e-6);
  EXPECT_GT(broken({.touches_all = true}), 1e-6);
}

TEST_P(HybridSizes, BytesAreThoseOfTheFormulas) {
  const int size = GetParam();
  for (const Schedule& schedule : kSchedules) {
    run_ranks(size, [&](World& world) {
      Toy toy(world, {.schedule = schedule});
      toy.run();
      for (int t = 0; t < 2; ++t) {
        const HybridTable& table = toy.hybrid->table(t);
        const auto width = static_cast<std::uint64_t>(table.columns(world.rank()).count);
        std::uint64_t ids = 0, rows = 0, gradients = 0;
        // With lookahead the ids and, where it is chained, the rows of a step behind the last one travel too.
        const std::int64_t announced = kSteps + (schedule.lookahead ? 1 : 0);
        const std::int64_t looked_up = kSteps + (schedule.lookahead && schedule.horizontal ? 1 : 0);
        for (std::int64_t step = 0; step < announced; ++step) {
          const auto lists = lists_of(t, step, size);
          std::uint64_t mine = lists[static_cast<std::size_t>(world.rank())].size(), all = 0;
          for (const auto& list : lists) all += list.size();
          ids += 4 * mine * static_cast<std::uint64_t>(size - 1);
          if (step < looked_up) rows += 8 * width * (all - mine);
          if (t == 0) mine -= lists[static_cast<std::size_t>(world.rank())].count(kPadding);
          if (step < kSteps) gradients += 8 * (kColumns - width) * mine;
        }
        EXPECT_EQ(table.sent_bytes(TableExchange::ids), ids);
        EXPECT_EQ(table.sent_bytes(TableExchange::rows) + table.sent_bytes(TableExchange::early), rows);
        EXPECT_EQ(table.sent_bytes(TableExchange::prior) + table.sent_bytes(TableExchange::delayed),
                  gradients);
        const bool splits = schedule.vertical && schedule.lookahead && size > 1 && width < kColumns;
        EXPECT_EQ(table.sent_bytes(TableExchange::delayed) > 0, splits) << schedule.name;
        EXPECT_EQ(table.sent_bytes(TableExchange::early) > 0, schedule.two_sided && size > 1 && width > 0);
      }
    });
  }
}

// Of the table and of the optimizer's moments, a rank has its columns and no more; all ranks together have one of
// each.
TEST_P(HybridSizes, MemoryIsDividedByTheRanks) {
  const int size = GetParam();
  const auto bytes_of = [&](TableCut cut, int t) {
    std::vector<std::size_t> out(static_cast<std::size_t>(size));
    run_ranks(size, [&](World& world) {
      Toy toy(world, {.cut = cut});
      toy.run();
      const HybridTable& table = toy.hybrid->table(t);
      std::size_t& held = out[static_cast<std::size_t>(world.rank())];
      held = toy.hybrid->table(t).values().bytes().size();
      std::vector<std::byte> scratch;
      for (const LiveRow& row : toy.hybrid->optimizer_rows({})) {
        if (row.row.rule == LayoutRule::moves && row.row.key.name == table.info().name)
          held += row.read(scratch).size();
      }
    });
    return out;
  };
  for (int t = 0; t < 2; ++t) {
    const std::size_t column = 3 * sizeof(double) * static_cast<std::size_t>(t == 0 ? kRowsIn : kRowsOut);
    const std::vector<std::size_t> held = bytes_of(TableCut::columns, t);
    const std::size_t most = (kColumns + static_cast<std::size_t>(size) - 1) / static_cast<std::size_t>(size);
    for (const std::size_t bytes : held) EXPECT_LE(bytes, most * column);
    EXPECT_EQ(std::accumulate(held.begin(), held.end(), std::size_t{0}), kColumns * column);
    for (const std::size_t bytes : bytes_of(TableCut::none, t))
      EXPECT_EQ(bytes, kColumns * column);  // control
  }
}

TEST_P(HybridSizes, ALookupIsPlainIndexing) {
  run_ranks(GetParam(), [&](World& world) {
    Toy toy(world, {});
    const std::vector<std::int64_t> ids{5, 0, 5, kPadding, kRowsIn - 1, world.rank()};
    const std::size_t asked = world.rank() == 1 ? 0 : ids.size();  // a rank may ask for nothing
    std::vector<double> rows(asked * kColumns);
    toy.hybrid->table(0).look_up(std::span(ids).first(asked), Dense(std::span(rows))).wait();
    for (std::size_t i = 0; i < asked; ++i) {
      for (std::int64_t c = 0; c < kColumns; ++c)
        EXPECT_EQ(rows[i * kColumns + static_cast<std::size_t>(c)], initial(1, ids[i], c));
    }
  });
}

TEST(Hybrid, ASplitThatGainsNothingIsSwitchedOff) {
  run_ranks(2, [&](World& world) {
    HybridOptions o;
    o.optimizer = optimizer("sgd");
    Strategies all(world.engine(), world.comm(), chain_shape("one", {{"in", {{"in", {50, 4}, true}}}}),
                   {.tokens = false, .lookahead = true});
    o.first_slot = all.next_slot(world.comm());
    const std::vector<TableInfo> tables{{"in", 50, 4}};
    HybridTable& table =
        all.add(std::make_unique<HybridEmbedding>(world.engine(), world.comm(), tables, o)).table(0);
    all.install();
    struct Plain final : WaitingDriver {
      Strategies* all = nullptr;
      HybridTable* table = nullptr;
      std::vector<std::int64_t> ids;
      std::vector<float> gradient;
      void announce() {
        const std::array<BatchInfo::Lookup, 1> lookups{{{"in", ids}}};
        all->batch_known({.tokens = 1, .lookups = lookups});
      }
      Task<void> compute(Piece piece) override {
        if (piece.work == Work::forward) announce();
        if (piece.work == Work::backward) {
          gradient.assign(static_cast<std::size_t>(table->rows().count), 1.0F);
          all->gradient_ready(0, std::span<const float>(gradient));
        }
        co_return;
      }
    } driver;
    driver.all = &all;
    driver.table = &table;
    driver.ids = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
    Walker walker(driver, all);
    driver.announce();
    for (int step = 0; step < 4; ++step) {
      walker.walk(all.next_table(1));  // the next batch is the same: all rows are prior
      if (step < 2) {
        EXPECT_TRUE(table.splits()) << step;  // some steps do not say it of all
      }
    }
    walker.walk(all.tables(1).settle);
    EXPECT_EQ(table.prior_share(), 1);
    EXPECT_FALSE(table.splits());
  });
}

// A program fails while its gradient is packed: when abandon() is back, nobody reads it any more.
TEST(Hybrid, WhatIsAbandonedReadsNoGradient) {
  constexpr std::int64_t kRows = 1 << 19, kWidth = 64;
  std::atomic<int> begun = 0;  // of the ranks: one that hears of the failure first does not come so far
  const auto fails = [&](World& world) {
    HybridOptions o;
    o.optimizer = optimizer("sgd");
    Strategies all(world.engine(), world.comm(),
                   chain_shape("one", {{"in", {{"in", {kRows, kWidth}, true}}}}),
                   {.tokens = false, .lookahead = true});
    o.first_slot = all.next_slot(world.comm());
    const std::vector<TableInfo> tables{{"in", kRows, kWidth}};
    const HybridEmbedding& hybrid =
        all.add(std::make_unique<HybridEmbedding>(world.engine(), world.comm(), tables, o));
    all.install();
    struct Failing final : WaitingDriver {
      Strategies* all = nullptr;
      std::vector<std::int64_t> ids;
      std::vector<float> gradient;
      void announce() {
        const std::array<BatchInfo::Lookup, 1> lookups{{{"in", ids}}};
        all->batch_known({.tokens = 1, .lookups = lookups});
      }
      Task<void> compute(Piece piece) override {
        if (piece.work == Work::forward) announce();
        if (piece.work == Work::backward) {
          all->gradient_ready(0, std::span<const float>(gradient));
          std::this_thread::sleep_for(60ms);  // its ids are known by then, and it is being packed
          throw Error("the program fails here");
        }
        co_return;
      }
    } driver;
    driver.all = &all;
    driver.ids.resize(kRows / 2);
    std::iota(driver.ids.begin(), driver.ids.end(), 0);
    driver.gradient.assign(driver.ids.size() * kWidth, 1.0F);
    Walker walker(driver, all);
    try {
      driver.announce();
      walker.walk(all.next_table(1));
    } catch (...) {
      abandon(all, std::current_exception());
      for (const Ticket& ticket : hybrid.work()) {
        begun += ticket.valid() ? 1 : 0;
        EXPECT_TRUE(!ticket.valid() || ticket.done()) << world.rank();
      }
      throw;
    }
  };
  EXPECT_THROW(run_ranks(2, fails), Error);
  EXPECT_GE(begun, 1);
}

// Ranks see the share of prior rows alike, to the bit, so they cease to split in the same step.
TEST(Hybrid, RanksSwitchTheSplitOffTogether) {
  const OneProcess one("adam", kSteps);
  std::set<bool> seen;
  for (const double below : {0.3, 0.5, 0.6, 0.7, 0.9}) {
    const Job job{.schedule = kSchedules[4], .split_below = below};
    EXPECT_LE(difference(one, train(4, job)), kTolerance) << below;
    std::mutex mutex;
    std::set<std::pair<bool, double>> of_ranks;
    run_ranks(4, [&](World& world) {
      Toy toy(world, job);
      toy.run();
      const std::lock_guard lock(mutex);
      of_ranks.insert({toy.hybrid->table(0).splits(), toy.hybrid->table(0).prior_share()});
    });
    EXPECT_EQ(of_ranks.size(), 1U) << below;
    seen.insert(of_ranks.begin()->first);
  }
  EXPECT_EQ(seen.size(), 2U);  // some did, some did not
}

TEST(Hybrid, RowsThatWereReadElsewhereDoNotTravel) {
  struct Ones final : WaitingDriver {
    Strategies* all = nullptr;
    std::vector<float> gradient;
    Task<void> compute(Piece piece) override {
      if (piece.work == Work::backward) all->gradient_ready(0, std::span<const float>(gradient));
      co_return;
    }
  };
  for (const bool reads : {false, true}) {
    run_ranks(2, [&](World& world) {
      HybridOptions o;
      o.optimizer = optimizer("sgd");
      o.lookahead = false;
      Strategies all(world.engine(), world.comm(), chain_shape("one", {{"in", {{"in", {50, 4}, true}}}}),
                     {.tokens = false});
      o.first_slot = all.next_slot(world.comm());
      const std::vector<TableInfo> tables{{"in", 50, 4}};
      HybridTable& table =
          all.add(std::make_unique<HybridEmbedding>(world.engine(), world.comm(), tables, o)).table(0);
      all.install();
      Ones driver;
      driver.all = &all;
      driver.gradient.assign(12, 1.0F);
      Walker walker(driver, all);
      const std::vector<std::int64_t> ids{1, 2, 3};
      const std::array<BatchInfo::Lookup, 1> lookups{{{"in", ids, reads}}};
      all.batch_known({.tokens = 0, .lookups = lookups});
      walker.walk(all.next_table(1));
      walker.walk(all.tables(1).settle);
      EXPECT_EQ(table.sent_bytes(TableExchange::rows), reads ? 3U * 2 * sizeof(float) : 0U);
      EXPECT_EQ(table.sent_bytes(TableExchange::prior), 3U * 2 * sizeof(float));
      const auto* const values = reinterpret_cast<const float*>(table.values().data);
      EXPECT_EQ(values[2 * 3], -static_cast<float>(lr_of(0)));  // the average of two gradients of 1
      EXPECT_EQ(values[2 * 4], 0.0F);
    });
  }
}

TEST(Hybrid, BadInputIsNamed) {
  const auto text_of = [](const auto& f) {
    std::mutex mutex;
    std::string text;
    try {
      run_ranks(2, [&](World& world) {
        try {
          f(world);
        } catch (const Error& e) {
          const std::lock_guard lock(mutex);
          if (dynamic_cast<const UsageError*>(&e) != nullptr || text.empty()) text = e.what();
          world.engine().abandon(std::current_exception());
          throw;
        }
      });
    } catch (const Error&) {
      return text;
    }
    return std::string("nothing was thrown");
  };
  const auto make = [](World& world, std::int64_t columns, const OptimizerOptions& o) {
    HybridOptions options;
    options.optimizer = o;
    const std::vector<TableInfo> tables{{"in", 50, columns}};
    return std::make_unique<HybridEmbedding>(world.engine(), world.comm(), tables, options);
  };
  EXPECT_EQ(text_of([&](World& world) {
              const auto hybrid = make(world, 4, optimizer("sgd"));
              const std::vector<std::int64_t> ids{4, world.rank() == 1 ? 50 : 49};
              const std::array<BatchInfo::Lookup, 1> lookups{{{"in", ids}}};
              hybrid->batch_known({.tokens = 2, .lookups = lookups});
              hybrid->ticket(0, {0, 0}).wait();
            }),
            "rank 1: the batch has id 50 of table 'in', which has rows 0 to 49");
  EXPECT_NE(text_of([&](World& world) {
              const auto hybrid = make(world, world.rank() == 0 ? 4 : 5, optimizer("sgd"));
              hybrid->ticket(0, {0, 0}).wait();
            }).find("another plan of tables"),
            std::string::npos);
  OptimizerOptions momentum = optimizer("sgd");
  momentum.momentum = 0.9;
  EXPECT_NE(
      text_of([&](World& world) { make(world, 4, momentum); }).find("sgd with momentum moves every row"),
      std::string::npos);
  EXPECT_NE(text_of([&](World& world) {
              const auto hybrid = make(world, 4, optimizer("sgd"));
              hybrid->step_begin();
              hybrid->table(0).start(TableExchange::ids, 0);
            }).find("was not announced"),
            std::string::npos);
}

TEST(Hybrid, AStepThatIsNotFiniteIsLeftOutOnAllRanks) {
  const Outcome many = train(3, {.bad = {1, 4}, .skips = true});
  EXPECT_LE(difference(OneProcess("adam", kSteps, {.size = 3, .bad = 4}),
                       [&] {
                         // The loss of the step that was left out is known all the same.
                         Outcome without = many;
                         without.losses.erase(without.losses.begin() + 4);
                         return without;
                       }()),
            kTolerance);
  EXPECT_EQ(many.counted, kSteps - 1);
  ASSERT_EQ(many.skipped.size(), 1U);
}

TEST(Hybrid, WithoutSkippingItEndsTheJobAndNamesTheRow) {
  std::mutex mutex;
  std::vector<std::string> texts;
  EXPECT_THROW(run_ranks(3,
                         [&](World& world) {
                           Toy toy(world, {.bad = {1, 4}});
                           try {
                             toy.run();
                           } catch (const Error& e) {
                             abandon(toy.strategies, std::current_exception());
                             const std::lock_guard lock(mutex);
                             texts.emplace_back(e.what());
                             throw;
                           }
                         }),
               Error);
  EXPECT_EQ(texts.size(), 3U);
  EXPECT_TRUE(std::ranges::any_of(texts, [](const std::string& t) {
    return t.find("of table 'in' is not finite") != std::string::npos;
  })) << texts[0];
}

}  // namespace
}  // namespace weft::toy
