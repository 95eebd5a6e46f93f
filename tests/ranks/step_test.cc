// Several strategies in one training step, on groups of their own: slots, one verdict, one norm, holding.
//
// The model has a vector that all ranks share ("shared") and one that each half of the ranks has for itself
// ("half": a shard of what one process would have twice). Gradients are whole numbers that are drawn from
// (rank, step), averages and updates are exact in float64, so everything is compared with ==.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>

#include "data_parallel/data_parallel.h"
#include "step_toys.h"
#include "weft/collective.h"
#include "weft/error.h"
#include "weft/random.h"
#include "weft/world.h"
#include "world/sim_ranks.h"

namespace weft {
namespace {

constexpr int kRanks = 4, kHalves = 2;
constexpr std::int64_t kShared = 300, kHalf = 70;
constexpr double kLr = 0.25;

ModelShape model() {
  return chain_shape("toy", {{"first", {{"shared", {kShared}}}}, {"second", {{"half", {kHalf}}}}});
}

// What a rank computes: multiples of the group's size, so that averages are whole. `bad`: (rank, step) whose
// "half" holds NaN.
std::vector<double> gradient(const char* name, int rank, std::int64_t step, std::pair<int, int> bad) {
  const bool shared = std::string(name) == "shared";
  std::vector<double> out(static_cast<std::size_t>(shared ? kShared : kHalf));
  Random random(shared ? 1 : 2, static_cast<std::uint32_t>(rank), static_cast<std::uint32_t>(step));
  for (double& v : out) v = kRanks * (static_cast<double>(random.below(41)) - 20);
  if (!shared && bad == std::pair(rank, static_cast<int>(step)))
    out[5] = std::numeric_limits<double>::quiet_NaN();
  return out;
}

using Values = std::map<std::string, std::vector<double>>;

class Toy final : public WaitingDriver {
 public:
  Toy(World& world, const StepOptions& options, std::pair<int, int> bad, bool find_unused = false)
      : rank_(world.rank()),
        bad_(bad),
        half_(world.subgroup(rank_ < 2 ? std::vector{0, 1} : std::vector{2, 3}, 1)),
        strategies(world.engine(), world.comm(), model(), options),
        walker_(*this, strategies) {
    const auto parallel = [&](const Comm& group, const char* name, std::int64_t count, int use) {
      DataParallelOptions o;
      o.scheme.name = "dense";
      o.dtype = DType::float64;
      o.divisor = kRanks;  // of both: a shard's sum is over its own ranks, its divisor that of all
      o.name = name;
      o.find_unused = find_unused;
      o.first_slot = strategies.next_slot(group);
      const std::vector<ParameterInfo> parameters{{name, count, use}};
      return &strategies.add(
          std::make_unique<DataParallel>(world.engine(), group, parameters, o, &strategies.state()));
    };
    shared = parallel(world.comm(), "shared", kShared, 0);
    half = parallel(half_, "half", kHalf, 1);
    courier = &strategies.add(std::make_unique<Courier>(world.engine(), half_, strategies.next_slot(half_)));
    strategies.install();
    values = {{"shared", std::vector<double>(kShared, 1)}, {"half", std::vector<double>(kHalf, rank_ / 2)}};
  }

  void run(std::int64_t steps) {
    for (std::int64_t step = 0; step < steps; ++step) {
      step_ = step;
      strategies.number_step(step);
      strategies.batch_known({.tokens = rank_ + 1});
      walker_.walk(strategies.next_table(1));
      if (const auto& loss = strategies.last_loss()) losses.push_back(*loss);
      note_result();
    }
    walker_.walk(strategies.tables(1).settle);
    if (const auto& loss = strategies.last_loss()) losses.push_back(*loss);
    note_result();
  }

  Task<void> compute(Piece piece) override {
    const char* const name = piece.block == 0 ? "shared" : "half";
    std::vector<double>& value = values[name];
    if (piece.work == Work::forward && piece.block == 1) {
      strategies.loss_known(10.0 * static_cast<double>(step_) + rank_);
      if (strategies.options().lookahead) strategies.batch_known({.tokens = rank_ + 1});
    }
    if (piece.work == Work::backward) {
      if (strategies.options().tokens) {
        EXPECT_EQ(strategies.tokens(), 10);  // 1 + 2 + 3 + 4
      }
      gradients_[name] = gradient(name, rank_, step_, bad_);
      strategies.gradient_ready(piece.block, std::span<const double>(gradients_[name]));
      if (piece.block == 0) {
        EXPECT_EQ(letters_[0], rank_ < 2 ? 1 : 5);  // 0 + 1, 2 + 3
      }
      letters_[0] = rank_;
    }
    if (piece.work == Work::update && (!strategies.result() || strategies.result()->committed)) {
      std::vector<double> averaged(value.size());
      strategies.result_of(piece.block, std::span(averaged));
      for (std::size_t i = 0; i < value.size(); ++i)
        value[i] -= kLr * strategies.update_scale() * averaged[i];
    }
    co_return;
  }
  Dense tensor(const TensorName&) override { return Dense(std::span<double>(letters_)); }

