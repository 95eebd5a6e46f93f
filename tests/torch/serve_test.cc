// Generating with kept keys and values against the model's whole forward, and experts on several ranks against all
// of them on one. In float64, where sums of other orders differ by about 1e-15.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>

#include "weft/error.h"
#include "weft/world.h"
#include "weft_torch/models/model.h"
#include "weft_torch/serve/decoder.h"
#include "weft_torch/serve/served_experts.h"

namespace weft {
namespace {

constexpr double kExact = 1e-12;

ModelOptions sizes(int choices, int shared) {
  ModelOptions out = model_options("gpt-moe", "tiny");
  out.layers = 4;
  out.context = 24;
  out.dropout = 0.1;  // there is none where nothing is trained
  out.experts.count = 6;
  out.experts.every = 1;
  out.experts.choices = choices;
  out.experts.shared = shared;
  out.experts.capacity_factor = 0;
  return out;
}

// Gates of fresh weights see nearly equal experts: these choose clearly, and unevenly.
std::shared_ptr<Model> model_of(const std::string& name, const ModelOptions& options) {
  std::shared_ptr<Model> model = make_model(name, options);
  model->to(torch::kFloat64);
  const torch::NoGradGuard no_grad;
  for (const Parameter& p : model->parameters()) {
    if (p.name.ends_with("gate.weight")) p.tensor.mul_(40).select(0, 1).mul_(1.5);
    if (p.name.ends_with(".bias"))
      p.tensor.add_(torch::linspace(-0.1, 0.1, p.tensor.numel(), torch::kFloat64).view(p.tensor.sizes()));
  }
  return model;
}

std::vector<std::int64_t> tokens_of(int rank, int count) {
  std::vector<std::int64_t> out;
  for (int i = 0; i < count; ++i) out.push_back((37 * rank + 11 * i * i + 5 * i + 1) % 256);
  return out;
}

// All parts of the model one after the other, and the head by hand: [tokens, vocabulary].
torch::Tensor whole_logits(const Model& model, const std::vector<std::int64_t>& tokens) {
  const torch::NoGradGuard no_grad;
  Batch batch;
  batch.tokens = torch::tensor(tokens, torch::kInt64).view({1, -1});
  batch.targets = batch.tokens;
  std::map<std::string, torch::Tensor> given;
  torch::Tensor x;
  const ModelShape& shape = model.shape();
  for (int b = 0; b + 1 < shape.num_blocks(); ++b) {
    const std::vector<PartShape>& parts = shape.blocks[static_cast<std::size_t>(b)].parts;
    for (std::size_t p = 0; p < parts.size(); ++p) {
      std::vector<torch::Tensor> taken;
      for (const std::string& name : parts[p].takes) taken.push_back(given.at(name));
      const std::vector<torch::Tensor> out =
          model.forward(b, static_cast<int>(p), taken, batch, {.training = false});
      for (std::size_t i = 0; i < out.size(); ++i) given[parts[p].gives[i]] = out[i];
      x = out.front();
    }
  }
  const auto parameter = [&](const std::string& name) {
    return std::ranges::find(model.parameters(), name, &Parameter::name)->tensor;
  };
  const torch::Tensor normed =
      torch::layer_norm(x.view({-1, x.size(-1)}), {x.size(-1)}, parameter("head.norm.weight"),
                        parameter("head.norm.bias"), 1e-5);
  return torch::matmul(normed, parameter("embedding.token.weight").t());
}

double distance(const torch::Tensor& a, const torch::Tensor& b) {
  return ((a - b).abs().max() / b.abs().max()).item<double>();
}

TEST(Decoder, KeptKeysAndValuesGiveTheLogitsOfTheWholeForward) {
  struct Case {
    const char* model;
    ModelOptions options;
  };
  std::vector<Case> cases{{"gpt-moe", sizes(2, 0)}, {"gpt-moe", sizes(1, 1)}};
  cases.push_back({"gpt", model_options("gpt", "tiny")});
  for (const Case& each : cases) {
    const std::shared_ptr<Model> model = model_of(each.model, each.options);
    const Decoder decoder(model);
    LocalExperts experts(decoder);
    const std::vector<std::int64_t> tokens = tokens_of(3, 17);
    const torch::Tensor whole = whole_logits(*model, tokens);
    for (const std::vector<int>& cuts : {std::vector<int>{17}, {9, 1, 1, 1, 5}, {1, 16}}) {
      DecodedSequence sequence;
      std::vector<torch::Tensor> rows;
      int at = 0;
      for (const int count : cuts) {
        const Decoder::Feed feed{&sequence, {tokens.begin() + at, tokens.begin() + at + count}};
        rows.push_back(decoder.logits(decoder.feed(std::span(&feed, 1), experts)));
        at += count;
      }
      EXPECT_LT(distance(torch::cat(rows), whole), kExact) << each.model << " " << cuts.size();
      EXPECT_EQ(sequence.length, 17);
    }
    // Control: without what came before, the last token is another.
    DecodedSequence fresh;
    const Decoder::Feed last{&fresh, {tokens.back()}};
    EXPECT_GT(distance(decoder.logits(decoder.feed(std::span(&last, 1), experts)), whole.slice(0, 16, 17)),
              1e-3);
  }
}

TEST(Decoder, SequencesOfAStepDoNotSeeEachOther) {
  const Decoder decoder(model_of("gpt-moe", sizes(2, 0)));
  LocalExperts experts(decoder);
  DecodedSequence first, second, alone;
  const Decoder::Feed both[] = {{&first, tokens_of(1, 5)}, {&second, tokens_of(2, 9)}};
  const torch::Tensor rows = decoder.feed(both, experts);
  const Decoder::Feed one{&alone, tokens_of(2, 9)};
  EXPECT_LT(distance(rows.slice(0, 5, 14), decoder.feed(std::span(&one, 1), experts)), kExact);
}

TEST(Decoder, RefusesWhatItCannotGenerateWith) {
  EXPECT_THROW(Decoder(make_model("lm", model_options("lm", "tiny"))), UsageError);
  const Decoder decoder(model_of("gpt-moe", sizes(1, 0)));
  LocalExperts experts(decoder);
  DecodedSequence sequence;
  const Decoder::Feed long_one{&sequence, tokens_of(0, 25)}, unknown{&sequence, {256}};
  EXPECT_THROW(decoder.feed(std::span(&long_one, 1), experts), UsageError);
  EXPECT_THROW(decoder.feed(std::span(&unknown, 1), experts), UsageError);
}

constexpr int kRanks = 4, kSteps = 6;

// Ranks have prompts of different lengths, one has none; then tokens one by one. Distance from experts that are
// all here, the largest of all ranks.
double served_distance(const std::string& placement, int choices, bool wrong, bool* replicated) {
  const ModelOptions options = sizes(choices, 0);
  double worst = 0;
  std::mutex mutex;
  run_ranks(kRanks, [&](World& world) {
    const std::shared_ptr<Model> model = model_of("gpt-moe", options);
    const Decoder reference(model_of("gpt-moe", options));
    if (wrong && world.rank() == 1) {
      const torch::NoGradGuard no_grad;
      for (const Parameter& p : model->parameters()) {
        if (p.name.ends_with("experts.down.weight")) p.tensor.mul_(1.01);
      }
    }
    const Decoder decoder(model);
    ServedExperts::Options how;
    how.placer.placement = placement;
    how.placer.window = how.placer.every = 2;
    ServedExperts served(world, decoder, how);
    LocalExperts local(reference);
    DecodedSequence mine, same;
    for (int step = 0; step < kSteps; ++step) {
      std::vector<Decoder::Feed> feeds, references;
      if (world.rank() != 2) {
        const std::vector<std::int64_t> tokens =
            tokens_of(world.rank() + 10 * step, step == 0 ? 4 + 3 * world.rank() : 1);
        feeds.push_back({&mine, tokens});
        references.push_back({&same, tokens});
      }
      const torch::Tensor rows = decoder.feed(feeds, served), expected = reference.feed(references, local);
      const std::lock_guard lock(mutex);
      if (!feeds.empty()) worst = std::max(worst, distance(rows, expected));
      for (int l = 0; l < 4; ++l) {
        for (const std::vector<int>& on : served.serving().placer().placement(l).replicas)
          *replicated = *replicated || on.size() > 1;
      }
    }
  });
  return worst;
}

TEST(ServedExperts, OutputsAreTheSameUnderEveryPlacement) {
  for (const int choices : {1, 2}) {
    for (const char* placement : {"static", "history", "lina"}) {
      bool replicated = false;
      EXPECT_LT(served_distance(placement, choices, false, &replicated), kExact) << placement;
      EXPECT_EQ(replicated, std::string(placement) != "static");
    }
  }
  bool replicated = false;
  EXPECT_GT(served_distance("lina", 2, true, &replicated), 1e-6);  // control: one rank's weights are others
}

TEST(ServedExperts, WhatTokensChoseIsInTheProfile) {
  const Decoder decoder(model_of("gpt-moe", sizes(2, 0)));
  run_ranks(1, [&](World& world) {
    ServedExperts served(world, decoder, {});
    DecodedSequence sequence;
    const Decoder::Feed feed{&sequence, tokens_of(0, 8)};
    EXPECT_EQ(served.profile().depth(1, std::vector<std::int32_t>{0}), -1);
    decoder.feed(std::span(&feed, 1), served);
    std::vector<double> rows(6);
    served.profile().estimate(0, {}, rows);
    EXPECT_NEAR(std::accumulate(rows.begin(), rows.end(), 0.0), 2, 1e-12);
  });
}

}  // namespace
}  // namespace weft
