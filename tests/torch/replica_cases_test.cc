// What a replica must cope with beside the plain case: parameters that are not used, sparse gradients,
// torch's own optimizers, the recipe's options, a GPU. Against one process with torch alone.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>
#include <cmath>
#include <mutex>
#include <numeric>

#include "patterns/blocks.h"
#include "state/registry.h"
#include "torch/torch_alone.h"
#include "weft/error.h"
#include "weft/random.h"
#include "weft/world.h"
#include "weft_torch/train/replica.h"

namespace weft {
namespace {

constexpr std::int64_t kWords = 40, kWidth = 6, kSequences = 6, kLength = 5;

struct Case {
  torch::ScalarType type = torch::kFloat64;
  torch::DeviceType device = torch::kCPU;
  bool sparse = false;     // gradient of the table
  bool skips = false;      // the middle block, in some steps on some ranks
  bool take_away = false;  // somebody sets gradients to none between steps
  int steps = 7;
  int micro_batches = 1;
  ReplicaOptions options;
};

ModelOptions sizes() {
  ModelOptions o;
  o.vocabulary = kWords;
  o.context = kLength;
  return o;
}

// A table, a middle that may be left out, a head.
class Patchwork final : public Model {
 public:
  explicit Patchwork(const Case& c)
      : Model(chain_shape("patchwork", {{"table", {{"table", {kWords, kWidth}}}},
                                        {"middle", {{"middle", {kWidth, kWidth}}, {"bias", {kWidth}}}},
                                        {"head", {{"head", {kWords, kWidth}}}}}),
              sizes()),
        skips_(c.skips),
        sparse_(c.sparse) {
    table_ = add({.name = "table", .tensor = values({kWords, kWidth}, 1, c), .initial = {}});
    middle_ = add({.name = "middle", .tensor = values({kWidth, kWidth}, 2, c), .initial = {}});
    bias_ = add({.name = "bias", .tensor = values({kWidth}, 3, c), .initial = {}});
    head_ = add({.name = "head", .tensor = values({kWords, kWidth}, 4, c), .initial = {}});
  }
  std::vector<torch::Tensor> forward(int block, int, std::span<const torch::Tensor> taken, const Batch& batch,
                                     const StepContext& context) const override {
    if (block == 0) return {torch::embedding(table_, batch.tokens, -1, false, sparse_)};
    const torch::Tensor& input = taken.front();
    if (block == 1) {
      const bool used =
          !skips_ || context.step % 3 == 2 || (context.step % 3 == 1 && batch.first_sequence == 0);
      return {used ? input + torch::tanh(torch::linear(input, middle_, bias_)) : input};
    }
    const torch::Tensor logits = torch::linear(input, head_).reshape({-1, kWords});
    return {
        torch::nll_loss(torch::log_softmax(logits, 1), batch.targets.reshape({-1}), {}, at::Reduction::Sum)};
  }

