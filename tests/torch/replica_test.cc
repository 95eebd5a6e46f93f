// Data-parallel training with LibTorch against single-process training on the whole batch, which uses torch's
// own optimizers and nothing of weft but the models.
#include "weft_torch/train/replica.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <mutex>
#include <numeric>

#include "patterns/blocks.h"
#include "torch/torch_alone.h"
#include "weft/error.h"
#include "weft/random.h"
#include "weft/world.h"

namespace weft {
namespace {

using torch_test::distance;
using torch_test::disturb;
using torch_test::expect_same_bits;
using torch_test::loss_distance;
using torch_test::torchs;
using torch_test::Trained;

constexpr std::int64_t kSequences = 7;  // no multiple of the ranks: shares are uneven
constexpr std::int64_t kLength = 12;
constexpr std::uint64_t kSeed = 5;

struct Training {
  std::string model = "gpt";
  torch::ScalarType type = torch::kFloat64;
  int steps = 20;
  int micro_batches = 1;
  std::int64_t sequences = kSequences;
  OptimizerOptions optimizer;
  double clip_norm = 0;
  std::string algorithm = "dense";
  double density = 0.05;
  bool one_batch = false;  // the same in every step: it can be learnt by heart, random tokens cannot
  // What makes a control: every rank believes its share begins the global batch, or averages twice.
  bool wrong_place = false;
  double average_again = 1;
  // Of alone(): every gradient is off by so much of its tensor's root mean square, at random.
  double disturbance = 0;
};

OptimizerOptions sgd(double lr = 0.5, double momentum = 0.9) {
  OptimizerOptions o = default_options("sgd");
  o.lr = lr;
  o.momentum = momentum;
  return o;
}

std::unique_ptr<Model> tiny(const Training& t) {
  ModelOptions o = model_options(t.model, "tiny");
  o.dropout = 0.2;
  std::unique_ptr<Model> model = make_model(t.model, o);
  model->to(t.type);
  return model;
}

// The global batch of a step.
Batch batch_of(const Model& model, const Training& t, std::int64_t step) {
  Batch batch{.tokens = torch::empty({t.sequences, kLength}, torch::kInt64),
              .targets = torch::empty({t.sequences, kLength}, torch::kInt64)};
  Random random(11, 1, t.one_batch ? 0 : static_cast<std::uint32_t>(step));
  const auto id = [&] {
    return static_cast<std::int64_t>(random.below(static_cast<std::uint32_t>(model.options().vocabulary)));
  };
  for (std::int64_t i = 0; i < batch.tokens.numel(); ++i) {
    batch.tokens.data_ptr<std::int64_t>()[i] = id();
    batch.targets.data_ptr<std::int64_t>()[i] = (i + (t.one_batch ? 0 : step)) % 5 == 3 ? kNotCounted : id();
  }
  return batch;
}

std::vector<torch::Tensor> copies(const Model& model) {
  std::vector<torch::Tensor> out;
  for (const Parameter& p : model.parameters()) out.push_back(p.tensor.detach().clone());
  return out;
}

Trained alone(const Training& t) {
  const std::unique_ptr<Model> model = tiny(t);
  const auto optimizer = torchs(t.optimizer, *model);
  Trained out;
  for (int step = 0; step < t.steps; ++step) {
    optimizer->zero_grad();
    const Batch batch = batch_of(*model, t, step);
    const torch::Tensor loss = model->loss(batch, {.seed = kSeed, .step = step}) / counted(batch);
    loss.backward();
    if (t.clip_norm > 0) {
      std::vector<torch::Tensor> tensors;
      for (const Parameter& p : model->parameters()) tensors.push_back(p.tensor);
      torch::nn::utils::clip_grad_norm_(tensors, t.clip_norm);
    }
    if (t.disturbance > 0) disturb(*model, t.disturbance, step);
    optimizer->step();
    out.losses.push_back(loss.item<double>());
  }
  out.parameters = copies(*model);
  return out;
}

Trained train_on(World& world, const Training& t) {
  at::set_num_threads(1);
  world.plan_by({});  // measured figures would choose another order of additions on each transport
  const std::unique_ptr<Model> model = tiny(t);
  ReplicaOptions options;
  options.optimizer = t.optimizer;
  options.clip_norm = t.clip_norm;
  options.parallel.scheme.name = t.algorithm;
  options.parallel.scheme.density = t.density;
  options.parallel.scheme.buckets.bucket_bytes = 16 << 10;  // many buckets
  Replica replica(world.engine(), world.comm(), *model, options);
  Trained out;
  const auto take = [&](const std::optional<double>& loss) {
    if (loss) out.losses.push_back(*loss);
  };
  const Blocks shares(world.size(), t.sequences);
  for (int step = 0; step < t.steps; ++step) {
    const Batch whole = batch_of(*model, t, step);
    Batch mine = part_of(whole, shares.begin(world.rank()), shares.begin(world.rank() + 1));
    if (t.wrong_place) mine.first_sequence = 0;
    std::vector<Batch> micro;
    const Blocks cuts(t.micro_batches, sequences(mine));
    for (int m = 0; m < t.micro_batches; ++m)
      micro.push_back(part_of(mine, cuts.begin(m), cuts.begin(m + 1)));
    take(replica.step(micro, {.seed = kSeed, .step = step}).last_loss);
    if (t.average_again != 1) {
      replica.settle();
      const torch::NoGradGuard no_grad;
      for (const Parameter& p : model->parameters()) torch::Tensor(p.tensor).mul_(t.average_again);
    }
  }
  take(replica.settle().last_loss);
  out.parameters = copies(*model);
  return out;
}

// Every rank's result, which must be the same bits.
Trained together(const Training& t, int ranks) {
  std::vector<Trained> all(static_cast<std::size_t>(ranks));
  run_ranks(ranks, [&](World& world) { all[static_cast<std::size_t>(world.rank())] = train_on(world, t); });
  for (const Trained& other : all) expect_same_bits(other, all[0]);
  return all[0];
}

TEST(Replica, DenseEqualsTheWholeBatchInOneProcess) {
  for (const char* name : {"gpt", "lm"}) {
    const Training t{.model = name, .optimizer = sgd()};
    const Trained reference = alone(t);
    for (int ranks = 1; ranks <= 4; ++ranks) {
      const Trained got = together(t, ranks);
      EXPECT_LT(distance(got, reference), 1e-12) << name << ", " << ranks << " ranks";
      EXPECT_LT(loss_distance(got, reference), 1e-12) << name << ", " << ranks << " ranks";
    }
  }
}

// A step of SGD without momentum moves a parameter by its gradient: the differences are the gradients.
TEST(Replica, GradientsOfOneStepAreThoseOfTheWholeBatch) {
  for (const char* name : {"gpt", "lm"}) {
    const Training t{.model = name, .steps = 1, .optimizer = sgd(0.5, 0)};
    const Training none{.model = name, .steps = 0, .optimizer = sgd(0.5, 0)};
    const Trained start = together(none, 1);
    const auto moved = [&](Trained trained) {
      for (std::size_t i = 0; i < trained.parameters.size(); ++i)
        trained.parameters[i] = trained.parameters[i] - start.parameters[i];
      return trained;
    };
    const Trained reference = moved(alone(t));
    for (int ranks = 1; ranks <= 4; ++ranks) EXPECT_LT(distance(moved(together(t, ranks)), reference), 1e-12);
    Training wrong = t;
    wrong.average_again = 0.999999;
    EXPECT_GT(distance(moved(together(wrong, 3)), reference), 1e-7);  // control
  }
}

TEST(Replica, ControlsAreSeen) {
  Training t{.optimizer = sgd()};
  const Trained reference = alone(t);
  t.wrong_place = true;
  EXPECT_GT(distance(together(t, 3), reference), 1e-6);  // other dropout masks
  t.wrong_place = false;
  t.average_again = 0.999999;
  EXPECT_GT(distance(together(t, 3), reference), 1e-9);
}

// What rounding to a type may do to a run, as a distance() from the exact one. A gradient is the end of a chain
// of sums: forward and backward through four products a layer of at most 4 * width terms each, the softmax over
// the words, and the batch. n terms in all, and each rounds by at most u = 2^-24 (2^-53) of what was summed so
// far. Such roundings add up like a random walk: to a share of sqrt(n) u of the tensor's own size (a bound that
// holds with the factor 4 but for one case in a thousand; Higham and Mary, 2019). What a share of the gradient
// does to the parameters twenty steps later depends on the model and the optimizer (Adam divides by roots): so
// a run in float64, in one process, has its gradients disturbed by that much.
double rounding(const Training& t) {
  Training exact = t;
  exact.type = torch::kFloat64;
  const ModelOptions sizes = model_options(t.model, "tiny");
  const double terms =
      static_cast<double>(2 * 4 * sizes.layers * 4 * sizes.width + sizes.vocabulary + t.sequences * kLength);
  Training disturbed = exact;
  disturbed.disturbance = std::sqrt(terms) * std::ldexp(1.0, t.type == torch::kFloat32 ? -24 : -53);
  const double bound = 4 * distance(alone(disturbed), alone(exact));
  // It says something: a hundred times the disturbance is seen as such.
  disturbed.disturbance *= 100;
  EXPECT_GT(distance(alone(disturbed), alone(exact)), bound);
  return bound;
}

// What production trains in, against float64 in one process.
TEST(Replica, TwentyStepsInFloat32AreWithinRounding) {
  for (const char* name : {"gpt", "lm"}) {
    Training t{.model = name, .type = torch::kFloat32, .optimizer = sgd()};
    const double bound = rounding(t);
    EXPECT_LT(bound, 2e-4) << name;
    Training exact = t;
    exact.type = torch::kFloat64;
    const Trained reference = alone(exact);
    for (int ranks = 1; ranks <= 4; ++ranks)
      EXPECT_LT(distance(together(t, ranks), reference), bound) << name << ", " << ranks << " ranks";
    // Control.
    t.average_again = 1 - 1e-4;
    EXPECT_GT(distance(together(t, 3), reference), bound) << name;
  }
}

TEST(Replica, MicroBatchesEmptySharesClippingAndAdam) {
  Training t{.micro_batches = 3, .optimizer = sgd()};
  EXPECT_LT(distance(together(t, 2), alone(t)), 1e-12);
  t = {.sequences = 2, .optimizer = sgd()};  // two of the four ranks have nothing
  EXPECT_LT(distance(together(t, 4), alone(t)), 1e-12);
  t = {.optimizer = sgd(), .clip_norm = 0.3};
  const Trained clipped = together(t, 3);
  EXPECT_LT(distance(clipped, alone(t)), 1e-12);
  t.clip_norm = 0;
  EXPECT_GT(distance(clipped, alone(t)), 1e-3);  // control: it was clipped
  for (const char* name : {"adam", "adamw", "adagrad"}) {
    t = {.optimizer = default_options(name)};
    const double bound = std::min(rounding(t), 1e-9);  // a root and a division magnify the last bits
    EXPECT_LT(distance(together(t, 3), alone(t)), bound) << name;
    t.average_again = 1 - 1e-9;
    EXPECT_GT(distance(together(t, 3), alone(t)), bound) << name;  // control
  }
}

// Mean loss of the last ten steps over that of the first ten.
double late_over_early(const Trained& t) {
  const auto ten = static_cast<std::ptrdiff_t>(10);
  return std::accumulate(t.losses.end() - ten, t.losses.end(), 0.0) /
         std::accumulate(t.losses.begin(), t.losses.begin() + ten, 0.0);
}

TEST(Replica, SparseSchemesTrainAndAgree) {
  for (const char* name : {"spardl", "topka", "topkdsa", "gtopk", "oktopk", "dense-bf16", "powersgd"}) {
    Training t{.type = torch::kFloat32,
               .steps = 60,
               .optimizer = sgd(0.2, 0.9),
               .algorithm = name,
               .density = 0.1,
               .one_batch = true};
    const Trained got = together(t, 3);
    ASSERT_EQ(got.losses.size(), 60u);
    for (const double loss : got.losses) EXPECT_TRUE(std::isfinite(loss));
    EXPECT_LT(late_over_early(got), 0.8) << name;
    t.optimizer.lr = 0;
    EXPECT_GT(late_over_early(together(t, 3)), 0.97) << name;  // control: who does not update learns nothing
  }
}

TEST(Replica, AGradientThatIsNotFiniteIsAnErrorOrASkippedStep) {
  for (const bool skip : {false, true}) {
    std::mutex mutex;
    std::vector<std::string> texts;
    run_ranks(2, [&](World& world) {
      at::set_num_threads(1);
      const Training t{.type = torch::kFloat32};
      const std::unique_ptr<Model> model = tiny(t);
      ReplicaOptions options;
      options.optimizer = sgd();
      options.skip_not_finite = skip;
      Replica replica(world.engine(), world.comm(), *model, options);
      const std::vector<torch::Tensor> before = copies(*model);
      const Blocks shares(2, kSequences);
      const Batch mine =
          part_of(batch_of(*model, t, 0), shares.begin(world.rank()), shares.begin(world.rank() + 1));
      const auto spoil = [&](const torch::Tensor& g) { return g * std::numeric_limits<float>::infinity(); };
      const Parameter bad = model->parameters().back();
      if (world.rank() == 1) bad.tensor.register_hook(spoil);
      replica.step(std::span(&mine, 1), {.seed = kSeed, .step = 0});
      std::string text;
      try {
        replica.settle();
        EXPECT_TRUE(skip);
        const std::vector<torch::Tensor> after = copies(*model);
        for (std::size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(torch::equal(before[i], after[i]));
        EXPECT_EQ(replica.skipped_steps(), 1);
        text = bad.name;
      } catch (const UsageError& error) {
        EXPECT_FALSE(skip);
        text = error.what();
      }
      const std::lock_guard lock(mutex);
      texts.push_back(text);
      EXPECT_NE(text.find(bad.name), std::string::npos) << text;
    });
    EXPECT_EQ(texts.size(), 2u);
  }
}

// Launched as several processes: the same bits as with as many threads.
TEST(ReplicaProcesses, SameBitsAsThreads) {
  const std::unique_ptr<World> world = join_world();
  if (world->size() == 1) GTEST_SKIP() << "this test is launched as several processes";
  for (const char* model : {"gpt", "lm"}) {
    for (const char* algorithm : {"dense", "spardl", "oktopk"}) {
      const Training t{
          .model = model, .type = torch::kFloat32, .steps = 8, .optimizer = sgd(), .algorithm = algorithm};
      const Trained mine = train_on(*world, t);
      expect_same_bits(mine, together(t, world->size()));
      Training other = t;
      other.steps = 7;
      // Control.
      EXPECT_FALSE(torch::equal(mine.parameters[0], together(other, world->size()).parameters[0]));
    }
  }
}

}  // namespace
}  // namespace weft
