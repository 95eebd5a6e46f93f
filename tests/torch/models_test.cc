// Models: a batch that is cut between ranks computes what the whole batch does.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <map>
#include <set>
#include <thread>

#include "torch/model_cases.h"
#include "weft/error.h"
#include "weft_torch/models/model.h"
#include "weft_torch/train/cut_model.h"

namespace weft {
namespace {

class Models : public ::testing::TestWithParam<Case> {};

// Sums of at most 300 terms in float64: an error of 300 * 1.1e-16 at worst for each, far below 1e-12.
TEST_P(Models, PartsOfABatchSumToTheWhole) {
  const std::unique_ptr<Model> model = tiny_model(GetParam());
  const Batch batch = random_batch(model->options(), 7, 19, kind_of(GetParam()));
  const StepContext context{.seed = 5, .step = 3};
  Computed whole;
  add_to(whole, *model, batch, context);
  for (const std::vector<std::int64_t>& cuts :
       {std::vector<std::int64_t>{0, 4, 7}, {0, 2, 4, 6, 7}, {0, 0, 1, 7}}) {
    Computed parts;
    std::int64_t tokens = 0;
    for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
      add_to(parts, *model, part_of(batch, cuts[i], cuts[i + 1]), context);
      tokens += counted(part_of(batch, cuts[i], cuts[i + 1]));
    }
    EXPECT_EQ(tokens, counted(batch));
    EXPECT_LT(distance(whole, parts), 1e-12);
  }
  // Controls: a part that does not know its place, and another step, draw other masks.
  Computed lost;
  add_to(lost, *model, part_of(batch, 0, 4), context);
  Batch second = part_of(batch, 4, 7);
  second.first_sequence = 0;
  add_to(lost, *model, second, context);
  EXPECT_GT(distance(whole, lost), 1e-3);
  Computed later;
  add_to(later, *model, batch, {.seed = 5, .step = 4});
  EXPECT_GT(distance(whole, later), 1e-3);
}

TEST_P(Models, SameBitsAgain) {
  const std::unique_ptr<Model> a = tiny_model(GetParam(), torch::kFloat32);
  const std::unique_ptr<Model> b = tiny_model(GetParam(), torch::kFloat32);
  const Batch batch = random_batch(a->options(), 3, 32, kind_of(GetParam()));
  EXPECT_EQ(a->loss(batch, {.step = 2}).item<float>(), b->loss(batch, {.step = 2}).item<float>());
  EXPECT_NE(a->loss(batch, {.step = 2}).item<float>(), b->loss(batch, {.step = 3}).item<float>());
  EXPECT_EQ(a->loss(batch, {.step = 2, .training = false}).item<float>(),
            b->loss(batch, {.step = 3, .training = false}).item<float>());
}

TEST_P(Models, BuiltInFourThreadsAtOnceEqualOneBuiltAlone) {
  const std::unique_ptr<Model> alone = tiny_model(GetParam(), torch::kFloat32);
  std::vector<std::unique_ptr<Model>> models(4);
  std::vector<std::thread> threads;
  for (auto& model : models) {
    threads.emplace_back([&model] { model = tiny_model(GetParam(), torch::kFloat32); });
  }
  for (std::thread& t : threads) t.join();
  const std::vector<Parameter> expected = alone->parameters();
  for (const auto& model : models) {
    const std::vector<Parameter> got = model->parameters();
    ASSERT_EQ(got.size(), expected.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(got[i].name, expected[i].name);
      EXPECT_TRUE(torch::equal(got[i].tensor, expected[i].tensor)) << got[i].name;
    }
  }
  ModelOptions other = tiny(GetParam());
  other.seed = 2;
  EXPECT_FALSE(torch::equal(make_model(GetParam().model, other)->parameters()[0].tensor, expected[0].tensor));
}

TEST_P(Models, ShapeOwnsEachParameterOnce) {
  const std::unique_ptr<Model> model = tiny_model(GetParam());
  std::set<std::string> names;
  std::set<void*> tensors;
  ASSERT_EQ(model->parameters().size(), model->shape().parameters.size());
  int block = 0;
  for (std::size_t i = 0; i < model->parameters().size(); ++i) {
    const Parameter& p = model->parameters()[i];
    EXPECT_EQ(p.name, model->shape().parameters[i].name);
    EXPECT_EQ(p.tensor.numel(), model->shape().parameters[i].count());
    EXPECT_TRUE(names.insert(p.name).second) << p.name;
    EXPECT_TRUE(tensors.insert(p.tensor.unsafeGetTensorImpl()).second) << p.name;
    EXPECT_TRUE(p.tensor.is_leaf() && p.tensor.requires_grad());
    EXPECT_EQ(p.tensor.scalar_type(), torch::kFloat64);
    EXPECT_GE(model->shape().block_of(static_cast<int>(i)), block);  // in order of use
    block = model->shape().block_of(static_cast<int>(i));
  }
}

// Part by part with cut graphs against one graph: the same loss, and gradients that differ by the rounding of
// sums that are added in another order (a tied table's two uses).
TEST_P(Models, PartByPartEqualsOneGraph) {
  const std::unique_ptr<Model> model = tiny_model(GetParam());
  const Batch whole = random_batch(model->options(), 5, 16, kind_of(GetParam()));
  const StepContext context{.seed = 5, .step = 3};
  Computed expected;
  add_to(expected, *model, whole, context);
  const auto by_parts = [&](const std::vector<Batch>& batches, bool drop_one) {
    for (const Parameter& p : model->parameters()) torch::Tensor(p.tensor).mutable_grad() = torch::Tensor();
    CutModel parts(*model);
    parts.begin(batches, context);
    std::vector<Piece> order = whole_batch(model->shape().parts(), static_cast<int>(batches.size()));
    if (drop_one) order.pop_back();  // the first part's last backward
    for (const Piece& piece : order)
      piece.work == Work::forward ? parts.forward(piece) : parts.backward(piece, 1);
    Computed out;
    out.loss = parts.loss_sum();
    for (const Parameter& p : model->parameters())
      out.gradients.push_back(p.tensor.grad().defined() ? p.tensor.grad().to_dense().clone()
                                                        : torch::zeros_like(p.tensor));
    return out;
  };
  EXPECT_LT(distance(expected, by_parts({whole}, false)), 1e-12);
  const std::vector<Batch> three{part_of(whole, 0, 2), part_of(whole, 2, 2), part_of(whole, 2, 5)};
  EXPECT_LT(distance(expected, by_parts(three, false)), 1e-12);
  EXPECT_GT(distance(expected, by_parts({whole}, true)), 1e-3);  // control
}

// A few plain steps on one batch: what is learnt is the batch.
TEST_P(Models, Learns) {
  const std::unique_ptr<Model> model = tiny_model(GetParam(), torch::kFloat32);
  const Batch batch = random_batch(model->options(), 4, 16, kind_of(GetParam()));
  const auto mean = [&] {
    const torch::NoGradGuard guard;
    return model->loss(batch, {.training = false}).item<double>() / static_cast<double>(counted(batch));
  };
  const double before = mean();
  EXPECT_NEAR(before, std::log(kind_of(GetParam()) == BatchKind::spans ? 16.0 : 256.0),
              0.3);  // nothing is known yet
  std::vector<torch::Tensor> tensors;
  for (const Parameter& p : model->parameters()) tensors.push_back(p.tensor);
  for (int step = 0; step < 60; ++step) {
    for (torch::Tensor& t : tensors) t.mutable_grad() = torch::Tensor();
    (model->loss(batch, {.step = step}) / counted(batch)).backward();
    const torch::NoGradGuard guard;
    for (torch::Tensor& t : tensors) t.add_(t.grad().to_dense(), -0.5);
  }
  EXPECT_LT(mean(), 0.9 * before);
}

// Rows from somebody who holds the tables, and who knows what was said.
class Holder final : public TableHolder {
 public:
  Holder(const Model& model, const std::vector<TableIds>& said) {
    for (const TableIds& of : said) {
      const auto place = static_cast<std::size_t>(of.parameter);
      const ParameterShape& shape = model.shape().parameters[place];
      torch::Tensor table = torch::empty(shape.dims, torch::kFloat32);
      model.parameters()[place].initial(0,
                                        {table.data_ptr<float>(), static_cast<std::size_t>(table.numel())});
      tables_[of.parameter] = table.to(torch::kFloat64).set_requires_grad(true);
      said_[of.parameter] = ids_of(of.ids);
    }
  }
  torch::Tensor rows(int parameter, const torch::Tensor& ids) const override {
    if (!tables_.contains(parameter)) return {};
    for (const std::int64_t id : ids_of(ids)) {
      if (!said_.at(parameter).contains(id)) throw UsageError("id " + std::to_string(id) + " was not said");
      used_[parameter].insert(id);
    }
    return torch::embedding(tables_.at(parameter), ids);
  }
  const std::map<int, torch::Tensor>& tables() const { return tables_; }
  const std::map<int, std::set<std::int64_t>>& said() const { return said_; }
  const std::map<int, std::set<std::int64_t>>& used() const { return used_; }