 private:
  static torch::Tensor values(std::vector<std::int64_t> shape, int seed, const Case& c) {
    const std::int64_t count =
        std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
    const torch::Tensor grid = torch::arange(count, torch::kFloat64) * 0.7 + seed;
    torch::Tensor out = (torch::sin(grid * grid) * 0.5).reshape(shape).to(c.device, c.type).contiguous();
    return out.requires_grad_(true);
  }
  bool skips_, sparse_;
  torch::Tensor table_, middle_, bias_, head_;
};

Batch batch_of(std::int64_t step, const Case& c) {
  Batch batch{.tokens = torch::empty({kSequences, kLength}, torch::kInt64),
              .targets = torch::empty({kSequences, kLength}, torch::kInt64)};
  Random random(3, 1, static_cast<std::uint32_t>(step));
  for (std::int64_t i = 0; i < batch.tokens.numel(); ++i) {
    batch.tokens.data_ptr<std::int64_t>()[i] = random.below(kWords);
    batch.targets.data_ptr<std::int64_t>()[i] = random.below(kWords);
  }
  batch.tokens = batch.tokens.to(c.device);
  batch.targets = batch.targets.to(c.device);
  return batch;
}

Batch share(const Batch& whole, int part, int parts) {
  const Blocks cuts(parts, kSequences);
  return {.tokens = whole.tokens.slice(0, cuts.begin(part), cuts.begin(part + 1)),
          .targets = whole.targets.slice(0, cuts.begin(part), cuts.begin(part + 1)),
          .first_sequence = cuts.begin(part)};
}

using Tensors = std::vector<torch::Tensor>;

Tensors copies(const Model& model) {
  Tensors out;
  for (const Parameter& p : model.parameters())
    out.push_back(p.tensor.detach().to(torch::kCPU, torch::kFloat64).clone());
  return out;
}

double distance(const Tensors& a, const Tensors& b) {
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    largest = std::max(largest, ((a[i] - b[i]).norm() / b[i].norm()).item<double>());
  return largest;
}

// One process, the same parts one after the other, torch's optimizer over all parameters.
Tensors alone(const Case& c, int parts, double disturbance = 0) {
  Patchwork model(c);
  const auto optimizer = torch_test::torchs(c.options.optimizer, model);
  for (int step = 0; step < c.steps; ++step) {
    optimizer->zero_grad();
    const Batch whole = batch_of(step, c);
    for (int part = 0; part < std::min<int>(parts, kSequences); ++part)  // the others are empty
      (model.loss(share(whole, part, parts), {.step = step}) / (kSequences * kLength)).backward();
    if (disturbance > 0) torch_test::disturb(model, disturbance, step);
    optimizer->step();
  }
  return copies(model);
}

// What roundings of float64 may do to a run, as a distance() from the exact one: as in replica_test.cc, with
// the terms of three products forward and backward, of a softmax over the words and of the batch.
double rounding(const Case& c, int parts) {
  const double terms = static_cast<double>(2 * 3 * kWidth + kWords + kSequences * kLength);
  const double share = std::sqrt(terms) * std::ldexp(1.0, -53);
  const Tensors exact = alone(c, parts);
  // And each update rounds the parameters themselves.
  const double bound = 4 * distance(alone(c, parts, share), exact) + c.steps * std::ldexp(1.0, -53);
  // It says something; but for a first step of Adam, which has the gradient's sign alone.
  if (c.steps > 1) {
    EXPECT_GT(distance(alone(c, parts, 100 * share), exact), bound);
  }
  return bound;
}

struct Together {
  Tensors parameters;
  std::vector<Tensors> behind;  // each step
  StateSnapshot optimizer;
  double gradient_norm = 0;  // of the last step
};

Together together(const Case& c, int ranks, const Together* from = nullptr) {
  Together out;
  std::mutex mutex;
  run_ranks(ranks, [&](World& world) {
    at::set_num_threads(1);
    Patchwork model(c);
    Replica replica(world.engine(), world.comm(), model, c.options);
    if (from != nullptr) {
      const torch::NoGradGuard no_grad;
      const std::vector<Parameter> mine = model.parameters();
      for (std::size_t i = 0; i < mine.size(); ++i) mine[i].tensor.copy_(from->parameters[i]);
      replica.registry().load({&from->optimizer, 1}, 0, 1, {.owners = {"optimizer"}, .elsewhere = {}});
    }
    StepOutcome settled;
    for (int step = 0; step < c.steps; ++step) {
      const Batch mine = share(batch_of(step, c), world.rank(), ranks);
      std::vector<Batch> parts = micro_batches_of(mine, c.micro_batches);
      for (const Parameter& p : model.parameters())
        if (c.take_away) p.tensor.mutable_grad() = torch::Tensor();
      replica.step(parts, {.step = step});
      settled = replica.settle();
      if (world.rank() == 0) out.behind.push_back(copies(model));
    }
    const std::lock_guard lock(mutex);
    const Tensors mine = copies(model);
    if (out.parameters.empty()) out.parameters = mine;
    EXPECT_EQ(distance(mine, out.parameters), 0);
    out.optimizer = replica.registry().save(0, 1, "optimizer");  // the same on all ranks
    if (world.rank() == 0) out.gradient_norm = settled.gradient_norm;
  });
  return out;
}

OptimizerOptions optimizer(const std::string& name, double momentum = 0, bool nesterov = false) {
  OptimizerOptions o = default_options(name);
  o.lr = name == "sgd" ? 0.5 : 0.01;
  o.momentum = momentum;
  o.nesterov = nesterov;
  o.weight_decay = name == "adagrad" ? 0 : 0.1;
  return o;
}

Case dense(const OptimizerOptions& optimizer) {
  Case c;
  c.options.parallel.scheme.name = "dense";
  c.options.optimizer = optimizer;
  return c;
}

TEST(ReplicaCases, UnusedParametersRestAsTorchLeavesThem) {
  for (const char* from : {"weft", "torch"}) {
    for (const OptimizerOptions& o : {optimizer("sgd", 0.9), optimizer("adamw")}) {
      for (const int micro : {1, 2}) {
        Case c = dense(o);
        c.skips = true;
        c.micro_batches = micro;
        c.options.optimizer_from = from;
        c.options.parallel.find_unused = true;
        const Tensors expected = alone(c, 3 * micro);
        const Together got = together(c, 3);
        EXPECT_LT(distance(got.parameters, expected), rounding(c, 3 * micro))
            << from << " " << o.name << ", " << micro;
        for (const StateValue& v : got.optimizer.rows) {
          const std::string& name = v.row.key.name;
          if (v.row.key.kind != "step") continue;
          // Not 0, 3 and 6.
          EXPECT_EQ(v.values<std::int64_t>()[0], name == "middle" || name == "bias" ? 4 : 7) << name;
        }
        c.options.parallel.find_unused = false;  // control: zeros decay and keep their momentum
        EXPECT_GT(distance(together(c, 3).parameters, expected), 1e-4);
      }
    }
  }
}

TEST(ReplicaCases, ARankWithoutDataUsesNothing) {
  Case c = dense(optimizer("sgd", 0.9));
  c.skips = true;
  c.options.parallel.find_unused = true;
  EXPECT_LT(distance(together(c, 7).parameters, alone(c, 7)), 1e-12);
  c.options.parallel.find_unused = false;  // control
  EXPECT_GT(distance(together(c, 7).parameters, alone(c, 7)), 1e-4);
}

TEST(ReplicaCases, SparseGradientsAreAddedAtTheDoor) {
  const Case plain = dense(optimizer("sgd", 0.9));
  const Tensors expected = alone(plain, 2);
  for (const bool sparse : {false, true}) {
    for (const bool take_away : {false, true}) {
      Case c = plain;
      c.sparse = sparse;
      c.take_away = take_away;
      EXPECT_LT(distance(together(c, 2).parameters, expected), 1e-12) << sparse << take_away;
    }
  }
  // Control: torch does make them sparse, with the same row more than once.
  Case c = plain;
  c.sparse = true;
  const Patchwork model(c);
  model.loss(batch_of(0, c), {}).backward();
  const torch::Tensor gradient = model.parameters()[0].tensor.grad();
  ASSERT_TRUE(gradient.is_sparse());
  EXPECT_GT(gradient._nnz(), gradient.coalesce()._nnz());
}

TEST(ReplicaCases, TorchsOptimizersStepByStep) {
  const std::array all{optimizer("sgd"),  optimizer("sgd", 0.9), optimizer("sgd", 0.9, true),
                       optimizer("adam"), optimizer("adamw"),    optimizer("adagrad")};
  for (const OptimizerOptions& o : all) {
    Case c = dense(o);
    const Together ours = together(c, 2);
    c.options.optimizer_from = "torch";
    const Together theirs = together(c, 2);
    ASSERT_EQ(theirs.behind.size(), 7u);
    for (int steps = 1; steps <= 7; ++steps) {
      const auto i = static_cast<std::size_t>(steps - 1);
      c.steps = steps;
      EXPECT_LT(distance(theirs.behind[i], ours.behind[i]), rounding(c, 2)) << o.name << i;
    }
    EXPECT_GT(distance(theirs.behind[6], ours.behind[5]), 1e-4);  // control

    // A run that began with one goes on with the other.
    const Together whole = together(c, 2, &ours);
    c.steps = 14;
    const double bound = rounding(c, 2);
    c.steps = 7;
    for (const char* from : {"weft", "torch"}) {
      c.options.optimizer_from = from;
      const Together& first = c.options.optimizer_from == "weft" ? theirs : ours;
      EXPECT_LT(distance(together(c, 2, &first).parameters, whole.parameters), bound) << o.name << from;
    }
    if (o.name == "sgd" && o.momentum == 0) continue;  // has nothing to forget
    Together forgetful = ours;                         // control
    for (StateValue& v : forgetful.optimizer.rows) {
      if (v.row.key.kind != "lr") std::ranges::fill(v.bytes, std::byte{0});
    }
    EXPECT_GT(distance(together(c, 2, &forgetful).parameters, whole.parameters), 1e-5) << o.name;
  }
}

TEST(ReplicaCases, MomentumCorrectionWhereNothingIsLeftBehindIsMomentum) {
  Case c = dense(optimizer("sgd", 0.9));
  c.type = torch::kFloat32;
  c.options.optimizer.weight_decay = 0;  // it is added behind the velocity here, before it there
  const Tensors expected = together(c, 3).parameters;
  c.options.parallel.scheme.name = "spardl";
  c.options.parallel.scheme.density = 1;
  c.options.parallel.scheme.momentum_correction = 0.9;
  c.options.optimizer.momentum = 0;
  // Seven steps, each with a handful of float32 roundings of 2^-24 in another order, carried on by momentum.
  EXPECT_LT(distance(together(c, 3).parameters, expected), 1e-5);
  c.options.parallel.scheme.momentum_correction = 0;
  EXPECT_GT(distance(together(c, 3).parameters, expected), 1e-2);  // control
}

TEST(ReplicaCases, LocalClippingOfOneRankIsThatOfTheSum) {
  Case c = dense(optimizer("sgd", 0.9));
  c.options.clip_norm = 0.02;
  const Together after = together(c, 1);
  c.options.clip_norm = 0;
  c.options.parallel.clip_local = 0.02;
  const Together local = together(c, 1);
  EXPECT_LT(distance(local.parameters, after.parameters), 1e-4);  // (that of the sum adds 1e-6 to the norm)
  EXPECT_NEAR(local.gradient_norm, after.gradient_norm, 1e-3 * after.gradient_norm);
  EXPECT_GT(local.gradient_norm, 0.02);
  c.options.parallel.clip_local = 0;
  EXPECT_GT(distance(together(c, 1).parameters, after.parameters), 1e-2);  // control
}

TEST(ReplicaCases, WhatCannotBeMeantIsRefused) {
  const auto refused = [](const char* part, auto change) {
    Case c = dense(optimizer("sgd"));
    c.type = torch::kFloat32;
    change(c);
    try {
      together(c, 1);
      ADD_FAILURE() << part;
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  };
  refused("did you mean 'torch'", [](Case& c) { c.options.optimizer_from = "torhc"; });
  refused("momentum correction is for sgd", [](Case& c) {
    c.options.parallel.scheme.name = "spardl";
    c.options.parallel.scheme.momentum_correction = 0.9;
    c.options.optimizer = optimizer("adamw");
  });
  refused("without a momentum of its own", [](Case& c) {
    c.options.parallel.scheme.name = "spardl";
    c.options.parallel.scheme.momentum_correction = 0.9;
    c.options.optimizer.momentum = 0.9;
  });
}

TEST(ReplicaCases, ParametersOnAGpuAreStaged) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "there is no GPU";
  for (const bool skips : {false, true}) {
    for (const int micro : {1, 2}) {
      Case c = dense(optimizer("adamw"));
      c.skips = skips;
      c.micro_batches = micro;
      c.options.parallel.find_unused = skips;
      c.options.optimizer_from = "torch";
      const Tensors expected = together(c, 2).parameters;
      const double bound = rounding(c, 2 * micro);
      c.device = torch::kCUDA;
      EXPECT_LT(distance(together(c, 2).parameters, expected), bound) << skips << micro;
      c.options.clip_norm = 0.02;
      EXPECT_GT(distance(together(c, 2).parameters, expected), 1e-4);  // control: other gradients are seen
    }
  }
  Case c = dense(optimizer("sgd", 0.9));
  c.device = torch::kCUDA;
  EXPECT_THROW(together(c, 1), UsageError);  // weft's optimizers are the host's
  c.type = torch::kFloat32;
  c.options.optimizer_from = "torch";
  c.options.parallel.scheme.name = "spardl";
  c.options.parallel.scheme.density = 0.2;
  c.options.parallel.scheme.buckets.dense_below = 10;
  const Together got = together(c, 3);  // (which compares the ranks)
  EXPECT_GT(distance(got.behind[6], got.behind[5]), 0);
}

}  // namespace
}  // namespace weft
