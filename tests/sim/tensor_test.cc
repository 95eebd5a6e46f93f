// Tensor-parallel ranks in virtual time: shapes that are cut, tables that hold together, bytes and seconds by formula.
#include "step/tensor.h"

#include <gtest/gtest.h>

#include "message_of.h"
#include "step/stage.h"
#include "weft/error.h"
#include "workload/emulate.h"
#include "workload/model_shapes.h"
#include "workload/step_parts.h"

namespace weft {
namespace {

using testing::message_of;

constexpr std::int64_t kTokens = 24, kWidth = 16;  // of a micro-batch
constexpr int kLayers = 4;

ModelOptions sizes() {
  ModelOptions out = model_options("gpt", "tiny");
  out.width = kWidth;
  out.heads = 4;
  out.vocabulary = 66;
  out.layers = kLayers;
  return out;
}

struct Job {
  Mesh mesh;
  int micro_batches = 4;
  double flops = 1e9;
  double rate = 0;  // bytes a second; 0: sending is free
  int columns = 0;
  bool bf16 = false, tensor_bf16 = false;
  KernelCosts kernels = {};
};

std::vector<EmulatedSteps> simulated(const Job& job) {
  EmulationOptions options;
  options.mesh = job.mesh;
  options.micro_batches = job.micro_batches;
  options.backward.columns = job.columns;
  options.stage.bf16 = job.bf16;
  options.tensor_bf16 = job.tensor_bf16;
  options.steps = 3;
  options.warmup = 2;
  SimulationOptions simulation;
  simulation.ranks = job.mesh.ranks();
  simulation.link.bytes_per_second = job.rate;
  simulation.costs.kernels = job.kernels;
  const Outline outline =
      outline_from_flops(model_shape("gpt", sizes()), kTokens * job.micro_batches, job.flops);
  return simulate_ranks(outline, options, simulation);
}

// Shares of all ranks together are the model, and no two overlap; what is not cut is whole on each.
TEST(TensorShape, SharesAreTheWhole) {
  const ModelShape whole = model_shape("gpt", sizes());
  for (const int ranks : {2, 4}) {
    for (std::size_t p = 0; p < whole.parameters.size(); ++p) {
      std::int64_t next = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const ModelShape mine = tensor_shape(whole, {.ranks = ranks, .rank = rank});
        const ParameterShape& share = mine.parameters[p];
        EXPECT_EQ(share.whole_dims(), whole.parameters[p].dims) << share.name;
        if (whole.parameters[p].cut < 0) {
          EXPECT_EQ(share.dims, whole.parameters[p].dims) << share.name;
          continue;
        }
        EXPECT_EQ(share.cut_first, next) << share.name;
        next += share.dims[static_cast<std::size_t>(share.cut)];
      }
      const ParameterShape& all = whole.parameters[p];
      if (all.cut >= 0) {
        EXPECT_EQ(next, all.dims[static_cast<std::size_t>(all.cut)]) << all.name;
      }
    }
  }
  // A FLOP is one rank's: the ranks together have those of the whole model.
  EXPECT_NEAR(2 * tensor_shape(whole, {.ranks = 2}).flops_per_token(), whole.flops_per_token(), 1e-6);
  EXPECT_EQ(tensor_shape(whole, {}), whole);
}

TEST(TensorShape, RefusesWhatCannotBeCut) {
  const ModelShape lm = model_shape("lm", model_options("lm", "tiny"));
  EXPECT_NE(message_of([&] {
              tensor_shape(lm, {.ranks = 2});
            }).find("has no layers whose matrices ranks could cut"),
            std::string::npos);
  EXPECT_NE(message_of([&] { tensor_shape(lm, {.ranks = 2, .rank = 2}); }).find("there is no rank 2 of 2"),
            std::string::npos);
  ModelOptions few = sizes();
  few.vocabulary = 3;
  EXPECT_NE(message_of([&] {
              tensor_shape(model_shape("gpt", few), {.ranks = 4});
            }).find("cannot be cut among 4 ranks"),
            std::string::npos);
}

// Payload by the formulas, as integers, on every rank: sums, gathers of what came from a stage, gradients.
TEST(TensorRanks, SendWhatTheFormulasSay) {
  for (const Mesh& mesh : {Mesh{.dp = 1, .tp = 2}, Mesh{.dp = 2, .tp = 2}, Mesh{.dp = 1, .pp = 2, .tp = 2},
                           Mesh{.dp = 2, .pp = 2, .tp = 2}, Mesh{.dp = 1, .pp = 2, .tp = 4}}) {
    for (const int columns : {0, 3}) {
      const std::vector<EmulatedSteps> ranks = simulated({.mesh = mesh, .columns = columns});
      for (const EmulatedSteps& rank : ranks) {
        EXPECT_EQ(static_cast<std::int64_t>(rank.payload_bytes.back()), rank.formula_bytes)
            << mesh.text() << ", " << columns << " columns";
      }
    }
  }
  // Between stages, and in gathers behind them, half of it; what came as factors is gathered so.
  const Mesh mesh{.dp = 1, .pp = 2, .tp = 2};
  const auto bytes = [&](int columns, bool bf16) {
    const std::vector<EmulatedSteps> ranks = simulated({.mesh = mesh, .columns = columns, .bf16 = bf16});
    for (const EmulatedSteps& rank : ranks)
      EXPECT_EQ(static_cast<std::int64_t>(rank.payload_bytes.back()), rank.formula_bytes) << columns;
    return ranks[2].formula_bytes;  // of the last stage: it sends back and gathers what came
  };
  const std::int64_t message = kTokens / 2 * kWidth, factors = 3 * (kTokens / 2 + kWidth);
  EXPECT_EQ(bytes(0, false) - bytes(0, true), 2 * 4 * (message + message));
  EXPECT_EQ(bytes(0, false) - bytes(3, false), 4 * (message - factors));  // of the epilogue's one
  EXPECT_EQ(bytes(3, false) - bytes(3, true), 2 * (4 * message + 3 * message + factors));
  // By hand, one rank of two: sums of n m values (2 L + 1 forward, 2 L + 1 back), of 2 T scores, of gradients none.
  const std::vector<EmulatedSteps> two = simulated({.mesh = {.dp = 1, .tp = 2}});
  const std::int64_t tokens = 4 * kTokens;
  EXPECT_EQ(two.front().formula_bytes, 4 * tokens * (kWidth * (4 * kLayers + 2) + 2 * 2));
  // In bfloat16 half of it, but for the scores; of what else is sent nothing.
  for (const Mesh& each : {Mesh{.dp = 1, .tp = 2}, Mesh{.dp = 2, .pp = 2, .tp = 2}}) {
    const std::vector<EmulatedSteps> whole = simulated({.mesh = each}),
                                     half = simulated({.mesh = each, .tensor_bf16 = true});
    std::int64_t saved = 0;
    for (std::size_t r = 0; r < half.size(); ++r) {
      EXPECT_EQ(static_cast<std::int64_t>(half[r].payload_bytes.back()), half[r].formula_bytes) << r;
      saved += whole[r].formula_bytes - half[r].formula_bytes;
    }
    // Both ranks send a sum's values once, 2 bytes less of each. (With dp=2 the outline's tokens are each rank's.)
    EXPECT_EQ(saved, 2 * 2 * tokens * kWidth * (4 * kLayers + 2) * each.dp) << each.text();
  }
}

ModelShape rounded_shape() {
  ModelOptions o = sizes();
  o.tensor = {.ranks = 2, .bf16 = true};
  return rank_shape("gpt", o);
}

// Scores are not rounded: the loss is made of them.
TEST(TensorShape, SumsAreRoundedButForScores) {
  int rounded = 0;
  for (const SumShape& sum : rounded_shape().sums) {
    EXPECT_EQ(sum.bf16, sum.values == kWidth) << sum.activation;
    rounded += sum.bf16 ? 1 : 0;
  }
  EXPECT_EQ(rounded, 4 * kLayers + 2);
  for (const SumShape& sum : tensor_shape(model_shape("gpt", sizes()), {.ranks = 2}).sums)
    EXPECT_FALSE(sum.bf16) << sum.activation;
}

// Where sending is free T ranks take a T-th of the time; where it is not, the sums are waited for.
TEST(TensorRanks, TakeAShareOfTheTimeAndWaitForSums) {
  const auto step = [](const Job& job) { return simulated(job).front().step_seconds[1]; };
  const double alone = step({.mesh = {.dp = 1}});
  const double two = step({.mesh = {.dp = 1, .tp = 2}});
  EXPECT_NEAR(two, alone / 2, 1e-6);
  const double rate = 1e6;
  const double slow = step({.mesh = {.dp = 1, .tp = 2}, .rate = rate});
  const double sums = 4.0 * 4 * kTokens * (kWidth * (4 * kLayers + 2) + 2 * 2) / rate;
  EXPECT_GT(slow, two + 0.95 * sums);
  // Half of it in bfloat16, where sending is all that they take; and rounding is waited for, too.
  const double half = 2.0 * 4 * kTokens * (kWidth * (4 * kLayers + 2) + 2 * 2 * 2) / rate;
  EXPECT_NEAR(step({.mesh = {.dp = 1, .tp = 2}, .rate = rate, .tensor_bf16 = true}) - two,
              (slow - two) * half / sums, 0.01 * half);
  const KernelCosts kernels{.round_element = 3e-9, .widen_element = 2e-9};
  const double exact = step({.mesh = {.dp = 1, .tp = 2}, .kernels = kernels});
  EXPECT_NEAR(exact, two, 1e-6);
  EXPECT_NEAR(step({.mesh = {.dp = 1, .tp = 2}, .tensor_bf16 = true, .kernels = kernels}) - exact,
              5e-9 * 4 * kTokens * kWidth * (4 * kLayers + 2), 1e-6);
}

}  // namespace
}  // namespace weft
