// Training with stages against one process with torch alone: every mesh and schedule, in float64; what is tied
// between stages; compressed gradients between them; evaluation; state that moves to other meshes.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <mutex>

#include "patterns/blocks.h"
#include "state/optimizer.h"
#include "state/registry.h"
#include "step/stage.h"
#include "step/strategies.h"
#include "torch/torch_alone.h"
#include "weft/error.h"
#include "weft/random.h"
#include "weft/world.h"
#include "weft_torch/train/replica.h"
#include "workload/job_strategies.h"
#include "workload/train_options.h"

namespace weft {
namespace {

using namespace torch_test;

constexpr double kSame = 1e-12;
constexpr std::int64_t kLength = 6, kWords = 40;
constexpr std::uint64_t kSeed = 5;

struct Staged {
  std::string model = "gpt";
  StageOptions stage{.stages = 2};
  int dp = 1;
  int micro_batches = 4;
  int layers = 4;
  int steps = 4;
  std::int64_t sequences = 13;  // no multiple of the ranks or micro-batches
  std::string scheme = "dense";
  double density = 0.2;
  double clip_norm = 0;
  OptimizerOptions optimizer = default_options("adam");
  BackwardOptions backward;
  torch::ScalarType type = torch::kFloat64;
  bool lookahead = true;
  bool recompute = false;
  int ep = 1;          // gpt-moe: ranks that share the experts
  std::string tables;  // a head of its own, and this way for the embedding
  int ranks() const { return dp * stage.stages; }
};

std::unique_ptr<Model> model_of(const Staged& t, int rank, int ranks) {
  ModelOptions o = model_options(t.model, "tiny");
  o.vocabulary = kWords;
  o.width = 12;
  o.layers = t.layers;
  o.dropout = 0.2;
  o.stage = t.stage;
  o.experts.count = 4;
  o.experts.ranks = t.ep;
  o.untied = !t.tables.empty();
  o.tables_elsewhere = !t.tables.empty();
  if (ranks == 1) o.stage = {};
  std::unique_ptr<Model> model = make_model(t.model, with_rank(o, rank, ranks));
  model->to(t.type);
  return model;
}

Batch batch_of(const Staged& t, std::int64_t step) {
  const bool spans = t.model == "bert";
  Batch batch{.tokens = torch::empty({t.sequences, kLength}, torch::kInt64),
              .targets = torch::empty({t.sequences, spans ? 2 : kLength}, torch::kInt64)};
  Random random(11, 1, static_cast<std::uint32_t>(step));
  const auto id = [&](std::int64_t bound) {
    return static_cast<std::int64_t>(random.below(static_cast<std::uint32_t>(bound)));
  };
  for (std::int64_t i = 0; i < batch.tokens.numel(); ++i)
    batch.tokens.data_ptr<std::int64_t>()[i] = id(kWords);
  for (std::int64_t i = 0; i < batch.targets.numel(); ++i)
    batch.targets.data_ptr<std::int64_t>()[i] =
        (i + step) % 5 == 3 ? kNotCounted : id(spans ? kLength : kWords);
  return batch;
}

using Named = std::map<std::string, torch::Tensor>;
struct Result {
  Named parameters;
  std::vector<double> losses;
  double evaluated = 0;
};

// What makes a control.
enum class Wrong : std::uint8_t { nothing, loss_of_each, twice_tied };

Result alone(const Staged& t, Wrong wrong = Wrong::nothing) {
  at::set_num_threads(1);
  const std::unique_ptr<Model> model = model_of(t, 0, 1);
  const std::unique_ptr<torch::optim::Optimizer> optimizer = torchs(t.optimizer, *model);
  Result out;
  for (int step = 0; step < t.steps; ++step) {
    for (const Parameter& p : model->parameters()) torch::Tensor(p.tensor).mutable_grad() = torch::Tensor();
    const Batch batch = batch_of(t, step);
    const double tokens = wrong == Wrong::loss_of_each ? static_cast<double>(batch.targets.numel())
                                                       : static_cast<double>(counted(batch));
    const torch::Tensor loss = model->loss(batch, {.seed = kSeed, .step = step}) / tokens;
    loss.backward();
    if (wrong == Wrong::twice_tied)
      torch::Tensor(model->parameters().front().tensor).mutable_grad().mul_(0.5);
    if (t.clip_norm > 0) {
      std::vector<torch::Tensor> all;
      for (const Parameter& p : model->parameters()) all.push_back(p.tensor);
      torch::nn::utils::clip_grad_norm_(all, t.clip_norm);
    }
    optimizer->step();
    out.losses.push_back(loss.item<double>());
  }
  for (const Parameter& p : model->parameters()) out.parameters[p.name] = p.tensor.detach().clone();
  const torch::NoGradGuard no_grad;
  const Batch batch = batch_of(t, 99);
  out.evaluated =
      model->loss(batch, {.training = false}).item<double>() / static_cast<double>(counted(batch));
  return out;
}

ReplicaOptions options_of(const Staged& t) {
  ReplicaOptions out;
  out.parallel.scheme.name = t.scheme;
  out.parallel.scheme.density = t.density;
  out.parallel.scheme.buckets.bucket_bytes = 2048;
  out.parallel.scheme.buckets.dense_below = t.scheme == "dense" ? 0 : 64;
  out.optimizer = t.optimizer;
  out.clip_norm = t.clip_norm;
  out.backward = t.backward;
  out.lookahead = t.lookahead;
  if (!t.tables.empty()) out.tables.way = t.tables;
  out.recompute = t.recompute;
  return out;
}

// A data-parallel rank's micro-batches of a step.
std::vector<Batch> share_of(const Staged& t, std::int64_t step, int data_rank) {
  const Batch whole = batch_of(t, step);
  const Blocks shares(t.dp, t.sequences);
  return micro_batches_of(part_of(whole, shares.begin(data_rank), shares.begin(data_rank + 1)),
                          t.micro_batches);
}

// Steps [from, to) of a replica; what it says of their losses.
std::vector<double> walk(const Staged& t, Replica& replica, int data_rank, int from, int to) {
  std::vector<double> losses;
  for (int step = from; step < to; ++step) {
    const Batch whole = batch_of(t, step + 1);
    const Blocks shares(t.dp, t.sequences);
    const Batch next = part_of(whole, shares.begin(data_rank), shares.begin(data_rank + 1));
    const StepOutcome outcome = replica.step(share_of(t, step, data_rank), {.seed = kSeed, .step = step},
                                             t.lookahead && step + 1 < to ? &next : nullptr);
    if (outcome.last_loss) losses.push_back(*outcome.last_loss);
  }
  if (const StepOutcome outcome = replica.settle(); outcome.last_loss) losses.push_back(*outcome.last_loss);
  return losses;
}

Result together(const Staged& t) {
  Result out;
  std::mutex mutex;
  run_ranks(t.ranks(), [&](World& world) {
    at::set_num_threads(1);
    world.plan_by({});
    const std::unique_ptr<Model> model = model_of(t, world.rank(), world.size());
    Replica replica(world.engine(), world.comm(), *model, options_of(t));
    const int data_rank = replica.job().mesh().coordinates(world.rank()).dp;
    const std::vector<double> losses = walk(t, replica, data_rank, 0, t.steps);
    const Blocks shares(t.dp, t.sequences);
    const Batch whole = batch_of(t, 99);
    const Batch mine = part_of(whole, shares.begin(data_rank), shares.begin(data_rank + 1));
    const double evaluated = replica.evaluate({&mine, 1});
    const std::vector<torch::Tensor> values = replica.values();
    const std::lock_guard lock(mutex);
    for (std::size_t p = 0; p < values.size(); ++p) {
      const ParameterShape& shape = model->shape().parameters[p];
      const std::string name =
          shape.name + (shape.of_experts > 0 ? " from " + std::to_string(shape.first) : "");
      const auto [at, is_new] = out.parameters.emplace(name, values[p]);
      EXPECT_TRUE(is_new || torch::equal(at->second, values[p])) << name << ": holders differ";
    }
    if (world.rank() == 0) {
      out.losses = losses;
      out.evaluated = evaluated;
    }
    EXPECT_EQ(losses, out.losses.empty() ? losses : out.losses);  // all ranks say the same
  });
  return out;
}

// Relative to its norm, or to a thousandth of the largest one: gradients of what a softmax takes no notice of are
// rounding alone.
double distance(const Result& a, const Result& b) {
  double largest = 0, worst = 0;
  EXPECT_EQ(a.parameters.size(), b.parameters.size());
  for (const auto& [name, value] : b.parameters) largest = std::max(largest, value.norm().item<double>());
  for (const auto& [name, value] : b.parameters) {
    const double norm = std::max(value.norm().item<double>(), 1e-3 * largest);
    worst = std::max(worst, (a.parameters.at(name) - value).norm().item<double>() / norm);
  }
  EXPECT_EQ(a.losses.size(), b.losses.size());
  for (std::size_t i = 0; i < std::min(a.losses.size(), b.losses.size()); ++i)
    worst = std::max(worst, std::abs(a.losses[i] - b.losses[i]) / std::abs(b.losses[i]));
  return std::max(worst, std::abs(a.evaluated - b.evaluated) / std::abs(b.evaluated));
}

std::string title(const Staged& t) {
  return t.model + ", " + t.stage.schedule + ", dp " + std::to_string(t.dp) + ", pp " +
         std::to_string(t.stage.stages) + ", " + std::to_string(t.micro_batches) + " micro-batches";
}

// An eps as large as that: Adam's rule does not blow up gradients that are rounding alone.
Staged with(Staged t) {
  t.optimizer.eps = 1e-3;
  t.optimizer.lr = 0.02;
  return t;
}

TEST(Stages, EveryMeshEqualsOneProcess) {
  const bool full = std::getenv("WEFT_TEST_GRID") != nullptr;
  int at = 0;
  for (const int stages : {2, 3, 4, 8}) {
    for (const int dp : {1, 2, 3, 4}) {
      if (stages * dp > 8) continue;
      for (const char* schedule : {"gpipe", "1f1b", "interleaved", "zb-h1"}) {
        for (const int micro_batches : {1, 2, 3, 4, 5, 8, 16}) {
          const bool interleaved = schedule == std::string("interleaved");
          if (interleaved && (micro_batches % stages != 0 || stages > 4)) continue;
          if (!full && at++ % 11 != 0) continue;
          const Staged t =
              with({.stage = {.stages = stages,
                              .schedule = schedule,
                              .chunks = interleaved ? 2 : 1,
                              .double_warmup = !interleaved && micro_batches == 5 && schedule[0] == '1'},
                    .dp = dp,
                    .micro_batches = micro_batches,
                    .layers = 9,
                    .steps = 3});
          EXPECT_LT(distance(together(t), alone(t)), kSame) << title(t);
        }
      }
    }
  }
}

TEST(Stages, WhatCouldBeWrongIsSeen) {
  const Staged t = with({.dp = 2});
  const Result right = together(t);
  EXPECT_LT(distance(right, alone(t)), kSame);
  EXPECT_GT(distance(right, alone(t, Wrong::loss_of_each)), 1e-6);
  EXPECT_GT(distance(right, alone(t, Wrong::twice_tied)),
            1e-6);  // a tied gradient divided by both stages' ranks
}

TEST(Stages, ClippingLookaheadAndOtherModels) {
  Staged t = with({.dp = 2, .clip_norm = 0.05});
  EXPECT_LT(distance(together(t), alone(t)), kSame) << "clipping";
  t.clip_norm = 0;
  t.lookahead = false;
  EXPECT_LT(distance(together(t), alone(t)), kSame) << "without lookahead";
  Staged bert = with({.model = "bert", .stage = {.stages = 3}, .dp = 2});
  EXPECT_LT(distance(together(bert), alone(bert)), kSame) << "bert";
  Staged given = with({.stage = {.stages = 3, .layers = {1, 2, 1}}});
  EXPECT_LT(distance(together(given), alone(given)), kSame) << "layers by hand";
  for (const char* optimizer : {"sgd", "adamw", "adagrad"}) {
    Staged other = with({.optimizer = default_options(optimizer)});
    EXPECT_LT(distance(together(other), alone(other)), kSame) << optimizer;
  }
}

// Computed again, from what was kept: the same bits, with dropout on, whole and in halves.
TEST(Stages, RecomputationChangesNoBit) {
  for (const char* schedule : {"1f1b", "zb-h1"}) {
    Staged t = with({.stage = {.stages = 2, .schedule = schedule}, .dp = 2, .type = torch::kFloat32});
    const Result kept = together(t);
    t.recompute = true;
    const Result again = together(t);
    EXPECT_EQ(again.losses, kept.losses);
    for (const auto& [name, value] : kept.parameters)
      EXPECT_TRUE(torch::equal(again.parameters.at(name), value)) << schedule << " " << name;
  }
}

// Factors of all columns are the gradient: what is left behind is rounding. Fewer are not, and what they leave
// behind is not lost.
TEST(Stages, GradientsTravelAsFactors) {
  Staged t = with({.stage = {.stages = 3}, .dp = 2, .micro_batches = 5, .steps = 6, .type = torch::kFloat32});
  const Result exact = together(t);
  Staged narrow = t;
  narrow.backward = {.columns = 1};
  Staged forgets = narrow;
  forgets.backward.lazy_error = false;
  Staged all = narrow;
  all.backward.messages = "all";
  const Result some = together(narrow);
  EXPECT_GT(distance(some, exact), 1e-4);
  EXPECT_LT(std::abs(some.losses.back() - exact.losses.back()), 0.02 * exact.losses.back());
  EXPECT_GT(distance(together(all), some), 1e-4);
  EXPECT_GT(distance(together(forgets), some), 1e-5);
  // The same again has the same bits.
  const Result again = together(narrow);
  for (const auto& [name, value] : some.parameters)
    EXPECT_TRUE(torch::equal(again.parameters.at(name), value)) << name;
  Staged wide = t;
  wide.type = torch::kFloat64;
  wide.backward.columns = 2;
  EXPECT_THROW(together(wide), UsageError);
}

TEST(Stages, BesideASparseSchemeAndLowRank) {
  for (const char* scheme : {"spardl", "powersgd"}) {
    const Staged t = with({.stage = {.stages = 2}, .dp = 2, .scheme = scheme, .type = torch::kFloat32});
    const Result run = together(t);
    EXPECT_LT(run.losses.back(), run.losses.front() + 0.5);
    EXPECT_GT(distance(run, together(with({.stage = {.stages = 2}, .dp = 2, .type = torch::kFloat32}))),
              1e-5);
  }
}

// Experts that ranks of a stage share, and a table that those of the first one have cut: as without stages, which
// other tests hold to one process.
TEST(Stages, WithExpertsAndTables) {
  for (const char* schedule : {"1f1b", "gpipe"}) {
    Staged piped = with({.model = "gpt-moe",
                         .stage = {.stages = 2, .schedule = schedule},
                         .dp = 2,
                         .ep = 2,
                         .tables = "embrace"});
    piped.micro_batches = 2;
    Staged flat = piped;
    flat.stage = {.stages = 1};
    EXPECT_LT(distance(together(piped), together(flat)), kSame) << schedule;
  }
  // All of it at once, with what loses something: it trains.
  Staged all = with({.model = "gpt-moe",
                     .stage = {.stages = 2},
                     .dp = 2,
                     .steps = 8,
                     .scheme = "spardl",
                     .type = torch::kFloat32});
  all.ep = 2;
  all.tables = "embrace";
  all.backward = {.columns = 2};
  const Result run = together(all);
  EXPECT_LT(run.losses.back(), run.losses.front() + 0.3);
}

// ---- state ----

struct Saved {
  std::vector<StateSnapshot> snapshots;
  std::mutex mutex;
};

void train_and_save(const Staged& t, int steps, Saved& saved) {
  saved.snapshots.resize(static_cast<std::size_t>(t.ranks()));
  run_ranks(t.ranks(), [&](World& world) {
    at::set_num_threads(1);
    world.plan_by({});
    const std::unique_ptr<Model> model = model_of(t, world.rank(), world.size());
    Replica replica(world.engine(), world.comm(), *model, options_of(t));
    walk(t, replica, replica.job().mesh().coordinates(world.rank()).dp, 0, steps);
    StateSnapshot mine = replica.registry().save(world.rank(), world.size());
    const std::lock_guard lock(saved.mutex);
    saved.snapshots[static_cast<std::size_t>(world.rank())] = std::move(mine);
  });
}

Named load_and_train(const Staged& t, const Saved& saved, int from, int to) {
  Named out;
  std::mutex mutex;
  run_ranks(t.ranks(), [&](World& world) {
    at::set_num_threads(1);
    world.plan_by({});
    const std::unique_ptr<Model> model = model_of(t, world.rank(), world.size());
    Replica replica(world.engine(), world.comm(), *model, options_of(t));
    LoadOptions load;
    load.elsewhere = [&](const StateKey& key) {
      return std::ranges::find(model->parameters(), key.name, &Parameter::name) == model->parameters().end();
    };
    replica.registry().load(saved.snapshots, world.rank(), world.size(), load);
    walk(t, replica, replica.job().mesh().coordinates(world.rank()).dp, from, to);
    const std::vector<torch::Tensor> values = replica.values();
    const std::lock_guard lock(mutex);
    for (std::size_t p = 0; p < values.size(); ++p) out.emplace(model->parameters()[p].name, values[p]);
  });
  return out;
}

double distance(const Named& a, const Named& b) {
  Result left, right;
  left.parameters = a;
  right.parameters = b;
  left.evaluated = right.evaluated = 1;
  return distance(left, right);
}

// Saved on any mesh, loaded on any other: the same after one step more.
TEST(Stages, StateMovesToOtherMeshes) {
  const std::vector<Staged> meshes{
      with({.stage = {.stages = 1}, .dp = 2}), with({.stage = {.stages = 2}, .dp = 2}),
      with({.stage = {.stages = 4}, .dp = 1}),
      with({.stage = {.stages = 2, .schedule = "interleaved", .chunks = 2}, .dp = 1})};
  const Result expected = alone([&] {
    Staged t = meshes.front();
    t.steps = 3;
    return t;
  }());
  for (const Staged& from : meshes) {
    Saved saved;
    train_and_save(from, 2, saved);
    for (const Staged& to : meshes)
      EXPECT_LT(distance(load_and_train(to, saved, 2, 3), expected.parameters), kSame)
          << title(from) << " to " << title(to);
  }
}

// What messages left behind is saved: a run that goes on has the bits of one that did not stop. Control: one that
// forgets it has not.
TEST(Stages, ResumeWithFactorsHasTheSameBits) {
  Staged t = with({.stage = {.stages = 3}, .dp = 2, .micro_batches = 4, .steps = 5, .type = torch::kFloat32});
  t.backward = {.columns = 2};
  const Named straight = together(t).parameters;
  Saved saved;
  train_and_save(t, 3, saved);
  const Named resumed = load_and_train(t, saved, 3, 5);
  for (const auto& [name, value] : straight) EXPECT_TRUE(torch::equal(resumed.at(name), value)) << name;
  for (StateSnapshot& snapshot : saved.snapshots)
    std::erase_if(snapshot.rows, [](const auto& row) { return row.row.key.owner == "pipeline"; });
  EXPECT_GT(distance(load_and_train(t, saved, 3, 5), straight), 0);
}

TEST(Stages, BadInputIsNamed) {
  const auto refusal = [](const Staged& t) -> std::string {
    try {
      together(t);
    } catch (const UsageError& error) {
      return error.what();
    }
    return "(no UsageError)";
  };
  EXPECT_NE(refusal(with({.stage = {.stages = 3}, .layers = 2}))
                .find("layers must be at least 1 for each of 3 stages"),
            std::string::npos);
  EXPECT_NE(refusal(with({.model = "lm"})).find("stages are of gpt, gpt-moe and bert"), std::string::npos);
  EXPECT_NE(
      refusal(with({.stage = {.stages = 2, .schedule = "interleaved", .chunks = 2}, .micro_batches = 3}))
          .find("interleaved takes a multiple of its 2 stages as micro-batches, not 3"),
      std::string::npos);
}

}  // namespace
}  // namespace weft
