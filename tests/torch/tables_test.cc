// Tables that are held by columns or rows in data-parallel training with LibTorch, against single-process
// training on the whole batch: a model with its own tables, torch's optimizers for what is dense, and the
// rules of rows written out here. Float64.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <map>
#include <mutex>

#include "patterns/blocks.h"
#include "state/registry.h"
#include "torch/torch_alone.h"
#include "weft/error.h"
#include "weft/random.h"
#include "weft/world.h"
#include "weft_torch/train/replica.h"
#include "workload/job_strategies.h"

namespace weft {
namespace {

using torch_test::expect_same_bits;
using torch_test::Trained;

constexpr std::int64_t kSequences = 7;  // no multiple of the ranks: shares are uneven
constexpr std::int64_t kLength = 9;
constexpr std::uint64_t kSeed = 5;

struct Training {
  std::string optimizer = "adam";
  TablesOptions tables{.way = "embrace"};
  std::string scheme = "dense";
  double density = 0.2;
  int steps = 20;
  int micro_batches = 1;
  double clip_norm = 0;
  bool lookahead = true;
  std::int64_t sequences = kSequences;
  torch::ScalarType type = torch::kFloat64;
  // Controls: how one process could be wrong.
  bool rows_count_all = false;  // every row of a table is updated, as by a dense optimizer
  bool lr_one_late = false;
  bool one_row_twice = false;  // the rule sees a row once for each token
};

double lr_of(std::int64_t step) { return 0.02 / (1.0 + 0.2 * static_cast<double>(step)); }

OptimizerOptions optimizer_of(const Training& t) {
  OptimizerOptions o = default_options(t.optimizer);
  o.lr = lr_of(0);
  if (t.optimizer == "adamw") o.weight_decay = 0.1;
  return o;
}

std::unique_ptr<Model> tiny(bool elsewhere, torch::ScalarType type = torch::kFloat64) {
  ModelOptions o = model_options("lm", "tiny");
  o.vocabulary = 97;
  o.width = 7;  // some ranks have a column less
  o.hidden = 12;
  o.projection = 5;
  o.layers = 1;
  o.samples = 11;
  o.dropout = 0.2;
  o.tables_elsewhere = elsewhere;
  std::unique_ptr<Model> model = make_model("lm", o);
  model->to(type);
  return model;
}

Batch batch_of(const Training& t, std::int64_t step) {
  Batch batch{.tokens = torch::empty({t.sequences, kLength}, torch::kInt64),
              .targets = torch::empty({t.sequences, kLength}, torch::kInt64)};
  Random random(11, 1, static_cast<std::uint32_t>(step));
  const auto id = [&] {  // small ids more often
    const double u = random.uniform();
    return static_cast<std::int64_t>(u * u * 97);
  };
  for (std::int64_t i = 0; i < batch.tokens.numel(); ++i) {
    batch.tokens.data_ptr<std::int64_t>()[i] = id();
    batch.targets.data_ptr<std::int64_t>()[i] = (i + step) % 5 == 3 ? kNotCounted : id();
  }
  return batch;
}

// ---- one process ----

class Alone {
 public:
  explicit Alone(const Training& t) : t_(t), model_(tiny(false)), options_(optimizer_of(t)) {
    std::vector<torch::Tensor> dense;
    for (std::size_t p = 0; p < model_->parameters().size(); ++p) {
      const torch::Tensor& tensor = model_->parameters()[p].tensor;
      if (!model_->shape().parameters[p].table) dense.push_back(tensor);
      first_.push_back(torch::zeros_like(tensor));
      second_.push_back(torch::zeros_like(tensor));
    }
    if (t.optimizer == "sgd")
      dense_ = std::make_unique<torch::optim::SGD>(dense, torch::optim::SGDOptions(options_.lr));
    else if (t.optimizer == "adagrad")
      dense_ = std::make_unique<torch::optim::Adagrad>(dense, torch::optim::AdagradOptions(options_.lr));
    else if (t.optimizer == "adam")
      dense_ = std::make_unique<torch::optim::Adam>(dense, torch::optim::AdamOptions(options_.lr));
    else
      dense_ = std::make_unique<torch::optim::AdamW>(
          dense, torch::optim::AdamWOptions(options_.lr).weight_decay(options_.weight_decay));
  }

