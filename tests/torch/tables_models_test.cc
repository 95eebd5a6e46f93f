// Tables that are held elsewhere, in models with other batches than of tokens; and the gradient that a table
// gets against differences of the loss.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>
#include <cmath>

#include "embedding/hybrid.h"
#include "torch/tables_toy.h"
#include "workload/job_strategies.h"

namespace weft {
namespace {

using namespace torch_test;

// Of parameters and of losses; of a parameter, relative to its norm, or to a thousandth of the largest one: a bias
// in front of a softmax over places, of bert's last norm, is rounding alone.
double distance_of(const Trained& a, const Trained& b) {
  double largest = 0, worst = loss_distance(a, b);
  for (const torch::Tensor& p : b.parameters) largest = std::max(largest, p.norm().item<double>());
  EXPECT_EQ(a.parameters.size(), b.parameters.size());
  for (std::size_t i = 0; i < a.parameters.size(); ++i) {
    const double norm = std::max(b.parameters[i].norm().item<double>(), 1e-3 * largest);
    worst = std::max(worst, (a.parameters[i] - b.parameters[i]).norm().item<double>() / norm);
  }
  return worst;
}

// Pairs and spans: two tables of which one is read in the middle of the forward, one that is read first. With
// an eps as large as that Adam's rule does not blow up gradients that are rounding alone (of what a softmax
// takes no notice of: biases of keys, of the last norm in front of one over places).
TEST(TablesOfModels, EqualOneProcess) {
  for (const char* model : {"gnmt", "transformer", "bert", "gpt"}) {
    Training t{.model = model, .steps = 8, .eps = 1e-3, .uncounted_step = 5};
    const Trained reference = Alone(t).train();
    for (const char* way : {"embrace", "hashed"}) {
      t.tables.way = way;
      EXPECT_LT(distance_of(together(t, 3), reference), kSame) << model << ", " << way;
    }
    Training wrong = t;
    wrong.rows_count_all = true;  // control
    EXPECT_GT(distance_of(Alone(wrong).train(), reference), 1e-6) << model;
  }
}

// ---- gradients ----

constexpr int kRanks = 3;

struct Element {
  int table = 0;
  std::int64_t row = 0, column = 0;
};

struct OneStep {
  double loss = 0;
  std::array<torch::Tensor, 2> before, after;  // of both tables
};

// One step of sgd with a rate of one from the first values, of which one was changed before.
OneStep one_step(const Training& t, const Element& e = {}, double change = 0) {
  OneStep out;
  run_ranks(kRanks, [&](World& world) {
    at::set_num_threads(1);
    world.plan_by({});
    const std::unique_ptr<Model> model = tiny(t, true);
    Replica replica(world.engine(), world.comm(), *model, replica_options_of(t));
    HybridEmbedding& tables = *replica.job().hybrids().front();
    HybridTable& table = tables.table(e.table);
    const BlockRange mine = table.columns(world.rank());
    if (e.column >= mine.first && e.column < mine.first + mine.count)
      reinterpret_cast<double*>(table.values().data)[e.row * mine.count + e.column - mine.first] += change;
    const auto values = [&](std::array<torch::Tensor, 2>& into) {
      std::size_t at = 0;
      const std::vector<torch::Tensor> all = replica.values();
      for (std::size_t p = 0; p < all.size(); ++p)
        if (model->shape().parameters[p].table && world.rank() == 0) into[at++] = all[p];
    };
    values(out.before);
    replica.set_lr(1);
    const Batch batch = share_of(t, 0, world);
    replica.step(std::span(&batch, 1), {.seed = kSeed, .step = 0});
    const double loss = replica.settle().last_loss.value();
    values(out.after);
    if (world.rank() == 0) out.loss = loss;
  });
  return out;
}

// What the owners of a row get of it is the derivative of the mean loss over all tokens of all ranks: lookup,
// exchange, sum over tokens and ranks, and one division.
TEST(TablesOfModels, GradientsAreDifferencesOfTheLoss) {
  const Training t{.optimizer = "sgd", .lookahead = false};
  const OneStep right = one_step(t);
  const Batch batch = batch_of(t, 0);
  const StepContext context{.seed = kSeed, .step = 0};
  const std::vector<TableIds> lookups = tiny(t, true)->lookups(batch, context);
  ASSERT_EQ(lookups.size(), 2U);
  // A central difference of h is off by h^2 / 6 of the third derivative, and by 2^-52 of the loss (4.6) over h.
  const double h = 1e-5, close = 1e-9;
  for (int table = 0; table < 2; ++table) {
    const auto at = static_cast<std::size_t>(table);
    const torch::Tensor gradient = right.before[at] - right.after[at];
    const torch::Tensor ids = std::get<0>(at::_unique(lookups[at].ids));
    const std::int64_t columns = gradient.size(1);
    // The first row is the most frequent one; columns are of different ranks.
    for (const std::int64_t i : {std::int64_t{0}, ids.size(0) / 2, ids.size(0) - 1}) {
      const Element e{table, ids[i].item<std::int64_t>(), (2 * i + 1) % columns};
      const double difference = (one_step(t, e, h).loss - one_step(t, e, -h).loss) / (2 * h);
      const double got = gradient[e.row][e.column].item<double>();
      EXPECT_NEAR(got, difference, close) << table << ", row " << e.row << ", column " << e.column;
      EXPECT_GT(std::abs(got), 1000 * close);  // control: any factor would be seen
    }
    // What was not read has none.
    std::int64_t unread = 0;
    while ((ids == unread).any().item<bool>()) ++unread;
    ASSERT_LT(unread, gradient.size(0));
    EXPECT_EQ(gradient[unread].abs().max().item<double>(), 0);
    EXPECT_EQ(one_step(t, {table, unread, 0}, 0.1).loss, right.loss);
  }
}

}  // namespace
}  // namespace weft
