// A small model that is trained on a mesh of threads, and in one process with torch alone: what both end with, and
// how far apart that is. State that moves between meshes.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
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

namespace weft::mesh_test {

using namespace torch_test;

inline constexpr double kSame = 1e-12;
inline constexpr std::int64_t kLength = 6, kWords = 40;
inline constexpr std::uint64_t kSeed = 5;

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
  int ep = 1;             // gpt-moe: ranks that share the experts
  bool dropless = false;  // of theirs no token is left out, and none counts by the others of its micro-batch
  int tp = 1;             // ranks that cut matrices
  bool tensor_bf16 = false;
  int heads = 2;
  std::string tables;       // a head of its own, and this way for the embedding
  int node_ranks = 1;       // by which sums are planned
  std::int64_t tokens = 0;  // ReplicaOptions::tokens
  std::string frozen;       // parameters whose names have that are not trained
  int ranks() const { return dp * stage.stages * tp; }
};

inline std::unique_ptr<Model> model_of(const Staged& t, int rank, int ranks) {
  ModelOptions o = model_options(t.model, "tiny");
  o.vocabulary = kWords;
  o.width = 12;
  o.layers = t.layers;
  o.heads = t.heads;
  o.dropout = 0.2;
  o.stage = t.stage;
  o.experts.count = 4;
  o.experts.ranks = t.ep;
  if (t.dropless) o.experts.capacity_factor = o.experts.balance_loss = 0;
  o.untied = !t.tables.empty();
  o.tables_elsewhere = !t.tables.empty();
  o.tensor.ranks = t.tp;
  o.tensor.bf16 = t.tensor_bf16;
  if (ranks == 1) {
    o.stage = {};
    o.tensor = {};
  }
  std::unique_ptr<Model> model = make_model(t.model, with_rank(o, rank, ranks));
  model->to(t.type);
  for (const Parameter& p : model->parameters()) {
    if (!t.frozen.empty() && p.name.find(t.frozen) != std::string::npos)
      torch::Tensor(p.tensor).requires_grad_(false);
  }
  return model;
}

