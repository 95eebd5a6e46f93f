// Layers of experts that several ranks share, against one process that computes every expert for every token
// (experts_toy.h).
#include "experts/experts.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>

#include "experts/router.h"
#include "state/registry.h"
#include "step/strategies.h"
#include "torch/experts_toy.h"
#include "weft/error.h"
#include "weft/world.h"
#include "weft_torch/train/replica.h"
#include "workload/job_strategies.h"

namespace weft {
namespace {

using torch_test::alone;
using torch_test::DenseMoe;
using torch_test::kMoeSeed;
using torch_test::Moe;
using torch_test::moe_batch;
using torch_test::moe_model;
using torch_test::moe_share;
using torch_test::Trained;

using Snapshots = std::vector<StateSnapshot>;  // of all ranks

// One rank's training: from nothing, or from what was saved after so many steps.
struct Part {
  int first = 0, end = -1;  // steps; -1: all
  const Snapshots* from = nullptr;
  StateSnapshot* to = nullptr;  // of this rank, at the end
  std::string scheme = "dense";
  bool recompute = false;
};
Trained train_on(World& world, const Moe& t, int ep, const Part& part = {}) {
  at::set_num_threads(1);
  world.plan_by({});
  const std::unique_ptr<Model> model = moe_model(t, ep, world.rank());
  ReplicaOptions options;
  options.optimizer = t.optimizer;
  options.clip_norm = t.clip_norm;
  options.recompute = part.recompute;
  options.parallel.scheme.name = part.scheme;
  options.parallel.scheme.density = 0.05;
  options.parallel.scheme.buckets.bucket_bytes = 4 << 10;
  options.parallel.scheme.buckets.dense_below = 64;
  Replica replica(world.engine(), world.comm(), *model, options);
  if (part.from != nullptr) replica.registry().load(*part.from, world.rank(), world.size());
  Trained out;
  const auto take = [&](const std::optional<double>& loss) {
    if (loss) out.losses.push_back(*loss);
  };
  for (int step = part.first; step < (part.end < 0 ? t.steps : part.end); ++step)
    take(
        replica.step(moe_share(moe_batch(*model, t, step), t, world.rank()), {.seed = kMoeSeed, .step = step})
            .last_loss);
  take(replica.settle().last_loss);
  if (part.to != nullptr) *part.to = replica.registry().save(world.rank(), world.size());
  for (const Parameter& p : model->parameters()) out.parameters.push_back(p.tensor.detach().clone());
  return out;
}

std::vector<Trained> together(const Moe& t, int ep, Part part = {}, Snapshots* saved = nullptr) {
  std::vector<Trained> all(static_cast<std::size_t>(t.world));
  if (saved != nullptr) saved->resize(all.size());
  run_ranks(t.world, [&](World& world) {
    const auto me = static_cast<std::size_t>(world.rank());
    Part mine = part;
    if (saved != nullptr) mine.to = &(*saved)[me];
    all[me] = train_on(world, t, ep, mine);
  });
  return all;
}

// Of what a rank has: of experts, its own.
Trained part_of_rank(const Trained& whole, const Moe& t, int ep, int rank) {
  const std::unique_ptr<Model> like = moe_model(t, ep, rank);
  Trained out = whole;
  for (std::size_t i = 0; i < out.parameters.size(); ++i) {
    const ParameterShape& shape = like->shape().parameters[i];
    if (shape.of_experts > 0)
      out.parameters[i] = whole.parameters[i].slice(0, shape.first, shape.first + shape.dims[0]);
  }
  return out;
}

double largest_distance(const std::vector<Trained>& ranks, const Trained& reference, const Moe& t, int ep) {
  double largest = 0;
  for (int r = 0; r < t.world; ++r) {
    const Trained mine = part_of_rank(reference, t, ep, r);
    largest = std::max({largest, torch_test::distance(ranks[static_cast<std::size_t>(r)], mine),
                        torch_test::loss_distance(ranks[static_cast<std::size_t>(r)], mine)});
  }
  return largest;
}

// Ranks that hold the same have the same bits.
void expect_equal_replicas(const std::vector<Trained>& ranks, int ep) {
  for (std::size_t r = static_cast<std::size_t>(ep); r < ranks.size(); ++r)
    torch_test::expect_same_bits(ranks[r], ranks[r - static_cast<std::size_t>(ep)]);
}

// Gradients are of the order of their weights, and so of what rounding makes of them: 1e-12 is some thousand
// times what 8 steps in float64 lose.
constexpr double kTolerance = 1e-12;

Moe some(double capacity = 1.0) {
  Moe t;
  t.experts.capacity_factor = capacity;
  t.optimizer.lr = 0.3;
  t.optimizer.momentum = 0.9;
  return t;
}

TEST(ExpertsOfSeveralRanks, EqualOneProcessOnEveryLayout) {
  for (const double capacity : {1.0, 0.0}) {
    const Moe t = some(capacity);
    const Trained reference = alone(t);
    for (const int ep : {1, 2, 4, 8}) {
      const std::vector<Trained> ranks = together(t, ep);
      EXPECT_LT(largest_distance(ranks, reference, t, ep), kTolerance)
          << "ep " << ep << ", capacity " << capacity;
      expect_equal_replicas(ranks, ep);
    }
    Moe brief = t;
    brief.steps = 2;
    const Trained expected = alone(brief);
    for (const int ep : {1, 2, 4, 8}) {
      for (int slices = 1; slices <= 8; ++slices) {
        const bool sample = ep == (capacity > 0 ? 8 : 4) || slices == 1 + ep;
        if (!sample && std::getenv("WEFT_TEST_GRID") == nullptr) continue;
        brief.experts.slices = slices;
        EXPECT_LT(largest_distance(together(brief, ep), expected, brief, ep), kTolerance)
            << "ep " << ep << ", " << slices << " slices, capacity " << capacity;
      }
    }
    Moe other = brief;  // control: what each token has of its own matters
    other.experts.jitter = 0;
    EXPECT_GT(largest_distance(together(brief, 2), alone(other), brief, 2), 1e-7);
  }
}

// An encoder and a decoder, each with experts: tokens of either side travel, and what the encoder gave is learned
// from through every layer of the decoder.
TEST(ExpertsOfSeveralRanks, EncoderAndDecoderEqualOneProcess) {
  for (const double capacity : {1.0, 0.0}) {
    Moe t = some(capacity);
    t.model = "bert2gpt2-moe";
    t.steps = 4;
    const Trained reference = alone(t);
    for (const int ep : {2, 8}) {
      const std::vector<Trained> ranks = together(t, ep);
      EXPECT_LT(largest_distance(ranks, reference, t, ep), kTolerance)
          << "ep " << ep << ", capacity " << capacity;
      expect_equal_replicas(ranks, ep);
    }
    // Control: the seeds of its dropout and jitter matter.
    Moe other = t;
    other.experts.jitter = 0;
    EXPECT_GT(largest_distance(together(t, 2), alone(other), t, 2), 1e-7);
  }
}

TEST(ExpertsOfSeveralRanks, ASourceOfAnotherLengthThanItsTargetIsRefused) {
  Moe t = some();
  t.model = "bert2gpt2-moe";
  t.world = 2;
  EXPECT_THROW(run_ranks(t.world,
                         [&](World& world) {
                           const std::unique_ptr<Model> model = moe_model(t, 2, world.rank());
                           ReplicaOptions options;
                           options.parallel.scheme.name = "dense";
                           Replica replica(world.engine(), world.comm(), *model, options);
                           std::vector<Batch> mine = moe_share(moe_batch(*model, t, 0), t, world.rank());
                           mine[0].source = mine[0].source.slice(1, 0, 3);
                           replica.step(mine, {.seed = kMoeSeed});
                         }),
               UsageError);
}

// Rows that came are let go of when the piece that takes them is computed: what is there at most does not grow
// with the number of layers, or of micro-batches.
TEST(ExpertsOfSeveralRanks, RowsAreKeptUntilTheyAreTaken) {
  const auto peak = [](int layers, int micro_batches) {
    Moe t = some(1.25);
    t.world = 4;
    t.sequences = 8;
    t.layers = layers;
    t.micro_batches = micro_batches;
    std::int64_t out = 0;
    run_ranks(t.world, [&](World& world) {
      const std::unique_ptr<Model> model = moe_model(t, 4, world.rank());
      ReplicaOptions options;
      options.parallel.scheme.name = "dense";
      Replica replica(world.engine(), world.comm(), *model, options);
      replica.step(moe_share(moe_batch(*model, t, 0), t, world.rank()), {.seed = kMoeSeed});
      replica.settle();
      if (world.rank() == 0) out = replica.job().experts()->peak_row_bytes();
    });
    return out;
  };
  // Of a layer: 8 experts with ceil(2 * 1.25 * 12 / 8) places for the 12 tokens of each of 4 ranks, 2 of them here.
  const std::int64_t layer = 4 * 2 * 4 * 12 * 8;
  // All of it may be there when the first piece begins, and of the way back as much again.
  EXPECT_LE(peak(2, 1), 2 * layer);
  EXPECT_GE(peak(2, 1), layer / 2);  // a slice of it
  EXPECT_LE(peak(8, 1), 2 * layer);
  // (A half of the tokens has a half of the places, 2.)
  EXPECT_LE(peak(2, 2), 2 * layer);
}

// What the comparison would see.
TEST(ExpertsOfSeveralRanks, AReferenceThatIsWrongIsFarAway) {
  Moe t = some();
  t.steps = 3;
  const std::vector<Trained> ranks = together(t, 4);
  ASSERT_LT(largest_distance(ranks, alone(t), t, 4), kTolerance);
  for (const auto& [what, change] : std::vector<std::pair<const char*, std::function<void(Moe&)>>>{
           {"experts divided by their replicas, not by all ranks", [](Moe& m) { m.expert_scale = 4; }},
           {"one capacity for all ranks", [](Moe& m) { m.one_capacity = true; }},
           {"a balance of each rank's own", [](Moe& m) { m.own_fractions = true; }},
           {"second choices in between", [](Moe& m) { m.second_before = true; }},
           {"no jitter", [](Moe& m) { m.experts.jitter = 0; }}}) {
    Moe wrong = t;
    change(wrong);
    EXPECT_GT(largest_distance(ranks, alone(wrong), t, 4), 1e-7) << what;
  }
}

TEST(ExpertsOfSeveralRanks, AnyNumberOfSlicesAndChoices) {
  for (const int choices : {1, 2}) {
    for (const int slices : {1, 3, 8}) {
      Moe t = some(slices == 3 ? 0.0 : 0.75);
      t.world = 4;
      t.steps = 4;
      t.experts.choices = choices;
      t.experts.slices = slices;
      t.experts.shared = slices == 3 ? 1 : 0;
      t.experts.every = slices == 8 ? 1 : 2;
      EXPECT_LT(largest_distance(together(t, 4), alone(t), t, 4), kTolerance)
          << choices << " choices, " << slices << " slices";
    }
  }
}

TEST(ExpertsOfSeveralRanks, MicroBatchesEmptyRanksAndOptimizers) {
  for (const char* name : {"adam", "adamw", "adagrad"}) {
    Moe t = some(std::string(name) == "adam" ? 0.0 : 1.0);
    t.world = 4;
    t.steps = 4;
    t.micro_batches = 2;
    t.sequences = 5;  // some micro-batches are empty, of the last ranks
    t.optimizer = default_options(name);
    t.optimizer.eps = 1e-4;  // else gradients that are nothing but rounding are divided by themselves
    EXPECT_LT(largest_distance(together(t, 2), alone(t), t, 2), kTolerance) << name;
  }
  Moe t = some();
  t.world = 4;
  t.sequences = 3;  // the last rank has nothing at all
  t.steps = 4;
  EXPECT_LT(largest_distance(together(t, 4), alone(t), t, 4), kTolerance);
  // Nor has it a gradient that would say in which order buckets are complete, where they go one at a time.
  t.experts.policy = "plain";
  t.experts.slices = 1;
  EXPECT_LT(largest_distance(together(t, 4), alone(t), t, 4), kTolerance);
}

// Every expert counts once in the norm, however many replicas it has.
TEST(ExpertsOfSeveralRanks, TheNormCountsEveryExpertOnce) {
  Moe t = some();
  t.world = 4;
  t.steps = 4;
  t.clip_norm = 0.05;
  const Trained reference = alone(t);
  for (const int ep : {1, 2, 4})
    EXPECT_LT(largest_distance(together(t, ep), reference, t, ep), kTolerance) << ep;
  Moe unclipped = t;
  unclipped.clip_norm = 0;
  EXPECT_GT(largest_distance(together(t, 2), alone(unclipped), t, 2), 1e-7);  // it was clipped
}

TEST(ExpertsOfSeveralRanks, EvaluationEqualsOneProcess) {
  Moe t = some();
  t.world = 4;
  t.sequences = 7;
  const DenseMoe dense(t);
  const Batch whole = moe_batch(dense.model(), t, 100);
  double sum = 0;
  for (int r = 0; r < t.world; ++r) {
    const Batch mine = moe_share(whole, t, r)[0];
    if (sequences(mine) > 0) sum += dense.evaluate(mine);
  }
  const double expected = sum / static_cast<double>(counted(whole));
  run_ranks(t.world, [&](World& world) {
    const std::unique_ptr<Model> model = moe_model(t, 2, world.rank());
    ReplicaOptions options;
    options.parallel.scheme.name = "dense";
    Replica replica(world.engine(), world.comm(), *model, options);
    const std::vector<Batch> mine = moe_share(whole, t, world.rank());
    EXPECT_NEAR(replica.evaluate(mine), expected, 1e-12 * expected);
    EXPECT_THROW(static_cast<void>(model->loss(mine[0], {.training = false})), UsageError);
  });
}

// What was saved on one layout goes on on any other: weights, moments, steps.
TEST(ExpertsOfSeveralRanks, GoOnOnAnotherLayout) {
  for (const char* name : {"sgd", "adam"}) {
    Moe t = some(0);  // (a capacity depends on who has which tokens)
    t.world = 4;
    t.steps = 6;
    t.optimizer = default_options(name);
    t.optimizer.eps = 1e-4;
    if (t.optimizer.name == "sgd") t.optimizer.momentum = 0.9;
    Trained rest = alone(t);
    rest.losses.erase(rest.losses.begin(), rest.losses.begin() + 3);
    for (const int from : {1, 2, 4}) {
      Snapshots saved;
      together(t, from, {.end = 3}, &saved);
      for (const auto& [world, ep] : {std::pair{4, 1}, {4, 2}, {4, 4}, {2, 2}, {1, 1}}) {
        Moe there = t;
        there.world = world;
        const std::vector<Trained> ranks = together(there, ep, {.first = 3, .from = &saved});
        EXPECT_LT(largest_distance(ranks, rest, there, ep), kTolerance)
            << name << ", from ep " << from << " to " << world << " ranks with ep " << ep;
      }
      // Control: without what was saved.
      EXPECT_GT(largest_distance(together(t, 2, {.first = 3}), rest, t, 2), 1e-7);
    }
  }
}

// Beside sparse gradients: replicas stay equal, and it is learned from what was left behind.
TEST(ExpertsOfSeveralRanks, SparseSchemesKeepReplicasEqual) {
  Moe t = some();
  t.world = 4;
  t.type = torch::kFloat32;
  for (const int ep : {1, 2, 4}) {
    Snapshots saved;
    const std::vector<Trained> ranks = together(t, ep, {.scheme = "spardl"}, &saved);
    expect_equal_replicas(ranks, ep);
    double left = 0;  // of experts, on all ranks
    for (const StateSnapshot& of_rank : saved) {
      for (const StateValue& row : of_rank.rows) {
        if (row.row.key.owner != "expert_parallel" || row.row.key.kind != "residual") continue;
        for (const float value : row.values<float>()) left += std::abs(value);
      }
    }
    EXPECT_EQ(left > 0, ep < 4) << ep;  // one rank that has them alone leaves nothing behind
  }
}

// Payload that leaves a rank, as an integer: of each of the four all-to-alls d values for every place.
// Where parts are computed again in backward, as many: what travelled is kept.
void expect_bytes_of_the_formula(bool recompute) {
  Moe t = some(1.25);
  t.world = 4;
  t.steps = 2;
  run_ranks(t.world, [&](World& world) {
    const std::unique_ptr<Model> model = moe_model(t, 4, world.rank());
    ReplicaOptions options;
    options.parallel.scheme.name = "dense";
    options.recompute = recompute;
    Replica replica(world.engine(), world.comm(), *model, options);
    for (int step = 0; step < t.steps; ++step)
      replica.step(moe_share(moe_batch(*model, t, step), t, world.rank()), {.seed = kMoeSeed, .step = step});
    replica.settle();
    const Blocks shares(t.world, t.sequences);
    const auto places = [&](int r) {  // of an expert, for a source
      return static_cast<std::int64_t>(
          std::ceil(2 * 1.25 * static_cast<double>(shares.count(r) * torch_test::kMoeLength) / 8));
    };
    std::int64_t rows = 0;
    for (int r = 0; r < t.world; ++r) {
      if (r == world.rank()) continue;
      rows += 2 * 2 * places(world.rank());  // out twice, two experts each
      rows += 2 * 2 * places(r);             // home twice
    }
    EXPECT_EQ(replica.job().experts()->step_bytes(), static_cast<std::uint64_t>(rows * 12 * 8));
    EXPECT_EQ(replica.job().experts()->formula_bytes(), rows * 12 * 8);
  });
}

TEST(ExpertsOfSeveralRanks, BytesEqualTheFormula) {
  expect_bytes_of_the_formula(false);
  expect_bytes_of_the_formula(true);
}

TEST(ExpertsOfSeveralRanks, RecomputationChangesNoBit) {
  Moe t = some();
  t.world = 4;
  t.steps = 4;
  const std::vector<Trained> kept = together(t, 2), again = together(t, 2, {.recompute = true});
  for (std::size_t r = 0; r < kept.size(); ++r) torch_test::expect_same_bits(again[r], kept[r]);
}

TEST(ExpertsOfSeveralRanks, WhatCannotBeIsRefused) {
  const auto refused = [](int world, int ep, int rank_of_all, int experts) {
    Moe t = some();
    t.experts.count = experts;
    std::string out;
    std::mutex mutex;
    try {
      run_ranks(world, [&](World& w) {
        const std::unique_ptr<Model> model = moe_model(t, ep, rank_of_all < 0 ? w.rank() : rank_of_all);
        ReplicaOptions options;
        options.parallel.scheme.name = "dense";
        const Replica replica(w.engine(), w.comm(), *model, options);
      });
    } catch (const UsageError& error) {
      out = error.what();
    }
    return out;
  };
  EXPECT_NE(refused(2, 4, -1, 8).find("no whole number of such groups"), std::string::npos);
  EXPECT_NE(refused(2, 2, -1, 3).find("cannot be dealt"), std::string::npos);
  EXPECT_NE(refused(2, 2, 0, 8).find("has the experts of place 1"), std::string::npos);
}

// Launched as several processes: the bits of as many threads.
TEST(ExpertsProcesses, SameBitsAsThreads) {
  const std::unique_ptr<World> world = join_world();
  if (world->size() == 1) GTEST_SKIP() << "this test is launched as several processes";
  for (const double capacity : {1.0, 0.0}) {
    Moe t = some(capacity);
    t.world = world->size();
    t.steps = 4;
    const Trained reference = alone(t);
    for (const int ep : {1, 2}) {
      for (const int slices : {1, 3, 8}) {
        t.experts.slices = slices;
        const Trained mine = train_on(*world, t, ep);
        const std::vector<Trained> threads = together(t, ep);
        torch_test::expect_same_bits(mine, threads[static_cast<std::size_t>(world->rank())]);
        EXPECT_LT(largest_distance(threads, reference, t, ep), kTolerance) << ep << ", " << slices;
      }
    }
    const Trained mine = train_on(*world, t, t.world);
    const std::vector<Trained> threads = together(t, t.world);
    torch_test::expect_same_bits(mine, threads[static_cast<std::size_t>(world->rank())]);
    EXPECT_LT(largest_distance(threads, reference, t, t.world), kTolerance);
    t.steps -= 1;
    EXPECT_FALSE(torch::equal(mine.parameters[0], together(t, t.world)[0].parameters[0]));  // control
  }
}

}  // namespace
}  // namespace weft