 private:
  void note_result() {
    if (!strategies.result()) return;
    norms.push_back(strategies.gradient_norm());
    if (strategies.result()->committed) return;
    skipped.push_back(strategies.result()->text);
    for (const StepResult::Bad& bad : strategies.result()->bad) blamed.emplace_back(bad.parameter, bad.rank);
  }

  int rank_;
  std::pair<int, int> bad_;
  Comm half_;
  std::int64_t step_ = 0;
  Values gradients_;
  std::array<double, 1> letters_{};

 public:
  Strategies strategies;
  DataParallel* shared = nullptr;
  DataParallel* half = nullptr;
  Courier* courier = nullptr;
  Values values;
  std::vector<double> norms, losses;
  std::vector<std::string> skipped;
  std::vector<std::pair<int, int>> blamed;  // parameter and rank

 private:
  Walker walker_;
};

struct Outcome {
  Values values;
  std::vector<double> norms, losses;
  std::vector<std::string> skipped;
  std::vector<std::pair<int, int>> blamed;
  int commits = 0, roll_backs = 0;
};

std::vector<Outcome> train(const StepOptions& options, std::int64_t steps,
                           std::pair<int, int> bad = {-1, -1}) {
  std::vector<Outcome> out(kRanks);
  run_ranks(kRanks, [&](World& world) {
    Toy toy(world, options, bad);
    try {
      toy.run(steps);
    } catch (...) {
      abandon(toy.strategies, std::current_exception());
      throw;
    }
    out[static_cast<std::size_t>(world.rank())] = {toy.values,
                                                   toy.norms,
                                                   toy.losses,
                                                   toy.skipped,
                                                   toy.blamed,
                                                   toy.courier->commits,
                                                   toy.courier->roll_backs};
  });
  return out;
}

// How a list of strategies could be wrong.
struct Rules {
  bool verdict_per_group = false;
  bool counts_shards_twice = false;
};

// One process that has both halves: a plain loop.
struct Reference {
  std::vector<double> shared = std::vector<double>(kShared, 1);
  std::array<std::vector<double>, kHalves> half{std::vector<double>(kHalf, 0), std::vector<double>(kHalf, 1)};
  std::vector<double> norms;

