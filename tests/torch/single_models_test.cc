// What single models do, and what is refused.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <map>

#include "data/zipf.h"
#include "message_of.h"
#include "torch/model_cases.h"
#include "weft/error.h"
#include "weft_torch/train/replica.h"

namespace weft {
namespace {

using testing::message_of;

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
  const torch::Tensor qkv = linear(norm(x, "layer.0.attention.norm"), "layer.0.attention.heads");
  std::vector<torch::Tensor> outs;
  for (int h = 0; h < 2; ++h) {
    const auto piece = [&](int which) { return qkv.slice(2, h * 48 + which * 16, h * 48 + which * 16 + 16); };
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

// A vocabulary that is read in several blocks of words, the last one shorter; targets at their edges.
TEST(Lm, FullSoftmaxOfManyWords) {
  ModelOptions o = model_options("lm", "tiny");
  o.vocabulary = 20'000;
  o.dropout = 0;
  const std::unique_ptr<Model> full = make_model("lm", o);
  o.samples = 16;
  const std::unique_ptr<Model> sampled = make_model("lm", o);
  full->to(torch::kFloat64);
  sampled->to(torch::kFloat64);
  Batch batch = random_batch(o, 2, 5);
  const std::vector<std::int64_t> targets{0, 8191, 8192, 16383, 16384, 19'999, kNotCounted, 7, 9000, 18'000};
  batch.targets = torch::tensor(targets, torch::kInt64).view({2, 5});
  const torch::NoGradGuard no_grad;
  const double expected = full->loss(batch, {}).item<double>();
  EXPECT_NEAR(sampled->loss(batch, {.training = false}).item<double>() / expected, 1, 1e-12);
  batch.targets[0][0] = 1;  // control
  EXPECT_GT(std::abs(sampled->loss(batch, {.training = false}).item<double>() / expected - 1), 1e-9);
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
    if (p.name.ends_with("heads.weight") || p.name.ends_with("token.weight")) check(p.tensor, 0.02);
    if (p.name.ends_with("projection.weight") || p.name.ends_with("down.weight")) {
      check(p.tensor, 0.02 / std::sqrt(12.0));
    }
  }
  const std::unique_ptr<Model> lm = make_model("lm", model_options("lm"));
  for (const Parameter& p : lm->parameters()) {
    if (p.name.starts_with("lstm")) check(p.tensor, 1 / std::sqrt(384.0) / std::sqrt(3.0));
  }
}

TEST(BadModels, AreRefusedInOneSentence) {
  EXPECT_EQ(message_of([] { make_model("gtp", {}); }),
            "unknown model 'gtp': did you mean 'gpt'? There are gpt, gpt-moe, lm, gnmt, transformer, bert, "
            "bert2gpt2-moe");
  EXPECT_EQ(message_of([] { make_model("gpt", {.heads = 5}); }),
            "model gpt: width 384 must be a multiple of heads, not 5");
  const std::unique_ptr<Model> model = tiny_model({"gpt"});
  EXPECT_EQ(message_of([&] { model->loss(random_batch(model->options(), 1, 33), {}); }),
            "model gpt: sequences of 33 tokens are longer than the context of 32");
  EXPECT_NE(message_of([&] { model->loss({}, {}); }), "(no UsageError)");
  EXPECT_NE(message_of([&] { model->to(torch::kHalf); }), "(no UsageError)");
}

TEST(BadBatches, AreRefusedByTheKindThatAModelTakes) {
  const auto of = [](BatchKind kind) { return random_batch(model_options("gpt", "tiny"), 2, 16, kind); };
  const Batch tokens = of(BatchKind::tokens), pairs = of(BatchKind::pairs), spans = of(BatchKind::spans);
  const auto refusal = [](const char* model, const Batch& batch) {
    return message_of([&] { tiny_model({model})->check(batch); });
  };
  const std::string one_shape = "a batch has tokens and targets of one shape [sequences, length]";
  EXPECT_EQ(refusal("gpt", tokens), "(no UsageError)");
  EXPECT_EQ(refusal("gpt", pairs), "model gpt: a batch has no source");
  EXPECT_EQ(refusal("lm", spans), "model lm: " + one_shape);
  EXPECT_EQ(refusal("gnmt", pairs), "(no UsageError)");
  EXPECT_EQ(refusal("gnmt", tokens), "model gnmt: a batch has a source");
  EXPECT_EQ(refusal("transformer", spans), "model transformer: " + one_shape);
  EXPECT_EQ(refusal("bert", spans), "(no UsageError)");
  EXPECT_EQ(refusal("bert", tokens),
            "model bert: a batch has tokens [sequences, length] and targets [sequences, 2]");
  Batch fewer = pairs;
  fewer.source = pairs.source.slice(0, 0, 1);
  EXPECT_EQ(refusal("gnmt", fewer), "model gnmt: a batch has as many sources as sequences of tokens");
  Batch longer = pairs;
  longer.source = pairs.source.repeat({1, 2});
  EXPECT_EQ(refusal("gnmt", longer), "model gnmt: sequences of 38 tokens are longer than the context of 32");
}

TEST(TokenBatches, BecomeTensors) {
  const auto source = std::make_shared<ZipfSource>(256, 1000, 1);
  const TokenBatch tokens = Batches(source, {.sequences = 5, .length = 10, .rank = 1, .size = 2}).at(3);
  const Batch batch = to_batch(tokens);
  EXPECT_EQ(batch.tokens.size(0), 2);
  EXPECT_EQ(batch.first_sequence, 3);
  EXPECT_EQ(batch.tokens[1][4].item<std::int64_t>(), tokens.tokens[14]);
  EXPECT_TRUE(torch::equal(batch.tokens.slice(1, 1), batch.targets.slice(1, 0, 9)));
  EXPECT_FALSE(batch.source.defined());
}

TEST(TokenBatches, OfPairsAndSpansBecomeTensors) {
  const auto source = std::make_shared<ZipfSource>(256, 1000, 1);
  const auto batch_of = [&](BatchKind kind, int rank, int size) {
    const BatchOptions options{.kind = kind, .sequences = 5, .length = 10, .rank = rank, .size = size};
    return Batches(source, options).at(3);
  };
  const TokenBatch pairs = batch_of(BatchKind::pairs, 1, 2);
  const Batch pair = to_batch(pairs);
  EXPECT_EQ(pair.source.sizes(), pair.tokens.sizes());
  EXPECT_EQ(pair.source[1][4].item<std::int64_t>(), pairs.source[14]);
  EXPECT_NE(pairs.source, pairs.tokens);
  EXPECT_EQ(counted(pair), 20);
  const TokenBatch spans = batch_of(BatchKind::spans, 1, 2);
  const Batch span = to_batch(spans);
  EXPECT_EQ(span.targets.sizes(), (std::vector<std::int64_t>{2, 2}));
  EXPECT_EQ(span.targets[1][0].item<std::int64_t>(), spans.targets[2]);
  EXPECT_EQ(counted(span), 4);
  EXPECT_EQ(counted(spans), 4);
  // Micro-batches have their sources and places; a rank without sequences has batches of the right shape.
  for (const Batch& whole : {pair, span}) {
    const std::vector<Batch> parts = micro_batches_of(whole, 3);
    std::vector<torch::Tensor> tokens, targets, sources;
    for (const Batch& part : parts) {
      tokens.push_back(part.tokens);
      targets.push_back(part.targets);
      if (part.source.defined()) sources.push_back(part.source);
    }
    EXPECT_TRUE(torch::equal(torch::cat(tokens), whole.tokens));
    EXPECT_TRUE(torch::equal(torch::cat(targets), whole.targets));
    EXPECT_EQ(sources.size(), whole.source.defined() ? 3u : 0u);
    EXPECT_EQ(parts[1].first_sequence, whole.first_sequence + sequences(parts[0]));
    if (!whole.source.defined()) continue;
    EXPECT_TRUE(torch::equal(torch::cat(sources), whole.source));
  }
  EXPECT_EQ(tiny_model({"bert"})->loss(to_batch(batch_of(BatchKind::spans, 6, 7)), {}).item<double>(), 0);
  EXPECT_EQ(tiny_model({"gnmt"})->loss(to_batch(batch_of(BatchKind::pairs, 6, 7)), {}).item<double>(), 0);
}

}  // namespace
}  // namespace weft