  Trained train() {
    Trained out;
    for (int step = 0; step < t_.steps; ++step) out.losses.push_back(one_step(step));
    for (const Parameter& p : model_->parameters()) out.parameters.push_back(p.tensor.detach().clone());
    return out;
  }

 private:
  double one_step(int step) {
    for (const Parameter& p : model_->parameters()) torch::Tensor(p.tensor).mutable_grad() = torch::Tensor();
    const Batch batch = batch_of(t_, step);
    const StepContext context{.seed = kSeed, .step = step};
    const torch::Tensor loss = model_->loss(batch, context) / counted(batch);
    loss.backward();
    if (t_.clip_norm > 0) {
      std::vector<torch::Tensor> all;
      for (const Parameter& p : model_->parameters()) all.push_back(p.tensor);
      torch::nn::utils::clip_grad_norm_(all, t_.clip_norm);
    }
    const double lr = lr_of(t_.lr_one_late ? std::max(0, step - 1) : step);
    for (auto& group : dense_->param_groups()) group.options().set_lr(lr);
    dense_->step();
    for (const TableIds& lookup : model_->lookups(batch, context))
      update_rows(static_cast<std::size_t>(lookup.parameter), lookup.ids, step + 1, lr);
    return loss.item<double>();
  }

  // Row after row: torch's SparseAdam (eps beside the root that is not corrected), its Adagrad and SGD.
  void update_rows(std::size_t p, const torch::Tensor& ids, int step, double lr) {
    const torch::NoGradGuard no_grad;
    torch::Tensor values = model_->parameters()[p].tensor;
    const torch::Tensor gradient = values.grad();
    torch::Tensor rows = t_.one_row_twice ? ids : std::get<0>(at::_unique(ids));
    if (t_.rows_count_all) rows = torch::arange(values.size(0), torch::kInt64);
    for (std::int64_t i = 0; i < rows.size(0); ++i) {
      const auto row = rows[i].item<std::int64_t>();
      torch::Tensor w = values[row], m = first_[p][row], v = second_[p][row];
      const torch::Tensor g = gradient[row];
      if (t_.optimizer == "sgd") {
        w -= lr * g;
      } else if (t_.optimizer == "adagrad") {
        m += g * g;
        w -= lr * g / (m.sqrt() + options_.eps);
      } else {
        if (t_.optimizer == "adamw") w *= 1 - lr * options_.weight_decay;
        m += (1 - options_.beta1) * (g - m);
        v += (1 - options_.beta2) * (g * g - v);
        const double size =
            lr * std::sqrt(1 - std::pow(options_.beta2, step)) / (1 - std::pow(options_.beta1, step));
        w -= size * m / (v.sqrt() + options_.eps);
      }
    }
  }