  Reference(double clip, std::int64_t steps, std::pair<int, int> bad = {-1, -1}, Rules rules = {}) {
    for (std::int64_t step = 0; step < steps; ++step) {
      const auto averaged = [&](const char* name, int first, int last) {
        std::vector<double> sum = gradient(name, first, step, bad);
        for (int r = first + 1; r < last; ++r) {
          const std::vector<double> more = gradient(name, r, step, bad);
          for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += more[i];
        }
        for (double& v : sum) v /= kRanks;
        return sum;
      };
      const auto squares = [](const std::vector<double>& v) {
        double sum = 0;
        for (const double x : v) sum += x * x;
        return sum;
      };
      const std::vector<double> all = averaged("shared", 0, 4);
      const std::array<std::vector<double>, kHalves> mine{averaged("half", 0, 2), averaged("half", 2, 4)};
      const bool is_bad = bad.second == step;
      const double times = rules.counts_shards_twice ? 2 : 1;
      const double norm = std::sqrt(squares(all) + times * (squares(mine[0]) + squares(mine[1])));
      if (!is_bad) norms.push_back(norm);
      const double scale = clip > 0 ? std::min(1.0, clip / (norm + 1e-6)) : 1;
      if (!is_bad || rules.verdict_per_group)
        for (std::size_t i = 0; i < shared.size(); ++i) shared[i] -= kLr * scale * all[i];
      for (std::size_t h = 0; h < kHalves; ++h) {
        if (is_bad && (!rules.verdict_per_group || static_cast<int>(h) == bad.first / 2)) continue;
        for (std::size_t i = 0; i < half[h].size(); ++i) half[h][i] -= kLr * scale * mine[h][i];
      }
    }
  }
  bool operator==(const std::vector<Outcome>& ranks) const {
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      if (ranks[r].values.at("shared") != shared || ranks[r].values.at("half") != half[r / 2]) return false;
    }
    return true;
  }
};

constexpr std::int64_t kSteps = 12;

TEST(TwoStrategies, EqualOneProcess) {
  for (const bool lookahead : {false, true}) {
    const std::vector<Outcome> ranks = train({.lookahead = lookahead}, kSteps);
    EXPECT_TRUE(Reference(0, kSteps) == ranks);
    EXPECT_FALSE(Reference(0, kSteps - 1) == ranks);  // control
    for (const Outcome& rank : ranks) {
      EXPECT_EQ(rank.commits, kSteps);
      ASSERT_EQ(rank.losses.size(), static_cast<std::size_t>(kSteps));
      for (std::size_t s = 0; s < rank.losses.size(); ++s)
        EXPECT_EQ(rank.losses[s], (40.0 * static_cast<double>(s) + 6) / 10);
    }
  }
}

// The list of exchanges has one less then: every strategy's are found all the same.
TEST(TwoStrategies, EqualOneProcessWithoutTokens) {
  const std::vector<Outcome> ranks = train({.tokens = false}, kSteps);
  EXPECT_TRUE(Reference(0, kSteps) == ranks);
  for (const Outcome& rank : ranks) EXPECT_TRUE(rank.losses.empty());
  run_ranks(kRanks, [](World& world) {
    Toy toy(world, {.tokens = false}, {-1, -1});
    const std::vector<Exchange>& all = toy.strategies.tables(1).exchanges;
    const auto plan = std::ranges::find(all, "plan of buckets", &Exchange::name);
    EXPECT_TRUE(toy.strategies.ticket(wait_of(static_cast<int>(plan - all.begin()), 0)).valid());
    toy.run(1);
  });
}

TEST(TwoStrategies, SlotsNeverMeet) {
  run_ranks(kRanks, [](World& world) {
    Toy toy(world, {.first_slot = 5}, {-1, -1}, true);  // with the question who used what
    std::map<std::pair<std::uint64_t, std::uint32_t>, std::string> taken;
    for (const Exchange& e : toy.strategies.tables(1).exchanges) {
      EXPECT_GE(e.slot, 5U);
      const auto [at, is_new] = taken.emplace(std::pair(e.group, e.slot), e.name);
      EXPECT_TRUE(is_new) << e.name << " and " << at->second;
    }
    EXPECT_NE(toy.shared->group().group_id(), toy.half->group().group_id());
    EXPECT_GT(toy.strategies.next_slot(toy.half->group()), toy.half->num_slots());
    toy.run(1);
  });
}

TEST(TwoStrategies, TheNormCountsEveryShardOnce) {
  const double clip = 30;
  const std::vector<Outcome> ranks = train({.clip_norm = clip}, kSteps);
  const Reference expected(clip, kSteps);
  EXPECT_TRUE(expected == ranks);
  for (const Outcome& rank : ranks) EXPECT_EQ(rank.norms, expected.norms);
  const Reference twice(clip, kSteps, {-1, -1}, {.counts_shards_twice = true});  // control
  EXPECT_FALSE(twice == ranks);
  EXPECT_NE(twice.norms, ranks[0].norms);
  EXPECT_GT(expected.norms[0], clip);  // it was clipped at all
}

TEST(TwoStrategies, ANaNInOneRollsBackBothOnAllRanks) {
  const std::array<std::pair<int, int>, 3> cases{{{3, 4}, {0, 0}, {2, static_cast<int>(kSteps) - 1}}};
  for (const std::pair<int, int>& bad : cases) {
    const std::vector<Outcome> ranks = train({.skip_not_finite = true}, kSteps, bad);
    EXPECT_TRUE(Reference(0, kSteps, bad) == ranks);
    EXPECT_FALSE(Reference(0, kSteps, bad, {.verdict_per_group = true}) == ranks);  // control
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      ASSERT_EQ(ranks[r].skipped.size(), 1U);
      EXPECT_EQ(ranks[r].roll_backs, 1);
      EXPECT_EQ(ranks[r].commits, kSteps - 1);
      const bool in_group = static_cast<int>(r) / 2 == bad.first / 2;
      const int first = bad.first / 2 * 2;  // of the group
      const std::string expected =
          in_group ? "the gradient of 'half' on rank " + std::to_string(bad.first) + " holds NaN"
                   : "gradients of a group with rank " + std::to_string(first) + ", " +
                         std::to_string(first + 1) + " are not finite";
      EXPECT_TRUE(ranks[r].skipped[0].ends_with(expected)) << ranks[r].skipped[0];
      ASSERT_EQ(ranks[r].blamed.size(), in_group ? 1U : 0U);
      if (in_group) {
        EXPECT_EQ(ranks[r].blamed[0], std::pair(1, bad.first));  // 'half' is the model's second
      }
    }
  }
}