 private:
  static std::set<std::int64_t> ids_of(const torch::Tensor& ids) {
    const torch::Tensor flat = ids.contiguous();
    const auto* const first = flat.data_ptr<std::int64_t>();
    return {first, first + flat.numel()};
  }
  std::map<int, torch::Tensor> tables_;
  std::map<int, std::set<std::int64_t>> said_;
  mutable std::map<int, std::set<std::int64_t>> used_;
};

TEST_P(Models, LooksUpWhatItSaysAndNothingElse) {
  const std::unique_ptr<Model> whole = tiny_model(GetParam());
  ModelOptions options = tiny(GetParam());
  options.tables_elsewhere = true;
  const std::unique_ptr<Model> model = make_model(GetParam().model, options);
  model->to(torch::kFloat64);
  const Batch batch = random_batch(options, 5, 16, kind_of(GetParam()));
  StepContext context{.seed = 5, .step = 3};
  Computed expected;
  add_to(expected, *whole, batch, context);

  std::vector<TableIds> said = model->lookups(batch, context);
  const auto tables = std::ranges::count_if(model->shape().parameters, &ParameterShape::table);
  ASSERT_EQ(std::ssize(said), tables);
  const Holder holder(*model, said);
  context.tables = &holder;
  const torch::Tensor loss = model->loss(batch, context);
  loss.backward();
  EXPECT_EQ(loss.item<double>(), expected.loss);
  EXPECT_EQ(holder.used(), holder.said());
  for (std::size_t i = 0; i < model->parameters().size(); ++i) {
    const auto held = holder.tables().find(static_cast<int>(i));
    const bool elsewhere = held != holder.tables().end();
    const Parameter& p = model->parameters()[i];
    EXPECT_EQ(elsewhere, model->shape().parameters[i].table) << p.name;
    EXPECT_EQ(p.tensor.size(0) == 0, elsewhere) << p.name;
    const torch::Tensor gradient = elsewhere ? held->second.grad() : p.tensor.grad();
    ASSERT_TRUE(gradient.defined()) << p.name;
    const double scale = expected.gradients[i].abs().max().item<double>();
    EXPECT_LE((gradient - expected.gradients[i]).abs().max().item<double>(), 1e-13 * scale) << p.name;
  }
  // Controls: an id that is not said for one of the tables, and another step's samples.
  for (TableIds& of : said) {
    const torch::Tensor all = of.ids;
    of.ids = all.masked_select(all.ne(all[0]));
    const Holder forgets(*model, said);
    context.tables = &forgets;
    EXPECT_THROW(model->loss(batch, context), UsageError);
    of.ids = all;
  }
}

// The gradient against differences of the loss: central ones, whose error is of the order of h^2 = 1e-10,
// and whose rounding that of a loss below 500, 1e-13, over h. A gradient that is 1 % off is found.
TEST_P(Models, GradientsAreThoseOfTheLoss) {
  const std::unique_ptr<Model> model = tiny_model(GetParam());
  const Batch batch = random_batch(model->options(), 2, 12, kind_of(GetParam()));
  const StepContext context{.seed = 5, .step = 3};
  Computed computed;
  add_to(computed, *model, batch, context);
  constexpr double kStep = 1e-5;
  const torch::NoGradGuard guard;
  for (std::size_t i = 0; i < computed.gradients.size(); ++i) {
    const torch::Tensor gradient = computed.gradients[i].flatten();
    torch::Tensor values = model->parameters()[i].tensor.detach().view({-1});
    for (const std::int64_t at : {gradient.abs().argmax().item<std::int64_t>(), gradient.numel() / 3}) {
      double* const element = values.data_ptr<double>() + at;
      const double before = *element;
      const auto loss_at = [&](double value) {
        *element = value;
        return model->loss(batch, context).item<double>();
      };
      const double up = loss_at(before + kStep), down = loss_at(before - kStep);
      *element = before;
      const double measured = (up - down) / (2 * kStep), exact = gradient[at].item<double>();
      const double tolerance = 1e-6 + 1e-5 * std::abs(exact);
      EXPECT_NEAR(measured, exact, tolerance) << model->parameters()[i].name << " " << at;
      if (std::abs(exact) < 1e-3) continue;
      EXPECT_GT(std::abs(measured - 1.01 * exact), tolerance);
    }
  }
}

// What is predicted up to a place does not depend on tokens behind it, and depends on all others.
TEST_P(Models, SeesNoFuture) {
  const BatchKind kind = kind_of(GetParam());
  const std::unique_ptr<Model> model = tiny_model(GetParam());
  Batch batch = random_batch(model->options(), 3, 16, kind);
  const torch::NoGradGuard guard;
  const auto loss = [&](const Batch& of) { return model->loss(of, {.training = false}).item<double>(); };
  const auto changed = [&](torch::Tensor Batch::* which, std::int64_t place) {
    Batch other = batch;
    other.*which = (batch.*which).clone();
    (other.*which).select(1, place).add_(1).remainder_(model->options().vocabulary);
    return std::abs(loss(other) - loss(batch));
  };
  if (kind == BatchKind::spans) {
    for (const std::int64_t place : {0, 9, 15}) EXPECT_GT(changed(&Batch::tokens, place), 1e-7) << place;
    return;
  }
  batch.targets.slice(1, 10).fill_(kNotCounted);
  for (const std::int64_t place : {10, 15}) EXPECT_LT(changed(&Batch::tokens, place), 1e-10) << place;
  for (const std::int64_t place : {0, 9}) EXPECT_GT(changed(&Batch::tokens, place), 1e-7) << place;
  if (kind != BatchKind::pairs) return;
  for (const std::int64_t place : {0, 9, 18}) EXPECT_GT(changed(&Batch::source, place), 1e-7) << place;
}

INSTANTIATE_TEST_SUITE_P(All, Models,
                         ::testing::Values(Case{"gpt"}, Case{"gpt", 0, false, true}, Case{"lm"},
                                           Case{"lm", 40}, Case{"lm", 40, true}, Case{"gnmt"},
                                           Case{"gnmt", 0, true}, Case{"transformer"}, Case{"bert"},
                                           Case{"bert", 0, true}),
                         [](const auto& test) {
                           return std::string(test.param.model) + (test.param.samples > 0 ? "Sampled" : "") +
                                  (test.param.sparse ? "Sparse" : "") + (test.param.untied ? "Untied" : "");
                         });

}  // namespace
}  // namespace weft
