// What every technique of Optimus-CC takes away from the bytes of a step, by hand and as integers: data-parallel ranks,
// stages, a table that the first and the last of them have, and all of it at once.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "step/stage.h"
#include "workload/emulate.h"
#include "workload/model_shapes.h"

namespace weft {
namespace {

constexpr int kReplicas = 2, kStages = 4, kMicroBatches = 8;        // D, P, M
constexpr std::int64_t kTokens = 24, kWidth = 16, kWords = 64;      // n, m; of a micro-batch
constexpr int kColumns = 3, kGradientColumns = 2, kCompressed = 3;  // r between stages, r', k
constexpr std::int64_t kBytes = 4;                                  // w

struct Techniques {
  const char* name;
  bool compressed_backpropagation = false, fused_embedding = false;
  int compressed_stages = 0;
  int bits = 0;  // of whole numbers between stages; 0: factors
};

// Every count is a multiple of the ranks that sum it, so that all of them send the same.
ModelShape model() {
  ModelOptions sizes = model_options("gpt", "tiny");
  sizes.width = kWidth;
  sizes.heads = 2;
  sizes.vocabulary = kWords;
  sizes.layers = kStages;
  return model_shape("gpt", sizes);
}

std::vector<EmulatedSteps> simulated(const Techniques& t) {
  EmulationOptions options;
  SchemeOptions& scheme = options.parallel.scheme;
  scheme.name = t.compressed_stages > 0 ? "powersgd" : "dense";
  scheme.columns = kGradientColumns;
  scheme.all_reduce = "ring";
  scheme.buckets.dense_below = 0;
  options.mesh = {.dp = kReplicas, .pp = kStages};
  options.stage.compressed = t.compressed_stages;
  options.stage.tied_sum = t.fused_embedding ? "fused" : "two-step";
  if (t.compressed_backpropagation)
    (t.bits > 0 ? options.backward.bits : options.backward.columns) = t.bits > 0 ? t.bits : kColumns;
  options.micro_batches = kMicroBatches;
  options.warmup = 1;
  options.steps = 2;
  SimulationOptions simulation;
  simulation.ranks = options.mesh.ranks();
  simulation.link.bytes_per_second = 1e8;
  return simulate_ranks(outline_from_flops(model(), kTokens * kMicroBatches, 1e9), options, simulation);
}

// F: M n m w to the next stage. B: (M - q) n m w + q (n + m) r w to the one before, q = min(M, P - p); of whole numbers of b
// bits q n (w + m b / 8).
std::int64_t coded(const Techniques& t) {
  return t.bits > 0 ? kTokens * (kBytes + kWidth * t.bits / 8) : (kTokens + kWidth) * kColumns * kBytes;
}
std::int64_t between_stages(const Techniques& t, int stage) {
  const std::int64_t forth = stage + 1 < kStages ? kMicroBatches * kTokens * kWidth * kBytes : 0;
  if (stage == 0) return forth;
  const int q = t.compressed_backpropagation ? std::min(kMicroBatches, kStages - stage) : 0;
  return forth + (kMicroBatches - q) * kTokens * kWidth * kBytes + q * coded(t);
}

// 2 (D - 1) / D [sum of (n + m) r' where compressed + the others' lengths] w, without what stages share.
std::int64_t of_gradients(const Techniques& t, int stage) {
  std::int64_t values = 0;
  for (const ParameterShape& p : stage_shape(model(), {.stages = kStages, .stage = stage}).parameters) {
    if (!p.stages.empty()) continue;
    const std::int64_t rows = p.dims.front(), columns = p.count() / rows;
    const std::int64_t factors = (rows + columns) * std::min<std::int64_t>({rows, columns, kGradientColumns});
    const bool shorter = p.dims.size() > 1 && 2 * factors < p.count();
    values += stage < t.compressed_stages && shorter ? factors : p.count();
  }
  return 2 * (kReplicas - 1) * values * kBytes / kReplicas;
}

// V (3 D - 2) / D in two steps, V (2 D - 1) / D fused: of the first and the last stage.
std::int64_t of_embedding(const Techniques& t, int stage) {
  if (stage > 0 && stage + 1 < kStages) return 0;
  const std::int64_t table = kWords * kWidth * kBytes;
  return table * (t.fused_embedding ? 2 * kReplicas - 1 : 3 * kReplicas - 2) / kReplicas;
}

TEST(StageBytes, AreTheFormulasOfEveryTechniqueAndOfAll) {
  const std::array cases{Techniques{"none"},
                         Techniques{"cb", true},
                         Techniques{"fe", false, true},
                         Techniques{"sc", false, false, kCompressed},
                         Techniques{"cb+fe+sc", true, true, kCompressed},
                         Techniques{"4 bits", true, false, 0, 4},
                         Techniques{"8 bits", true, false, 0, 8}};
  std::vector<std::int64_t> of_case;  // of all ranks
  for (const Techniques& t : cases) {
    const std::vector<EmulatedSteps> ranks = simulated(t);
    ASSERT_EQ(ranks.size(), static_cast<std::size_t>(kReplicas * kStages));
    of_case.push_back(0);
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      const int stage = static_cast<int>(r) / kReplicas;
      const std::int64_t expected =
          between_stages(t, stage) + of_gradients(t, stage) + of_embedding(t, stage);
      EXPECT_EQ(static_cast<std::int64_t>(ranks[r].payload_bytes.back()), expected)
          << t.name << ", rank " << r;
      EXPECT_EQ(ranks[r].formula_bytes, expected) << t.name << ", rank " << r;
      of_case.back() += expected;
    }
  }
  // What all of them save together is what each saves alone; none of them is nothing.
  const std::int64_t none = of_case.front();
  EXPECT_EQ(none - of_case[4], 3 * none - of_case[1] - of_case[2] - of_case[3]);
  for (std::size_t i = 1; i < of_case.size(); ++i) EXPECT_LT(of_case[i], none) << cases[i].name;
  // Of the pipeline's P (P - 1) / 2 messages that are compressed, to the byte; of the table a quarter.
  for (const std::size_t i : {1, 5, 6})
    EXPECT_EQ(none - of_case[i],
              kReplicas * kStages * (kStages - 1) / 2 * (kBytes * kTokens * kWidth - coded(cases[i])))
        << cases[i].name;
  EXPECT_EQ(none - of_case[2], 2 * kReplicas * kWords * kWidth * kBytes * (kReplicas - 1) / kReplicas);
}

// The same as PowerSGD has it with every stage compressed; with none of them it is dense.
TEST(StageBytes, OfCompressedStagesAreTheFirst) {
  std::int64_t before = 0;
  for (int k = 0; k <= kStages; ++k) {
    const Techniques t{"sc", false, false, k};
    const std::vector<EmulatedSteps> ranks = simulated(t);
    std::int64_t all = 0;
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      const int stage = static_cast<int>(r) / kReplicas;
      EXPECT_EQ(static_cast<std::int64_t>(ranks[r].payload_bytes.back()),
                between_stages(t, stage) + of_gradients(t, stage) + of_embedding(t, stage))
          << k << ", rank " << r;
      all += static_cast<std::int64_t>(ranks[r].payload_bytes.back());
    }
    EXPECT_TRUE(k == 0 || all < before) << k;
    before = all;
  }
}

}  // namespace
}  // namespace weft