  Training t_;
  std::unique_ptr<Model> model_;
  OptimizerOptions options_;
  std::unique_ptr<torch::optim::Optimizer> dense_;
  std::vector<torch::Tensor> first_, second_;  // of each parameter
};

// ---- several ranks ----

ReplicaOptions replica_options_of(const Training& t) {
  ReplicaOptions out;
  out.optimizer = optimizer_of(t);
  out.tables = t.tables;
  out.clip_norm = t.clip_norm;
  out.lookahead = t.lookahead;
  out.parallel.scheme.name = t.scheme;
  out.parallel.scheme.density = t.density;
  out.parallel.scheme.buckets = {.bucket_bytes = 512, .dense_below = 0, .stay_dense = {}};
  return out;
}

Batch share_of(const Training& t, std::int64_t step, World& world) {
  const Blocks shares(world.size(), t.sequences);
  return part_of(batch_of(t, step), shares.begin(world.rank()), shares.begin(world.rank() + 1));
}

void train_steps(World& world, Replica& replica, const Training& t, int from, int to, Trained& out) {
  const auto take = [&](const std::optional<double>& loss) {
    if (loss) out.losses.push_back(*loss);
  };
  for (int step = from; step < to; ++step) {
    const Batch next = share_of(t, step + 1, world);
    replica.set_lr(lr_of(step));
    const std::vector<Batch> micro = micro_batches_of(share_of(t, step, world), t.micro_batches);
    take(replica.step(micro, {.seed = kSeed, .step = step}, step + 1 < to ? &next : nullptr).last_loss);
  }
  take(replica.settle().last_loss);
}

Trained train_on(World& world, const Training& t, bool elsewhere) {
  at::set_num_threads(1);
  world.plan_by({});
  const std::unique_ptr<Model> model = tiny(elsewhere, t.type);
  Replica replica(world.engine(), world.comm(), *model, replica_options_of(t));
  Trained out;
  train_steps(world, replica, t, 0, t.steps, out);
  out.parameters = replica.values();
  return out;
}

Trained together(const Training& t, int ranks, bool elsewhere = true) {
  std::vector<Trained> all(static_cast<std::size_t>(ranks));
  run_ranks(ranks, [&](World& world) {
    all[static_cast<std::size_t>(world.rank())] = train_on(world, t, elsewhere);
  });
  for (const Trained& other : all) expect_same_bits(other, all[0], "ranks");
  return all[0];
}

// Of parameters and of losses.
double difference(const Trained& a, const Trained& b) {
  return std::max(torch_test::distance(a, b), torch_test::loss_distance(a, b));
}

constexpr double kSame = 1e-12;  // issue and papers: relative, after 20 steps in float64

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
      const std::unique_ptr<Model> model = tiny(true);
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
    const std::unique_ptr<Model> model = tiny(false);
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

// Ranks without a sequence, and a step without any.
TEST(Tables, RanksWithoutTokens) {
  Training t{.sequences = 2};
  EXPECT_LT(difference(together(t, 4), Alone(t).train()), kSame);
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
  EXPECT_LT(torch_test::distance(all, together(t, 3)), bound);
  EXPECT_GT(torch_test::distance(all, sparse), 10 * bound);  // control: entries were left behind
}

// What one step averages of each dense parameter, and what the ranks keep of it, over their number.
struct Mass {
  std::map<std::string, torch::Tensor> out, kept;
};
Mass mass_of(const Training& t, int ranks) {
  Mass mass;
  std::mutex mutex;
  run_ranks(ranks, [&](World& world) {
    const std::unique_ptr<Model> model = tiny(true, t.type);
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
      const std::unique_ptr<Model> model = tiny(true);
      Replica replica(world.engine(), world.comm(), *model, replica_options_of(t));
      Trained mine;
      train_steps(world, replica, t, 0, half, mine);
      snapshots[static_cast<std::size_t>(world.rank())] = replica.registry().save(world.rank(), world.size());
      if (world.rank() == 0) begun = mine;
    });
    for (const int ranks : {1, 2, 4}) {
      run_ranks(ranks, [&](World& world) {
        const std::unique_ptr<Model> model = tiny(true);
        Replica replica(world.engine(), world.comm(), *model, replica_options_of(t));
        LoadOptions load;
        if (forget) load.owners = {"model"};
        replica.registry().load(snapshots, world.rank(), world.size(), load);
        Trained out = begun;
        train_steps(world, replica, t, half, t.steps, out);
        out.parameters = replica.values();
        if (forget)
          EXPECT_GT(torch_test::distance(out, reference), 1e-6);  // control
        else
          EXPECT_LT(torch_test::distance(out, reference), kSame) << ranks << " ranks";
      });
    }
  }
}

TEST(Tables, ARankHoldsItsColumns) {
  run_ranks(4, [&](World& world) {
    const std::unique_ptr<Model> model = tiny(false);
    const std::int64_t before = model->parameters().front().tensor.numel();
    Replica replica(world.engine(), world.comm(), *model, replica_options_of({}));
    EXPECT_EQ(model->parameters().front().tensor.numel(), 0);
    const std::int64_t held = replica.job().hybrids().front()->table(0).values().count;
    EXPECT_EQ(held, 97 * (world.rank() < 3 ? 2 : 1));
    std::vector<double> sum{static_cast<double>(held)};
    world.all_reduce(Dense(std::span(sum)));
    EXPECT_EQ(sum[0], static_cast<double>(before));
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
      const std::unique_ptr<Model> model = tiny(true);
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
