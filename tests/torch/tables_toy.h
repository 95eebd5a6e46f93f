// A model with tables that are held by columns or rows on several ranks, and one process that trains the same on
// the whole batch: a model with its own tables, torch's optimizers for what is dense, and the rules of rows
// written out here. Float64.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "data/batches.h"
#include "patterns/blocks.h"
#include "torch/torch_alone.h"
#include "weft/random.h"
#include "weft/world.h"
#include "weft_torch/train/replica.h"
#include "workload/model_shapes.h"

namespace weft::torch_test {

inline constexpr std::int64_t kSequences = 7;  // no multiple of the ranks: shares are uneven
inline constexpr std::int64_t kLength = 9;
inline constexpr std::uint64_t kSeed = 5;

struct Training {
  std::string model = "lm";
  std::string optimizer = "adam";
  TablesOptions tables{.way = "embrace"};
  std::string scheme = "dense";
  double density = 0.2;
  int steps = 20;
  int micro_batches = 1;
  double clip_norm = 0;
  double eps = 0;  // of the optimizer; 0: its own
  bool lookahead = true;
  std::int64_t sequences = kSequences;
  std::int64_t empty_step = -1;      // which nobody has a sequence in
  std::int64_t uncounted_step = -1;  // in which nothing is to be predicted
  torch::ScalarType type = torch::kFloat64;
  // Controls: how one process could be wrong.
  bool rows_count_all = false;  // every row of a table is updated, as by a dense optimizer
  bool lr_one_late = false;
  bool one_row_twice = false;  // the rule sees a row once for each token
};

inline double lr_of(std::int64_t step) { return 0.02 / (1.0 + 0.2 * static_cast<double>(step)); }

inline OptimizerOptions optimizer_of(const Training& t) {
  OptimizerOptions o = default_options(t.optimizer);
  o.lr = lr_of(0);
  if (t.optimizer == "adamw") o.weight_decay = 0.1;
  if (t.eps > 0) o.eps = t.eps;
  return o;
}

inline constexpr std::int64_t kWords = 97;

inline std::unique_ptr<Model> tiny(const Training& t, bool elsewhere) {
  ModelOptions o = model_options(t.model, "tiny");
  o.vocabulary = kWords;
  if (t.model == "lm") {
    o.width = 7;  // some ranks have a column less
    o.hidden = 12;
    o.projection = 5;
    o.layers = 1;
    o.samples = 11;
  }
  o.untied = t.model == "gpt";  // else it has no table
  o.dropout = 0.2;
  o.tables_elsewhere = elsewhere;
  std::unique_ptr<Model> model = make_model(t.model, o);
  model->to(t.type);
  return model;
}

inline Batch batch_of(const Training& t, std::int64_t step) {
  Random random(11, 1, static_cast<std::uint32_t>(step));
  const auto small = [&](std::int64_t bound) {  // small ones more often
    const double u = random.uniform();
    return static_cast<std::int64_t>(u * u * static_cast<double>(bound));
  };
  const std::int64_t n = step == t.empty_step ? 0 : t.sequences;
  const BatchKind kind = batch_kind_of(t.model);
  const bool spans = kind == BatchKind::spans;
  Batch batch{.tokens = torch::empty({n, kLength}, torch::kInt64),
              .targets = torch::empty({n, spans ? 2 : kLength}, torch::kInt64)};
  for (std::int64_t i = 0; i < batch.tokens.numel(); ++i) {
    batch.tokens.data_ptr<std::int64_t>()[i] = small(kWords);
    if (i >= batch.targets.numel()) continue;
    const std::int64_t target = small(spans ? kLength : kWords);
    batch.targets.data_ptr<std::int64_t>()[i] = (i + step) % 5 == 3 ? kNotCounted : target;
  }
  if (step == t.uncounted_step) batch.targets.fill_(kNotCounted);
  if (kind != BatchKind::pairs) return batch;
  batch.source = torch::empty({n, kLength + 3}, torch::kInt64);  // nobody takes one for the other
  for (std::int64_t i = 0; i < batch.source.numel(); ++i)
    batch.source.data_ptr<std::int64_t>()[i] = small(kWords);
  return batch;
}

// ---- one process ----

class Alone {
 public:
  explicit Alone(const Training& t) : t_(t), model_(tiny(t, false)), options_(optimizer_of(t)) {
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
      dense_ = std::make_unique<torch::optim::Adagrad>(
          dense, torch::optim::AdagradOptions(options_.lr).eps(options_.eps));
    else if (t.optimizer == "adam")
      dense_ = std::make_unique<torch::optim::Adam>(dense,
                                                    torch::optim::AdamOptions(options_.lr).eps(options_.eps));
    else
      dense_ = std::make_unique<torch::optim::AdamW>(
          dense,
          torch::optim::AdamWOptions(options_.lr).eps(options_.eps).weight_decay(options_.weight_decay));
  }

  Trained train() {
    Trained out;
    for (int step = 0; step < t_.steps; ++step) {
      const double loss = one_step(step);
      if (step != t_.empty_step && step != t_.uncounted_step) out.losses.push_back(loss);
    }
    for (const Parameter& p : model_->parameters()) out.parameters.push_back(p.tensor.detach().clone());
    return out;
  }

 private:
  double one_step(int step) {
    for (const Parameter& p : model_->parameters()) torch::Tensor(p.tensor).mutable_grad() = torch::Tensor();
    const Batch batch = batch_of(t_, step);
    const StepContext context{.seed = kSeed, .step = step};
    const torch::Tensor loss = model_->loss(batch, context) / std::max<std::int64_t>(1, counted(batch));
    loss.backward();
    if (t_.clip_norm > 0) {
      std::vector<torch::Tensor> all;
      for (const Parameter& p : model_->parameters()) all.push_back(p.tensor);
      torch::nn::utils::clip_grad_norm_(all, t_.clip_norm);
    }
    const double lr = lr_of(t_.lr_one_late ? std::max(0, step - 1) : step);
    for (auto& group : dense_->param_groups()) group.options().set_lr(lr);
    dense_->step();
    if (sequences(batch) == 0) return 0;  // no row was read
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

inline ReplicaOptions replica_options_of(const Training& t) {
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

inline Batch share_of(const Training& t, std::int64_t step, World& world) {
  const Blocks shares(world.size(), t.sequences);
  return part_of(batch_of(t, step), shares.begin(world.rank()), shares.begin(world.rank() + 1));
}

inline void train_steps(World& world, Replica& replica, const Training& t, int from, int to, Trained& out) {
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

inline Trained train_on(World& world, const Training& t, bool elsewhere) {
  at::set_num_threads(1);
  world.plan_by({});
  const std::unique_ptr<Model> model = tiny(t, elsewhere);
  Replica replica(world.engine(), world.comm(), *model, replica_options_of(t));
  Trained out;
  train_steps(world, replica, t, 0, t.steps, out);
  out.parameters = replica.values();
  return out;
}

inline Trained together(const Training& t, int ranks, bool elsewhere = true) {
  std::vector<Trained> all(static_cast<std::size_t>(ranks));
  run_ranks(ranks, [&](World& world) {
    all[static_cast<std::size_t>(world.rank())] = train_on(world, t, elsewhere);
  });
  for (const Trained& other : all) expect_same_bits(other, all[0], "ranks");
  return all[0];
}

// Of parameters and of losses.
inline double difference(const Trained& a, const Trained& b) {
  return std::max(distance(a, b), loss_distance(a, b));
}

inline constexpr double kSame = 1e-12;  // issue and papers: relative, after 20 steps in float64

}  // namespace weft::torch_test
