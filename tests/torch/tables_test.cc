// Tables that are held by columns or rows in data-parallel training with LibTorch, against single-process
// training on the whole batch (tables_toy.h).
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <map>
#include <mutex>

#include "patterns/blocks.h"
#include "state/registry.h"
#include "torch/tables_toy.h"
#include "weft/error.h"
#include "weft/world.h"
#include "weft_torch/train/replica.h"
#include "workload/job_strategies.h"

namespace weft {
namespace {

using namespace torch_test;

TEST(Tables, EveryOptimizerEqualsOneProcess) {
  for (const char* optimizer : {"sgd", "adagrad", "adam", "adamw"}) {
    const Training t{.optimizer = optimizer};
    const Trained reference = Alone(t).train();
    for (const int ranks : {1, 2, 3, 4, 8}) {
      EXPECT_LT(difference(together(t, ranks), reference), kSame) << optimizer << ", " << ranks << " ranks";
    }
  }
}

TEST(Tables, SchedulingChangesNoBit) {
  for (const int ranks : {2, 3}) {
    Training t;
    const Trained two_sided = together(t, ranks);  // the way's own
    for (const char* scheduling : {"off", "horizontal", "vertical", "both"}) {
      t.tables.scheduling = scheduling;
      expect_same_bits(together(t, ranks), two_sided, scheduling);
    }
    t.tables = {.way = "embrace"};
    t.lookahead = false;
    expect_same_bits(together(t, ranks), two_sided, "no lookahead");
    // A model that was built with its tables gives them up.
    expect_same_bits(together(t, ranks, false), two_sided, "taken over");
  }
}

TEST(Tables, EveryWayEqualsOneProcess) {
  Training t;
  const Trained reference = Alone(t).train();
  for (const char* way : {"alltoall", "hashed", "parallax", "allgather"}) {
    t.tables.way = way;
    EXPECT_LT(difference(together(t, 3), reference), kSame) << way;
    EXPECT_LT(difference(together(t, 5), reference), kSame) << way;
  }
}

// Where the optimizer leaves rows without a gradient alone, dense tables train as others do; so do tables with
// ways of their own, of a model that was made with and without them.
TEST(Tables, WaysOfTheirOwnEqualOneProcess) {
  Training t{.optimizer = "adagrad"};
  const Trained reference = Alone(t).train();
  for (const char* way : {"dense", "push-pull", "embrace/softmax.weight=dense", "dense/softmax.weight=hashed",
                          "alltoall/embedding.weight=allgather", "push-pull/embedding.weight=dense",
                          "scheme/softmax.weight=embrace"}) {
    t.tables.way = way;
    for (const bool elsewhere : {false, true})
      EXPECT_LT(difference(together(t, 3, elsewhere), reference), kSame) << way;
  }
  t.tables.way = "embrace/output=dense";
  EXPECT_THROW(together(t, 2), UsageError);
}

TEST(Tables, MicroBatchesAndClipping) {
  Training t{.micro_batches = 3};
  EXPECT_LT(difference(together(t, 3), Alone(t).train()), kSame);
  t = {.clip_norm = 0.05};
  const Trained clipped = Alone(t).train();
  EXPECT_LT(difference(together(t, 3), clipped), kSame);
  t.clip_norm = 0;
  EXPECT_GT(difference(Alone(t).train(), clipped), 1e-3);  // it was clipped
}

// The softmax over all words, of tables that are held elsewhere: the loss of one process that has them. In the
// midst of training, which goes on as if nothing had been; with batches that not all ranks have.
TEST(Tables, EvaluationEqualsOneProcess) {
  Training t{.steps = 6};
  const Trained undisturbed = together(t, 3);
  const auto evaluated = [&](const std::string& way, int ranks) {
    t.tables.way = way;
    double out = 0;
    run_ranks(ranks, [&](World& world) {
      at::set_num_threads(1);
      world.plan_by({});
      const std::unique_ptr<Model> model = tiny(t, true);
      Replica replica(world.engine(), world.comm(), *model, replica_options_of(t));
      Trained trained;
      train_steps(world, replica, t, 0, 4, trained);
      std::vector<Batch> batches{share_of(t, 100, world)};
      if (world.rank() == 0) batches.push_back(share_of(t, 101, world));
      const double loss = replica.evaluate(batches);
      EXPECT_EQ(replica.evaluate(batches), loss);
      train_steps(world, replica, t, 4, 6, trained);
      trained.parameters = replica.values();
      if (way == "embrace" && ranks == 3) expect_same_bits(trained, undisturbed, "evaluated in between");
      if (world.rank() == 0) out = loss;
    });
    return out;
  };
  // One process on the weights after 4 steps.
  const auto alone = [&](int ranks, bool sampled) {
    Training four{.steps = 4};
    const Trained trained = Alone(four).train();
    const std::unique_ptr<Model> model = tiny(t, false);
    const torch::NoGradGuard no_grad;
    for (std::size_t p = 0; p < trained.parameters.size(); ++p)
      torch::Tensor(model->parameters()[p].tensor).copy_(trained.parameters[p]);
    const StepContext context{.seed = kSeed, .step = 100, .training = sampled};
    const Batch whole = batch_of(t, 100);
    const Batch more = part_of(batch_of(t, 101), 0, Blocks(ranks, t.sequences).begin(1));
    const double sum = model->loss(whole, context).item<double>() + model->loss(more, context).item<double>();
    return sum / static_cast<double>(counted(whole) + counted(more));
  };
  for (const int ranks : {1, 2, 3, 8})
    EXPECT_NEAR(evaluated("embrace", ranks) / alone(ranks, false), 1, kSame);
  for (const char* way : {"hashed", "parallax", "allgather", "embrace/softmax.weight=allgather"})
    EXPECT_NEAR(evaluated(way, 3) / alone(3, false), 1, kSame) << way;
  EXPECT_GT(std::abs(alone(3, true) / alone(3, false) - 1), 1e-3);  // control: samples are no full softmax
}

// Ranks without a sequence, a step without any, and one with sequences of which nothing counts: rows are read, and
// their gradients are zeros.
TEST(Tables, RanksWithoutTokens) {
  Training t{.sequences = 2};
  EXPECT_LT(difference(together(t, 4), Alone(t).train()), kSame);
  t.empty_step = 7;
  t.uncounted_step = 11;
  const Trained reference = Alone(t).train();
  EXPECT_EQ(reference.losses.size(), static_cast<std::size_t>(t.steps - 2));  // of nothing there is none
  for (const char* way : {"embrace", "hashed", "allgather"}) {
    t.tables.way = way;
    EXPECT_LT(difference(together(t, 4), reference), kSame) << way;
  }
}

TEST(Tables, WhatCouldBeWrongIsSeen) {
  const Training t;
  const Trained right = Alone(t).train();
  Training wrong = t;
  wrong.rows_count_all = true;
  EXPECT_GT(difference(Alone(wrong).train(), right), 1e-6);
  wrong = t;
  wrong.lr_one_late = true;
  EXPECT_GT(difference(Alone(wrong).train(), right), 1e-6);
  wrong = t;
  wrong.one_row_twice = true;
  EXPECT_GT(difference(Alone(wrong).train(), right), 1e-6);
}

// Tables by rows, the rest by SparDL: the same bits on all ranks (together() says so), whatever the scheduling;
// and a scheme that keeps every entry is one that sends them all.
TEST(Tables, BesideASparseScheme) {
  Training t{.optimizer = "sgd", .scheme = "spardl", .type = torch::kFloat32};
  const Trained sparse = together(t, 3);
  t.tables.scheduling = "off";
  expect_same_bits(together(t, 3), sparse, "off");
  t.density = 1;
  const Trained all = together(t, 3);
  t.scheme = "dense";
  // Each of 20 steps rounds a parameter once and its gradient's sum of three, with the division, up to three
  // times, in either run; steps are short against the parameters.
  const double bound = 20 * 8 * std::ldexp(1.0, -24);
  EXPECT_LT(distance(all, together(t, 3)), bound);
  EXPECT_GT(distance(all, sparse), 10 * bound);  // control: entries were left behind
}

// What one step averages of each dense parameter, and what the ranks keep of it, over their number.
struct Mass {
  std::map<std::string, torch::Tensor> out, kept;
};
Mass mass_of(const Training& t, int ranks) {
  Mass mass;
  std::mutex mutex;
  run_ranks(ranks, [&](World& world) {
    const std::unique_ptr<Model> model = tiny(t, true);
    Replica replica(world.engine(), world.comm(), *model, replica_options_of(t));
    const bool first = world.rank() == 0;
    replica.watch([&](const Parameter& p, torch::Tensor& gradient) {
      if (first) mass.out[p.name] = gradient.to(torch::kFloat64).flatten();
    });
    Trained unused;
    train_steps(world, replica, t, 0, 1, unused);
    const StateSnapshot saved = replica.registry().save(world.rank(), world.size(), "data_parallel");
    const std::lock_guard lock(mutex);
    for (const StateValue& row : saved.rows) {
      if (row.row.key.kind != "residual" || row.bytes.empty()) continue;
      const std::span<const float> values = row.values<float>();
      torch::Tensor& sum =
          mass.kept
              .try_emplace(row.row.key.name,
                           torch::zeros(static_cast<std::int64_t>(values.size()), torch::kFloat64))
              .first->second;
      for (std::size_t i = 0; i < values.size(); ++i)
        sum.data_ptr<double>()[i] += static_cast<double>(values[i]) / ranks;
    }
  });
  return mass;
}

TEST(Tables, MassIsConservedBesideThem) {
  Training t{.optimizer = "sgd", .scheme = "spardl", .type = torch::kFloat32};
  const Mass sparse = mass_of(t, 3);
  t.scheme = "dense";
  const Mass dense = mass_of(t, 3);
  ASSERT_FALSE(dense.out.empty());
  EXPECT_TRUE(dense.kept.empty());
  double lost = 0, whole = 0, without = 0;
  for (const auto& [name, gradient] : dense.out) {
    const torch::Tensor& out = sparse.out.at(name);
    const auto kept = sparse.kept.find(name);
    const torch::Tensor all = kept == sparse.kept.end() ? out : out + kept->second;
    lost += (all - gradient).square().sum().item<double>();
    without += (out - gradient).square().sum().item<double>();
    whole += gradient.square().sum().item<double>();
  }
  // Three gradients added and divided, in another order, with a rounding at every hop.
  EXPECT_LT(std::sqrt(lost / whole), 8 * std::ldexp(1.0, -24));
  EXPECT_GT(std::sqrt(without / whole), 0.01);  // control: the residuals are a part of it
}

// 10 steps on 4 ranks, the rest on another number: as one process that did not stop. Moments and counters of
// rows go along, or it would not be.
TEST(Tables, StateMovesToAnotherNumberOfRanks) {
  const Training t;
  const Trained reference = Alone(t).train();
  const int half = t.steps / 2;
  for (const bool forget : {false, true}) {
    std::vector<StateSnapshot> snapshots(4);
    Trained begun;
    run_ranks(4, [&](World& world) {
      const std::unique_ptr<Model> model = tiny(t, true);
      Replica replica(world.engine(), world.comm(), *model, replica_options_of(t));
      Trained mine;
      train_steps(world, replica, t, 0, half, mine);
      snapshots[static_cast<std::size_t>(world.rank())] = replica.registry().save(world.rank(), world.size());
      if (world.rank() == 0) begun = mine;
    });
    for (const int ranks : {1, 2, 4}) {
      run_ranks(ranks, [&](World& world) {
        const std::unique_ptr<Model> model = tiny(t, true);
        Replica replica(world.engine(), world.comm(), *model, replica_options_of(t));
        LoadOptions load;
        if (forget) load.owners = {"model"};
        replica.registry().load(snapshots, world.rank(), world.size(), load);
        Trained out = begun;
        train_steps(world, replica, t, half, t.steps, out);
        out.parameters = replica.values();
        if (forget)
          EXPECT_GT(distance(out, reference), 1e-6);  // control
        else
          EXPECT_LT(distance(out, reference), kSame) << ranks << " ranks";
      });
    }
  }
}

// Of the table and of what the optimizer keeps of it.
TEST(Tables, ARankHoldsItsColumns) {
  const Training t;
  run_ranks(4, [&](World& world) {
    const std::unique_ptr<Model> model = tiny(t, false);
    const std::int64_t before = model->parameters().front().tensor.numel();
    Replica replica(world.engine(), world.comm(), *model, replica_options_of(t));
    EXPECT_EQ(model->parameters().front().tensor.numel(), 0);
    HybridEmbedding& tables = *replica.job().hybrids().front();
    const std::int64_t held = tables.table(0).values().count;
    EXPECT_EQ(held, 97 * (world.rank() < 3 ? 2 : 1));
    std::vector<double> sum{static_cast<double>(held)};
    world.all_reduce(Dense(std::span(sum)));
    EXPECT_EQ(sum[0], static_cast<double>(before));
    int moments = 0;
    std::vector<std::byte> scratch;
    for (const LiveRow& row : tables.optimizer_rows({})) {
      if (row.row.rule != LayoutRule::moves || row.row.key.name != tables.table(0).info().name) continue;
      EXPECT_EQ(row.read(scratch).size(), tables.table(0).values().bytes().size()) << row.row.key.kind;
      ++moments;
    }
    EXPECT_EQ(moments, 2);  // of adam
    replica.settle();
  });
}

std::string error_of(int ranks, const std::function<void(World&)>& work) {
  std::string text;
  std::mutex mutex;
  try {
    run_ranks(ranks, [&](World& world) {
      try {
        work(world);
      } catch (const std::exception& error) {
        const std::lock_guard lock(mutex);
        if (text.empty() || text.find("table") == std::string::npos) text = error.what();
        throw;
      }
    });
  } catch (const std::exception&) {
    return text;
  }
  return "";
}

TEST(Tables, BadInputIsNamed) {
  const auto with = [](const std::function<void(Training&, Batch&, Batch&, int)>& spoil) {
    return error_of(2, [&](World& world) {
      Training t;
      Batch now = share_of(t, 0, world), next = share_of(t, 1, world);
      now.tokens = now.tokens.clone();
      next.tokens = next.tokens.clone();
      spoil(t, now, next, world.rank());
      const std::unique_ptr<Model> model = tiny(t, true);
      Replica replica(world.engine(), world.comm(), *model, replica_options_of(t));
      try {
        replica.step(std::span(&now, 1), {.seed = kSeed, .step = 0}, &next);
        const Batch second = share_of(t, 1, world);
        replica.step(std::span(&second, 1), {.seed = kSeed, .step = 1});
        replica.settle();
      } catch (...) {
        replica.abandon(std::current_exception());
        throw;
      }
    });
  };
  EXPECT_EQ(with([](Training&, Batch&, Batch&, int) {}), "");
  const std::string outside = with([](Training&, Batch& now, Batch&, int rank) {
    if (rank == 1) now.tokens.fill_(97);
  });
  for (const char* word : {"rank 1", "embedding.weight", "97"})
    EXPECT_NE(outside.find(word), std::string::npos) << outside;
  // The next batch is another one than was announced.
  const std::string other = with([](Training&, Batch&, Batch& next, int) { next.tokens.fill_(0); });
  EXPECT_NE(other.find("not announced"), std::string::npos) << other;
  const std::string momentum = with([](Training& t, Batch&, Batch&, int) { t.optimizer = "nadam"; });
  EXPECT_NE(momentum.find("nadam"), std::string::npos) << momentum;
}

// Launched as several processes: the bits of as many threads, and the loss of an evaluation.
TEST(TablesProcesses, SameBitsAsThreads) {
  const std::unique_ptr<World> world = join_world();
  if (world->size() == 1) GTEST_SKIP() << "this test is launched as several processes";
  const Trained reference = Alone({}).train();
  for (const char* way : {"embrace", "hashed", "allgather", "embrace/softmax.weight=parallax"}) {
    Training t{.tables = {.way = way}};
    const Trained mine = train_on(*world, t, true);
    expect_same_bits(mine, together(t, world->size()), way);
    EXPECT_LT(difference(mine, reference), kSame) << way;
    t.steps -= 1;
    EXPECT_FALSE(torch::equal(mine.parameters[0], together(t, world->size()).parameters[0]));  // control
  }
}

}  // namespace
}  // namespace weft
