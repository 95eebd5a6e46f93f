// Outlines of models: tensors and FLOPs against formulas written out here, seconds against a plain clock
// around a whole step.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <set>

#include "data/batches.h"
#include "data/open.h"
#include "weft/error.h"
#include "weft_torch/models/model.h"
#include "weft_torch/outline/measure.h"
#include "workload/emulate.h"
#include "workload/model_shapes.h"

namespace weft {
namespace {

OutlineOptions options_of(const std::string& model) {
  OutlineOptions out;
  out.train.model = model;
  out.train.sizes = model_options(model, "tiny");
  out.train.sizes.width = 64;
  out.train.data = {.kind = "synthetic", .synthetic_tokens = 20'000};
  out.sequences = 8;
  out.steps = 5;
  out.warmup = 2;
  return out;
}

// Median seconds of forward and backward as one, timed from outside.
double seconds_of_whole(const OutlineOptions& options) {
  at::set_num_threads(1);
  const std::unique_ptr<Model> model = make_model(options.train.model, options.train.sizes);
  for (const Parameter& p : model->parameters())
    torch::Tensor(p.tensor).mutable_grad() = torch::zeros_like(p.tensor);
  torch::Tensor tokens = torch::randint(options.train.sizes.vocabulary,
                                        {options.sequences, options.train.sizes.context}, torch::kInt64);
  const Batch batch{.tokens = tokens, .targets = tokens};
  std::vector<double> seconds;
  for (int i = 0; i < 7; ++i) {
    const auto start = std::chrono::steady_clock::now();
    model->loss(batch, {.seed = 1, .step = i}).backward();
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds[3];
}

double computed(const Outline& outline) {
  double sum = 0;
  for (const OutlineBlock& b : outline.blocks) sum += b.forward_seconds + b.backward_seconds;
  return sum;
}

TEST(MeasuredOutline, HasTheModelsBlocksAndTensors) {
  for (const std::string name : {"gpt", "lm", "gnmt", "transformer", "bert"}) {
    const OutlineOptions options = options_of(name);
    const Outline outline = measure_outline(options);
    EXPECT_EQ(outline.model, name);
    EXPECT_EQ(outline.source, "measured");
    EXPECT_EQ(outline.tokens_per_rank, 8 * 32);
    const std::unique_ptr<Model> model = make_model(name, options.train.sizes);
    const ModelShape& shape = model->shape();
    ASSERT_EQ(outline.blocks.size(), shape.blocks.size());
    EXPECT_EQ(outline.parameters, shape.num_elements());
    for (std::size_t b = 0; b < shape.blocks.size(); ++b) {
      EXPECT_EQ(outline.blocks[b].name, shape.blocks[b].name);
      EXPECT_GT(outline.blocks[b].forward_seconds, 0);
      EXPECT_GT(outline.blocks[b].backward_seconds, 0);
      EXPECT_GT(outline.blocks[b].update_seconds, 0);
    }
    ASSERT_EQ(outline.tensors.size(), model->parameters().size());
    for (std::size_t i = 0; i < outline.tensors.size(); ++i) {
      const Parameter& p = model->parameters()[i];
      const OutlineTensor& tensor = outline.tensors[i];
      EXPECT_EQ(tensor.name, p.name);
      EXPECT_EQ(tensor.length, p.tensor.numel());
      EXPECT_EQ(tensor.rows, p.tensor.dim() == 2 ? p.tensor.size(0) : 0);
      EXPECT_EQ(tensor.block, shape.block_of(static_cast<int>(i)));
    }
  }
}

// Clocks between blocks and inside backward account for the whole step. A factor of two, because tests share
// their cores with others; blocks that were left out, or counted twice, go beyond it (see below).
TEST(MeasuredOutline, SecondsAddUpToAStep) {
  OutlineOptions options = options_of("gpt");
  options.train.sizes.layers = 4;
  const Outline outline = measure_outline(options);
  const double whole = seconds_of_whole(options);
  EXPECT_LT(computed(outline), 2 * whole);
  EXPECT_GT(computed(outline), whole / 2);
  double layers = 0;
  for (const OutlineBlock& b : outline.blocks) layers += b.name.starts_with("layer") ? b.backward_seconds : 0;
  EXPECT_GT(layers, computed(outline) / 4);  // four layers are most of this model, backward most of a layer
}

// What a layer of experts takes is apart from its block, by its rows: so its outline goes with any layout.
TEST(MeasuredOutline, TellsExpertsApart) {
  OutlineOptions options = options_of("gpt-moe");
  options.train.sizes.experts.shared = 1;
  const Outline outline = measure_outline(options);
  ASSERT_EQ(outline.experts.size(), 1u);
  const OutlineExperts& layer = outline.experts.front();
  EXPECT_EQ(layer.name, "layer.1.experts");
  for (const double seconds :
       {layer.gate_forward_seconds, layer.gate_backward_seconds, layer.shared_forward_seconds,
        layer.shared_backward_seconds, layer.row_forward_seconds, layer.row_backward_seconds,
        layer.merge_forward_seconds, layer.merge_backward_seconds})
    EXPECT_GT(seconds, 0);
  // All of them add up to a step, as above.
  double updates = 0;
  for (const OutlineBlock& b : outline.blocks) updates += b.update_seconds;
  const double whole = seconds_of_whole(options), all = compute_seconds(outline) - updates;
  EXPECT_LT(all, 2 * whole);
  EXPECT_GT(all, whole / 2);
  // Of several ranks a slice takes as long as its rows: on one rank, in one slice, what was measured.
  const auto step = [&](int ep, int slices) {
    EmulationOptions emulation;
    emulation.parallel.scheme.name = "dense";
    emulation.experts = options.train.sizes.experts;
    emulation.experts.ranks = ep;
    emulation.experts.slices = slices;
    emulation.warmup = 0;
    emulation.steps = 2;
    SimulationOptions simulation;
    simulation.ranks = 4;
    simulation.link.latency_seconds = 0;
    return simulate_ranks(outline, emulation, simulation).front().step_seconds.front();
  };
  const double calls = 4 * (layer.expert_forward_seconds + layer.expert_backward_seconds);
  EXPECT_NEAR(step(1, 1), all, 0.02 * all);
  EXPECT_NEAR(step(1, 4), step(1, 1) + 3 * calls, 0.02 * all);  // rows are the same, calls are not
  EXPECT_NEAR(step(4, 4), step(1, 4) - 3 * calls,
              0.02 * all);  // a quarter of the experts, with all ranks' rows
}

// Weights come ready inside their block's backward, last used first; the shared table when its first block's
// is over.
TEST(MeasuredOutline, TellsWhenGradientsAreReady) {
  const Outline outline = measure_outline(options_of("gpt"));
  const auto ready = [&](const std::string& name) {
    const auto found = std::find_if(outline.tensors.begin(), outline.tensors.end(),
                                    [&](const OutlineTensor& t) { return t.name == name; });
    EXPECT_NE(found, outline.tensors.end()) << name;
    return found->ready;
  };
  EXPECT_LT(ready("layer.0.mlp.down.weight"), ready("layer.0.mlp.up.weight"));
  EXPECT_LT(ready("layer.0.mlp.up.weight"), ready("layer.0.attention.heads.weight"));
  EXPECT_GT(ready("layer.0.mlp.down.weight"), 0);
  EXPECT_GT(ready("embedding.token.weight"), 0.3);
}

TEST(MeasuredOutline, CountsTheRowsThatABatchTouches) {
  const OutlineOptions options = options_of("lm");
  const Outline outline = measure_outline(options);
  const OpenedData data = open_data({.kind = "synthetic", .words = 256, .synthetic_tokens = 20'000});
  const Batches batches(data.source, {.sequences = 8, .length = 32, .seed = options.train.seed});
  const TokenBatch last = batches.at(options.warmup + options.steps - 1);
  const std::set<std::int64_t> distinct(last.tokens.begin(), last.tokens.end());
  ASSERT_EQ(outline.tables.size(), 1u);
  EXPECT_EQ(outline.tables[0].name, "embedding.weight");
  EXPECT_EQ(outline.tables[0].rows, 256);
  EXPECT_EQ(outline.tables[0].width, 64);
  EXPECT_EQ(outline.tables[0].rows_per_step, static_cast<double>(distinct.size()));
  EXPECT_LT(distinct.size(), 256u);  // else the count could not be wrong
}

TEST(MeasuredOutline, RanksComputeSideBySide) {
  OutlineOptions options = options_of("gpt");
  options.side_by_side = 2;
  const Outline outline = measure_outline(options);
  EXPECT_EQ(outline.side_by_side, 2);
  EXPECT_EQ(outline.tokens_per_rank, 8 * 32);  // of each
}

TEST(OutlineFromFlops, IsTheFormula) {
  const OutlineOptions options = options_of("gpt");
  const ModelShape shape = model_shape(options.train.model, options.train.sizes);
  const Outline outline = outline_from_flops(shape, 8 * 32, 1e9);
  EXPECT_EQ(outline.source, "flops");
  EXPECT_EQ(outline.flops_per_second, 1e9);
  // Products with 12 d^2 weights and the attention of a layer, and the head's with d V; 2 FLOPs each.
  const double d = 64, layer = 24 * d * d + 2 * 32 * d, head = 2 * d * 256, tokens = 8 * 32;
  EXPECT_EQ(outline.blocks[0].forward_seconds, 0);
  EXPECT_DOUBLE_EQ(outline.blocks[1].forward_seconds, layer * tokens / 1e9);
  EXPECT_DOUBLE_EQ(outline.blocks[1].backward_seconds, 2 * layer * tokens / 1e9);
  EXPECT_DOUBLE_EQ(outline.blocks.back().forward_seconds, head * tokens / 1e9);
  EXPECT_DOUBLE_EQ(compute_seconds(outline), 3 * (2 * layer + head) * tokens / 1e9);
  EXPECT_DOUBLE_EQ(compute_seconds(outline_from_flops(shape, 8 * 32, 2e9)), compute_seconds(outline) / 2);
  for (const OutlineTensor& tensor : outline.tensors) EXPECT_EQ(tensor.ready, 1);
}

TEST(MeasuredOutline, RefusesWhatCannotBeMeant) {
  const auto refused = [](auto&& spoil) {
    OutlineOptions options = options_of("gpt");
    spoil(options);
    EXPECT_THROW(measure_outline(options), UsageError);
  };
  refused([](OutlineOptions& o) { o.train.model = "gtp"; });
  refused([](OutlineOptions& o) { o.train.accumulate = 2; });
  refused([](OutlineOptions& o) { o.sequences = 0; });
  refused([](OutlineOptions& o) { o.steps = 0; });
  refused([](OutlineOptions& o) { o.side_by_side = 0; });
  const ModelShape shape = model_shape("gpt", options_of("gpt").train.sizes);
  EXPECT_THROW(outline_from_flops(shape, 256, 0), UsageError);
  EXPECT_THROW(outline_from_flops(shape, 0, 1e9), UsageError);
}

}  // namespace
}  // namespace weft