inline Batch batch_of(const Staged& t, std::int64_t step) {
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
enum class Wrong : std::uint8_t { nothing, loss_of_each, twice_tied, no_tied, mixed_tied, half_a_norm };

// The first parameter's gradient, as it would be if each tensor-parallel rank's rows of it were added to the others'.
inline void mix_rows(const Model& model, int tp) {
  const torch::Tensor gradient = model.parameters().front().tensor.grad();
  const torch::Tensor parts = gradient.view({tp, -1, gradient.size(1)});
  gradient.copy_(parts.sum(0, true).expand_as(parts).reshape_as(gradient));
}

inline Result alone(const Staged& t, Wrong wrong = Wrong::nothing) {
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
    if (wrong == Wrong::twice_tied || wrong == Wrong::no_tied)
      torch::Tensor(model->parameters().front().tensor)
          .mutable_grad()
          .mul_(wrong == Wrong::no_tied ? 0 : 0.5);
    if (wrong == Wrong::mixed_tied) mix_rows(*model, t.tp);
    for (const Parameter& p : model->parameters()) {
      if (wrong == Wrong::half_a_norm && p.name == "layer.1.mlp.norm.weight")
        torch::Tensor(p.tensor).mutable_grad().mul_(0.5);
    }
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

inline ReplicaOptions options_of(const Staged& t) {
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
  out.tokens = t.tokens;
  return out;
}

// A grid of cases, each of a kind: all of them with WEFT_TEST_GRID; else one of every kind and one in `of` of the others,
// drawn by WEFT_SOAK_ROUND.
class Grid {
 public:
  void add(const std::string& kind, const Staged& t) { kinds_[kind].push_back(t); }
  std::vector<Staged> taken(std::uint32_t of) const {
    Random random(seed());
    std::vector<Staged> out;
    for (const auto& [kind, all] : kinds_) {
      const std::size_t one = random.below(static_cast<std::uint32_t>(all.size()));
      for (std::size_t i = 0; i < all.size(); ++i) {
        const bool drawn = random.below(of) == 0;
        if (i == one || drawn || std::getenv("WEFT_TEST_GRID") != nullptr) out.push_back(all[i]);
      }
    }
    return out;
  }
  static std::uint64_t seed() {
    const char* given = std::getenv("WEFT_SOAK_ROUND");
    return given == nullptr ? 1 : std::strtoull(given, nullptr, 10);
  }

 private:
  std::map<std::string, std::vector<Staged>> kinds_;
};

// A data-parallel rank's micro-batches of a step.
inline std::vector<Batch> share_of(const Staged& t, std::int64_t step, int data_rank) {
  const Batch whole = batch_of(t, step);
  const Blocks shares(t.dp, t.sequences);
  return micro_batches_of(part_of(whole, shares.begin(data_rank), shares.begin(data_rank + 1)),
                          t.micro_batches);
}

// Steps [from, to) of a replica; what it says of their losses.
inline std::vector<double> walk(const Staged& t, Replica& replica, int data_rank, int from, int to) {
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

// What ranks have of the parameters, put together. Those that have the same must have the same bits.
class Parts {
 public:
  void add(const ParameterShape& shape, const torch::Tensor& value) {
    const bool of_experts = shape.of_experts > 0;
    const auto [at, is_new] = parts_[shape.name].emplace(of_experts ? shape.first : shape.cut_first, value);
    EXPECT_TRUE(is_new || torch::equal(at->second, value)) << shape.name << ": holders differ";
    cuts_[shape.name] = of_experts ? 0 : std::max(0, shape.cut);
  }
  Named whole() const {
    Named out;
    for (const auto& [name, of] : parts_) {
      std::vector<torch::Tensor> all;
      for (const auto& [first, value] : of) all.push_back(value);
      out[name] = all.size() == 1 ? all.front() : torch::cat(all, cuts_.at(name));
    }
    return out;
  }

 private:
  std::map<std::string, std::map<std::int64_t, torch::Tensor>> parts_;
  std::map<std::string, std::int64_t> cuts_;
};

// What a rank of the mesh ends with.
struct RankResult {
  std::vector<ParameterShape> shapes;
  std::vector<torch::Tensor> values;
  std::vector<double> losses;
  double evaluated = 0;
};

inline RankResult train_on(World& world, const Staged& t) {
  at::set_num_threads(1);
  world.plan_by({.node_ranks = t.node_ranks});
  const std::unique_ptr<Model> model = model_of(t, world.rank(), world.size());
  Replica replica(world.engine(), world.comm(), *model, options_of(t));
  const int data_rank = replica.job().mesh().coordinates(world.rank()).dp;
  RankResult out;
  out.losses = walk(t, replica, data_rank, 0, t.steps);
  const Blocks shares(t.dp, t.sequences);
  const Batch whole = batch_of(t, 99);
  const Batch mine = part_of(whole, shares.begin(data_rank), shares.begin(data_rank + 1));
  out.evaluated = replica.evaluate({&mine, 1});
  out.values = replica.values();
  out.shapes = model->shape().parameters;
  return out;
}

inline Result together(const Staged& t) {
  Result out;
  Parts parts;
  std::mutex mutex;
  run_ranks(t.ranks(), [&](World& world) {
    const RankResult mine = train_on(world, t);
    const std::lock_guard lock(mutex);
    for (std::size_t p = 0; p < mine.values.size(); ++p) parts.add(mine.shapes[p], mine.values[p]);
    if (world.rank() == 0) {
      out.losses = mine.losses;
      out.evaluated = mine.evaluated;
    }
    EXPECT_EQ(mine.losses, out.losses.empty() ? mine.losses : out.losses);  // all ranks say the same
  });
  out.parameters = parts.whole();
  return out;
}

// The same parameters of a whole model, cut as a rank's are.
inline Result as_of_rank(const RankResult& rank, const Result& whole) {
  Result out{.parameters = {}, .losses = whole.losses, .evaluated = whole.evaluated};
  for (const ParameterShape& shape : rank.shapes) {
    const torch::Tensor& value = whole.parameters.at(shape.name);
    out.parameters[shape.name] =
        shape.cut_of == 0
            ? value
            : value.narrow(shape.cut, shape.cut_first, shape.dims[static_cast<std::size_t>(shape.cut)]);
  }
  return out;
}

// Relative to its norm, or to a thousandth of the largest one: gradients of what a softmax takes no notice of are
// rounding alone.
inline double distance(const Result& a, const Result& b) {
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

inline std::string title(const Staged& t) {
  return t.model + ", " + t.stage.schedule + ", dp " + std::to_string(t.dp) + ", pp " +
         std::to_string(t.stage.stages) + ", tp " + std::to_string(t.tp) + ", " +
         std::to_string(t.micro_batches) + " micro-batches";
}

// An eps as large as that: Adam's rule does not blow up gradients that are rounding alone.
inline Staged with(Staged t) {
  t.optimizer.eps = 1e-3;
  t.optimizer.lr = 0.02;
  return t;
}

// ---- state ----

struct Saved {
  std::vector<StateSnapshot> snapshots;
  std::mutex mutex;
};

inline void train_and_save(const Staged& t, int steps, Saved& saved) {
  saved.snapshots.resize(static_cast<std::size_t>(t.ranks()));
  run_ranks(t.ranks(), [&](World& world) {
    at::set_num_threads(1);
    world.plan_by({.node_ranks = t.node_ranks});
    const std::unique_ptr<Model> model = model_of(t, world.rank(), world.size());
    Replica replica(world.engine(), world.comm(), *model, options_of(t));
    walk(t, replica, replica.job().mesh().coordinates(world.rank()).dp, 0, steps);
    StateSnapshot mine = replica.registry().save(world.rank(), world.size());
    const std::lock_guard lock(saved.mutex);
    saved.snapshots[static_cast<std::size_t>(world.rank())] = std::move(mine);
  });
}

inline Named load_and_train(const Staged& t, const Saved& saved, int from, int to) {
  Parts out;
  std::mutex mutex;
  run_ranks(t.ranks(), [&](World& world) {
    at::set_num_threads(1);
    world.plan_by({.node_ranks = t.node_ranks});
    const std::unique_ptr<Model> model = model_of(t, world.rank(), world.size());
    Replica replica(world.engine(), world.comm(), *model, options_of(t));
    LoadOptions load;
    load.kin = JobStrategies::has_residuals;
    load.elsewhere = [&](const StateKey& key) {
      return std::ranges::find(model->parameters(), key.name, &Parameter::name) == model->parameters().end();
    };
    replica.registry().load(saved.snapshots, world.rank(), world.size(), load);
    walk(t, replica, replica.job().mesh().coordinates(world.rank()).dp, from, to);
    const std::vector<torch::Tensor> values = replica.values();
    const std::lock_guard lock(mutex);
    for (std::size_t p = 0; p < values.size(); ++p) out.add(model->shape().parameters[p], values[p]);
  });
  return out.whole();
}

inline double distance(const Named& a, const Named& b) {
  Result left, right;
  left.parameters = a;
  right.parameters = b;
  left.evaluated = right.evaluated = 1;
  return distance(left, right);
}

}  // namespace weft::mesh_test
