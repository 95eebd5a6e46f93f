// Models: a batch that is cut between ranks computes what the whole batch does.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <set>
#include <thread>

#include "data/batches.h"
#include "data/zipf.h"
#include "weft/error.h"
#include "weft/random.h"
#include "weft_torch/models/model.h"
#include "weft_torch/models/ops.h"
#include "weft_torch/train/cut_model.h"

namespace weft {
namespace {

struct Case {
  const char* model;
  std::int64_t samples = 0;
  bool sparse = false;
};

ModelOptions tiny(const Case& c) {
  ModelOptions o = model_options(c.model, "tiny");
  o.samples = c.samples;
  o.sparse_gradients = c.sparse;
  o.dropout = 0.2;
  return o;
}

std::unique_ptr<Model> tiny_model(const Case& c, torch::ScalarType type = torch::kFloat64) {
  std::unique_ptr<Model> model = make_model(c.model, tiny(c));
  model->to(type);
  return model;
}

Batch random_batch(const ModelOptions& o, std::int64_t sequences, std::int64_t length) {
  Batch batch{.tokens = torch::empty({sequences, length}, torch::kInt64),
              .targets = torch::empty({sequences, length}, torch::kInt64)};
  Random random(7);
  for (std::int64_t i = 0; i < batch.tokens.numel(); ++i) {
    const auto id = [&] {
      return static_cast<std::int64_t>(random.below(static_cast<std::uint32_t>(o.vocabulary)));
    };
    batch.tokens.data_ptr<std::int64_t>()[i] = id();
    batch.targets.data_ptr<std::int64_t>()[i] = i % 5 == 3 ? kNotCounted : id();
  }
  return batch;
}

Batch part(const Batch& whole, std::int64_t begin, std::int64_t end) {
  return {.tokens = whole.tokens.slice(0, begin, end),
          .targets = whole.targets.slice(0, begin, end),
          .first_sequence = whole.first_sequence + begin};
}

struct Computed {
  double loss = 0;
  std::vector<torch::Tensor> gradients;
};

void add_to(Computed& sum, const Model& model, const Batch& batch, const StepContext& context) {
  const std::vector<Parameter> parameters = model.parameters();
  for (const Parameter& p : parameters) torch::Tensor(p.tensor).mutable_grad() = torch::Tensor();
  const torch::Tensor loss = model.loss(batch, context);
  loss.backward();
  sum.loss += loss.item<double>();
  sum.gradients.resize(parameters.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    torch::Tensor g = parameters[i].tensor.grad();
    ASSERT_TRUE(g.defined()) << parameters[i].name;
    g = g.to_dense().clone();
    sum.gradients[i] = sum.gradients[i].defined() ? sum.gradients[i] + g : g;
  }
}

// Largest difference relative to the largest gradient, of the loss or any gradient.
double distance(const Computed& a, const Computed& b) {
  double worst = std::abs(a.loss - b.loss) / std::abs(a.loss);
  for (std::size_t i = 0; i < a.gradients.size(); ++i) {
    const double scale = a.gradients[i].abs().max().item<double>();
    worst = std::max(worst, (a.gradients[i] - b.gradients[i]).abs().max().item<double>() / (scale + 1e-300));
  }
  return worst;
}

class Models : public ::testing::TestWithParam<Case> {};

// Sums of at most 300 terms in float64: an error of 300 * 1.1e-16 at worst for each, far below 1e-12.
TEST_P(Models, PartsOfABatchSumToTheWhole) {
  const std::unique_ptr<Model> model = tiny_model(GetParam());
  const Batch batch = random_batch(model->options(), 7, 19);
  const StepContext context{.seed = 5, .step = 3};
  Computed whole;
  add_to(whole, *model, batch, context);
  for (const std::vector<std::int64_t>& cuts :
       {std::vector<std::int64_t>{0, 4, 7}, {0, 2, 4, 6, 7}, {0, 0, 1, 7}}) {
    Computed parts;
    std::int64_t tokens = 0;
    for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
      add_to(parts, *model, part(batch, cuts[i], cuts[i + 1]), context);
      tokens += counted(part(batch, cuts[i], cuts[i + 1]));
    }
    EXPECT_EQ(tokens, counted(batch));
    EXPECT_LT(distance(whole, parts), 1e-12);
  }
  // Controls: a part that does not know its place, and another step, draw other masks.
  Computed lost;
  add_to(lost, *model, part(batch, 0, 4), context);
  Batch second = part(batch, 4, 7);
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
  const Batch batch = random_batch(a->options(), 3, 32);
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
  const Batch whole = random_batch(model->options(), 5, 16);
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
  const std::vector<Batch> three{part(whole, 0, 2), part(whole, 2, 2), part(whole, 2, 5)};
  EXPECT_LT(distance(expected, by_parts(three, false)), 1e-12);
  EXPECT_GT(distance(expected, by_parts({whole}, true)), 1e-3);  // control
}

// A few plain steps on one batch: what is learnt is the batch.
TEST_P(Models, Learns) {
  const std::unique_ptr<Model> model = tiny_model(GetParam(), torch::kFloat32);
  const Batch batch = random_batch(model->options(), 4, 16);
  const auto mean = [&] {
    const torch::NoGradGuard guard;
    return model->loss(batch, {.training = false}).item<double>() / static_cast<double>(counted(batch));
  };
  const double before = mean();
  EXPECT_NEAR(before, std::log(256.0), 0.3);  // nothing is known yet
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

INSTANTIATE_TEST_SUITE_P(All, Models,
                         ::testing::Values(Case{"gpt"}, Case{"lm"}, Case{"lm", 40}, Case{"lm", 40, true}),
                         [](const auto& test) {
                           return std::string(test.param.model) + (test.param.samples > 0 ? "Sampled" : "") +
                                  (test.param.sparse ? "Sparse" : "");
                         });

// The gradient of the embedding's weight is that of its use as a table and that of its use as a head:
// compared with a plain model of the same mathematics in which they are two tensors.
TEST(Gpt, TiedGradientIsTheSumOfBothUses) {
  ModelOptions o = model_options("gpt", "tiny");
  o.layers = 1;
  o.dropout = 0;
  const std::unique_ptr<Model> model = make_model("gpt", o);
  model->to(torch::kFloat64);
  const Batch batch = random_batch(o, 3, 10);
  Computed tied;
  add_to(tied, *model, batch, {});

  std::map<std::string, torch::Tensor> p;
  for (const Parameter& q : model->parameters()) p[q.name] = q.tensor.detach();
  const torch::Tensor table = p["embedding.token.weight"].clone().set_requires_grad(true);
  const torch::Tensor head = table.detach().clone().set_requires_grad(true);
  const auto norm = [&](const torch::Tensor& x, const std::string& name) {
    const torch::Tensor centred = x - x.mean(-1, true);
    return centred / (centred.square().mean(-1, true) + 1e-5).sqrt() * p[name + ".weight"] +
           p[name + ".bias"];
  };
  const auto linear = [&](const torch::Tensor& x, const std::string& name) {
    return x.matmul(p[name + ".weight"].t()) + p[name + ".bias"];
  };
  torch::Tensor x = table.index_select(0, batch.tokens.flatten()).view({3, 10, 32}) +
                    p["embedding.position.weight"].slice(0, 0, 10);
  const torch::Tensor qkv = linear(norm(x, "layer.0.attention.norm"), "layer.0.attention.qkv");
  std::vector<torch::Tensor> outs;
  for (int h = 0; h < 2; ++h) {
    const auto piece = [&](int which) { return qkv.slice(2, which * 32 + h * 16, which * 32 + h * 16 + 16); };
    const torch::Tensor mask = torch::ones({10, 10}, torch::kFloat64).triu(1) * -1e30;
    const torch::Tensor scores = piece(0).matmul(piece(1).transpose(1, 2)) / 4 + mask;
    outs.push_back(scores.softmax(-1).matmul(piece(2)));
  }
  x = x + linear(torch::cat(outs, 2), "layer.0.attention.projection");
  const torch::Tensor up = linear(norm(x, "layer.0.mlp.norm"), "layer.0.mlp.up");
  const torch::Tensor gelu = 0.5 * up * (1 + (std::sqrt(2 / M_PI) * (up + 0.044715 * up.pow(3))).tanh());
  x = x + linear(gelu, "layer.0.mlp.down");
  const torch::Tensor chances = norm(x, "head.norm").matmul(head.t()).log_softmax(-1).flatten(0, 1);
  const torch::Tensor targets = batch.targets.flatten(), counts = targets.ne(kNotCounted);
  const torch::Tensor loss =
      -(chances.gather(1, targets.clamp_min(0).unsqueeze(1)).squeeze(1) * counts.to(torch::kFloat64)).sum();
  loss.backward();

  EXPECT_NEAR(tied.loss, loss.item<double>(), 1e-10);
  const torch::Tensor sum = table.grad() + head.grad();
  EXPECT_LT((tied.gradients[0] - sum).abs().max().item<double>(), 1e-12 * sum.abs().max().item<double>());
  EXPECT_GT((tied.gradients[0] - head.grad()).abs().max().item<double>(), 1e-3);  // control
}

// The sum over V = 256 words of about equal weight is estimated by S = 255 draws with a relative variance of
// (sum of 1/q - V^2) / (S V^2) = 0.0070, q being the log-uniform probabilities: its logarithm is off by
// 0.0035, with a deviation of 0.084 a step and 0.019 for the mean of 20. Four deviations of a loss of 5.5 a
// token are 1.5 %.
TEST(Lm, SampledSoftmaxIsNearTheFullOne) {
  ModelOptions o = model_options("lm", "tiny");
  o.dropout = 0;
  const std::unique_ptr<Model> full = make_model("lm", o);
  o.samples = 255;
  const std::unique_ptr<Model> sampled = make_model("lm", o);
  const Batch batch = random_batch(o, 6, 32);
  double mean = 0;
  for (int step = 0; step < 20; ++step) mean += sampled->loss(batch, {.step = step}).item<double>() / 20;
  const double expected = full->loss(batch, {}).item<double>();
  EXPECT_NEAR(mean, expected, 0.015 * expected);
  EXPECT_EQ(sampled->loss(batch, {.training = false}).item<double>(), expected);
}

TEST(DefaultModels, HaveAboutTwentyMillionParameters) {
  const std::int64_t d = 384, vocabulary = 24'000;
  const std::int64_t gpt = vocabulary * d + 128 * d + 6 * (12 * d * d + 13 * d) + 2 * d;
  EXPECT_EQ(make_model("gpt", model_options("gpt"))->shape().num_elements(), gpt);
  EXPECT_NEAR(static_cast<double>(gpt), 20e6, 0.5e6);
  const std::int64_t lm = 2 * vocabulary * d + vocabulary + 2 * (8 * d * d + 8 * d);
  EXPECT_EQ(make_model("lm", model_options("lm"))->shape().num_elements(), lm);
  EXPECT_NEAR(static_cast<double>(lm), 20e6, 1e6);
}

TEST(DefaultModels, WeightsHaveTheirDistribution) {
  const auto check = [](const torch::Tensor& t, double deviation) {
    const double n = static_cast<double>(t.numel());
    EXPECT_NEAR(t.mean().item<double>(), 0, 5 * deviation / std::sqrt(n));
    EXPECT_NEAR(t.std().item<double>(), deviation, 5 * deviation / std::sqrt(n));
  };
  const std::unique_ptr<Model> gpt = make_model("gpt", model_options("gpt"));
  for (const Parameter& p : gpt->parameters()) {
    if (p.name.ends_with("qkv.weight") || p.name.ends_with("token.weight")) check(p.tensor, 0.02);
    if (p.name.ends_with("projection.weight") || p.name.ends_with("down.weight")) {
      check(p.tensor, 0.02 / std::sqrt(12.0));
    }
  }
  const std::unique_ptr<Model> lm = make_model("lm", model_options("lm"));
  for (const Parameter& p : lm->parameters()) {
    if (p.name.starts_with("lstm")) check(p.tensor, 1 / std::sqrt(384.0) / std::sqrt(3.0));
  }
}

std::string message_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const UsageError& e) {
    return e.what();
  }
  return "(no UsageError)";
}