TEST(TwoStrategies, WithoutSkippingABadVerdictEndsTheJobOnAllRanks) {
  std::mutex mutex;
  int ended = 0;
  EXPECT_THROW(run_ranks(kRanks,
                         [&](World& world) {
                           Toy toy(world, {}, {1, 3});
                           try {
                             toy.run(kSteps);
                           } catch (const Error&) {
                             abandon(toy.strategies, std::current_exception());
                             const std::lock_guard lock(mutex);
                             ++ended;
                             throw;
                           }
                         }),
               Error);
  EXPECT_EQ(ended, kRanks);
}

TEST(OneStep, ALossThatIsNotFiniteNamesStepAndRank) {
  std::mutex mutex;
  std::vector<std::string> texts;
  EXPECT_THROW(run_ranks(2,
                         [&](World& world) {
                           Strategies all(world.engine(), world.comm(),
                                          chain_shape("one", {{"b", {{"p", {4}}}}}), {});
                           DataParallelOptions o;
                           o.scheme.name = "dense";
                           o.first_slot = all.next_slot(world.comm());
                           all.add(std::make_unique<DataParallel>(world.engine(), world.comm(),
                                                                  std::vector<ParameterInfo>{{"p", 4, 0}}, o,
                                                                  &all.state()));
                           all.install();
                           struct Plain final : WaitingDriver {
                             Strategies* all = nullptr;
                             int rank = 0;
                             std::vector<float> zeros = std::vector<float>(4);
                             Task<void> compute(Piece piece) override {
                               if (piece.work == Work::forward) all->loss_known(rank == 1 ? std::nan("") : 1);
                               if (piece.work == Work::backward)
                                 all->gradient_ready(0, std::span<const float>(zeros));
                               co_return;
                             }
                           } driver;
                           driver.all = &all;
                           driver.rank = world.rank();
                           Walker walker(driver, all);
                           try {
                             for (std::int64_t step = 40; step < 42; ++step) {
                               all.number_step(step);
                               all.batch_known({.tokens = 1});
                               walker.walk(all.next_table(1));
                             }
                           } catch (const Error& e) {
                             const std::lock_guard lock(mutex);
                             texts.emplace_back(e.what());
                             abandon(all, std::current_exception());
                             throw;
                           }
                         }),
               Error);
  ASSERT_EQ(texts.size(), 2U);
  for (const std::string& text : texts)
    EXPECT_EQ(text, "step 40: the loss is NaN on rank 1; a smaller learning rate or --clip-norm may help");
}

TEST(OneStep, WhatIsNotAnnouncedOrOwnedIsRefused) {
  run_ranks(1, [](World& world) {
    Strategies all(world.engine(), world.comm(), model(), {});
    EXPECT_THROW(all.tables(1), UsageError);
    EXPECT_THROW(all.install(), UsageError);  // nobody takes 'shared'
  });
  EXPECT_THROW(train({.clip_norm = -1}, 1), UsageError);
}

// A rank of two with an exchange of its own beside its gradients.
struct WithCourier {
  WithCourier(Engine& engine, Courier::Awaits awaits, std::uint32_t skipped_slots = 0)
      : all(engine, engine.world(), chain_shape("two", {{"a", {{"p", {4}}}}, {"b", {{"q", {4}}}}}), {}) {
    DataParallelOptions o;
    o.scheme.name = "dense";
    o.first_slot = all.next_slot(engine.world());
    const std::vector<ParameterInfo> parameters{{"p", 4, 0}, {"q", 4, 1}};
    all.add(std::make_unique<DataParallel>(engine, engine.world(), parameters, o, &all.state()));
    all.add(std::make_unique<Courier>(engine, engine.world(), all.next_slot(engine.world()) + skipped_slots,
                                      awaits));
  }
  Strategies all;
};