TEST(BadModels, AreRefusedInOneSentence) {
  EXPECT_EQ(message_of([] { make_model("gtp", {}); }),
            "unknown model 'gtp': did you mean 'gpt'? There are gpt, lm");
  EXPECT_EQ(message_of([] { make_model("gpt", {.heads = 5}); }),
            "model gpt: width 384 must be a multiple of heads, not 5");
  const std::unique_ptr<Model> model = tiny_model({"gpt"});
  EXPECT_EQ(message_of([&] { model->loss(random_batch(model->options(), 1, 33), {}); }),
            "model gpt: sequences of 33 tokens are longer than the context of 32");
  EXPECT_NE(message_of([&] { model->loss({}, {}); }), "(no UsageError)");
  EXPECT_NE(message_of([&] { model->to(torch::kHalf); }), "(no UsageError)");
}

TEST(TokenBatches, BecomeTensors) {
  const auto source = std::make_shared<ZipfSource>(256, 1000, 1);
  const TokenBatch tokens = Batches(source, {.sequences = 5, .length = 10, .rank = 1, .size = 2}).at(3);
  const Batch batch = to_batch(tokens);
  EXPECT_EQ(batch.tokens.size(0), 2);
  EXPECT_EQ(batch.first_sequence, 3);
  EXPECT_EQ(batch.tokens[1][4].item<std::int64_t>(), tokens.tokens[14]);
  EXPECT_TRUE(torch::equal(batch.tokens.slice(1, 1), batch.targets.slice(1, 0, 9)));
}

}  // namespace
}  // namespace weft