// Two ranks that install what they are told to, and train nothing.
class InstalledPair {
 public:
  InstalledPair() : ranks_(options()) {}
  ~InstalledPair() {
    for (int r = 0; r < 2; ++r)
      ranks_.engine(r).shut_down(std::make_exception_ptr(Error("nothing is trained")));
  }
  WithCourier& add(Courier::Awaits awaits, std::uint32_t skipped_slots = 0) {
    Engine& engine = ranks_.engine(static_cast<int>(installed_.size()));
    return *installed_.emplace_back(std::make_unique<WithCourier>(engine, awaits, skipped_slots));
  }

 private:
  static SimRanksOptions options() {
    SimRanksOptions out;
    out.sim.link.ranks = 2;
    return out;
  }
  SimRanks ranks_;
  std::vector<std::unique_ptr<WithCourier>> installed_;
};

TEST(OneStep, ATableThatDoesNotHoldIsRefused) {
  InstalledPair pair;
  pair.add(Courier::Awaits::before_backward).all.install();
  WithCourier& broken = pair.add(Courier::Awaits::never);
  try {
    broken.all.install();
    ADD_FAILURE() << "it was installed";
  } catch (const UsageError& e) {
    EXPECT_NE(std::string(e.what()).find("nobody waits for 'letters'"), std::string::npos) << e.what();
  }
  EXPECT_THROW(broken.all.tables(2), UsageError);
}

TEST(OneStep, TablesOfAllRanksAreVerifiedTogether) {
  const auto together = [](Courier::Awaits awaits, std::uint32_t skipped_slots) {
    InstalledPair pair;
    std::vector<Strategies*> ranks{&pair.add(Courier::Awaits::before_backward).all,
                                   &pair.add(awaits, skipped_slots).all};
    for (Strategies* rank : ranks) rank->install();
    return verify_together(ranks, 1);
  };
  EXPECT_EQ(together(Courier::Awaits::before_backward, 0), 1);
  EXPECT_EQ(together(Courier::Awaits::at_the_end, 0), 2);
  try {
    together(Courier::Awaits::before_backward, 1);
    ADD_FAILURE() << "they hold together";
  } catch (const UsageError& e) {
    EXPECT_NE(std::string(e.what()).find("rank 0, table 'first': 'letters' is no collective of rank 1"),
              std::string::npos)
        << e.what();
  }
}

// Tables are of the plan that was installed.
TEST(OneStep, AStrategyThatSharesAStepIsNotPlannedAnew) {
  run_ranks(kRanks, [](World& world) {
    Toy toy(world, {}, {-1, -1});
    const std::size_t before = toy.strategies.tables(1).exchanges.size();
    try {
      toy.shared->replan({.bucket_bytes = 8, .dense_below = 0});
      ADD_FAILURE() << "planned anew";
    } catch (const UsageError& e) {
      EXPECT_NE(std::string(e.what()).find("shares its step"), std::string::npos) << e.what();
    }
    EXPECT_EQ(toy.strategies.tables(1).exchanges.size(), before);
    toy.run(2);
    // Control: alone it may be.
    DataParallelOptions options;
    options.scheme.name = "dense";
    options.first_slot = 500;
    DataParallel alone(world.engine(), world.comm(), {{"a", 4, 0}, {"b", 4, 1}}, options);
    const int buckets = alone.plan().num_buckets();
    alone.replan({.bucket_bytes = 8, .dense_below = 0});
    EXPECT_GT(alone.plan().num_buckets(), buckets);
    for (const Ticket& ticket : alone.tickets()) ticket.wait();
  });
}

TEST(OneStep, RanksThatPlanAnotherStepAreNamed) {
  std::mutex mutex;
  std::vector<std::string> texts;
  EXPECT_THROW(run_ranks(kRanks,
                         [&](World& world) {
                           Toy toy(world, {.skip_not_finite = world.rank() == 2}, {-1, -1});
                           try {
                             toy.run(2);
                           } catch (const Error& e) {
                             abandon(toy.strategies, std::current_exception());
                             const std::lock_guard lock(mutex);
                             texts.emplace_back(e.what());
                             throw;
                           }
                         }),
               Error);
  ASSERT_FALSE(texts.empty());
  EXPECT_NE(texts[0].find("another plan of the step"), std::string::npos) << texts[0];
}

}  // namespace
}  // namespace weft
