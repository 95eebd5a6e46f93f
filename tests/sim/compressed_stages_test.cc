// How many stages have their gradients compressed: against every number of them, and against the closed form.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <functional>
#include <tuple>
#include <utility>
#include <vector>

#include "base/statistics.h"
#include "compressors/low_rank.h"
#include "planner/stages.h"
#include "weft/error.h"
#include "workload/job_steps.h"

namespace weft {
namespace {

constexpr int kStages = 4, kReplicas = 2, kMicroBatches = 4, kColumns = 4;
constexpr std::int64_t kSide = 256;                  // of a layer's matrix
constexpr double kForward = 1e-3, kBackward = 2e-3;  // of a micro-batch and stage
constexpr double kBytes = 4.0 * kSide * kSide;       // that two ranks send each for its sum
constexpr double kRatio = static_cast<double>(kSide * kSide) / (kColumns * 2 * kSide);

// Layers of one matrix; a last block that takes no time and has next to nothing. `layers`: of each stage; a token has
// `width` values between them.
Outline outline_of(const std::vector<int>& layers, std::int64_t width = 1, std::int64_t tokens = 1) {
  std::vector<ChainBlock> blocks;
  int all = 0;
  for (const int count : layers) all += count;
  for (int i = 0; i < all; ++i)
    blocks.push_back({.name = "layer." + std::to_string(i),
                      .parameters = {{.name = "layer." + std::to_string(i) + ".w", .dims = {kSide, kSide}}}});
  blocks.push_back({.name = "head", .parameters = {{.name = "head.w", .dims = {1}}}});
  ModelShape shape = chain_shape("layers", blocks);
  shape.width = width;
  Outline out = weft::outline_of(shape, tokens * kMicroBatches);
  for (OutlineBlock& block : out.blocks) {
    if (block.name == "head") continue;
    block.forward_seconds = kForward * kMicroBatches;
    block.backward_seconds = kBackward * kMicroBatches;
  }
  return out;
}

EmulationOptions options_of(const std::vector<int>& layers, const std::string& updates_wait) {
  EmulationOptions out;
  out.parallel.scheme.name = "powersgd";
  out.parallel.scheme.columns = kColumns;
  out.mesh = {.dp = kReplicas, .pp = kStages};
  out.stage.layers = layers;
  out.micro_batches = kMicroBatches;
  out.updates_wait = updates_wait;
  return out;
}

SimulationOptions over(double bytes_per_second) {
  SimulationOptions out;
  out.ranks = kStages * kReplicas;
  out.link.bytes_per_second = bytes_per_second;
  out.config.micro_op_bytes = 1024;  // what passes between stages waits for no sum
  return out;
}

TEST(CompressedStages, AreAsManyAsTheClosedFormSays) {
  // With A the dense sum of a stage, tau the time by which stage p has more than stage p - 1 until its sum is needed:
  //   k = clamp(ceil((A (1 - 1/ratio)) / tau), 0, P)
  // Where the update waits for all sums, tau is a backward: stage p - 1 ends so much later. Where each stage waits for
  // its own alone, it is a forward in addition: of the next step, that of stage p - 1 comes first.
  const std::vector<int> even(kStages, 1);
  for (const bool together : {true, false}) {
    const double tau = kBackward + (together ? 0 : kForward);
    int before = kStages;
    for (const double shares : {6.5, 3.5, 2.5, 1.5, 0.5}) {  // the link gets faster
      const double rate = kBytes * (1 - 1 / kRatio) / (shares * tau);
      const StagesChoice chosen = choose_compressed_stages(
          outline_of(even), options_of(even, together ? "a test says so" : ""), over(rate));
      EXPECT_EQ(chosen.compressed, std::min(kStages, static_cast<int>(std::ceil(shares))))
          << shares << (together ? ", together: " : ": ") << chosen.why;
      EXPECT_LE(chosen.compressed, before);  // never grows with the bandwidth
      before = chosen.compressed;
    }
    EXPECT_EQ(choose_compressed_stages(outline_of(even), options_of(even, ""), over(0)).compressed, 0);
  }
}

// What the second stage's factors would save is a fiftieth of a backward, 0.2 % of a step; half of one is worth it.
TEST(CompressedStages, AreNotOneMoreForLessThanHalfAPercent) {
  const std::vector<int> even(kStages, 1);
  const auto chosen = [&](double shares) {
    const double rate = kBytes * (1 - 1 / kRatio) / (shares * kBackward);
    return choose_compressed_stages(outline_of(even), options_of(even, "a test says so"), over(rate));
  };
  const StagesChoice close = chosen(1.02);
  EXPECT_EQ(close.compressed, 1) << close.why;
  EXPECT_LT(close.candidates[2].step_seconds, close.candidates[1].step_seconds) << close.why;
  EXPECT_EQ(chosen(1.5).compressed, 2);  // control
}

TEST(CompressedStages, OfUnevenStagesAreTheFewestOfTheFastest) {
  for (const std::vector<int>& layers : {std::vector<int>{1, 1, 3, 1}, {2, 1, 1, 2}}) {
    const Outline outline = outline_of(layers);
    for (const double rate : {5e6, 4e7, 4e8}) {
      std::vector<double> seconds;
      for (int k = 0; k <= kStages; ++k) {
        EmulationOptions options = options_of(layers, "");
        options.stage.compressed = k;
        options.warmup = 3;
        options.steps = 4;
        seconds.push_back(median(job_steps(seconds_of(simulate_ranks(outline, options, over(rate))))));
      }
      const double least = *std::ranges::min_element(seconds);
      const auto fewest = std::ranges::find_if(seconds, [&](double s) { return s <= least * 1.005; });
      EXPECT_EQ(choose_compressed_stages(outline, options_of(layers, ""), over(rate)).compressed,
                fewest - seconds.begin())
          << rate;
    }
  }
}

// Where the factors would be no shorter, nothing is compressed, and no stage is said to be.
TEST(CompressedStages, AreNoneWhereFactorsAreNoShorter) {
  const std::vector<int> even(kStages, 1);
  EmulationOptions options = options_of(even, "");
  options.parallel.scheme.columns = kSide / 2;
  EXPECT_EQ(low_rank_of(kSide, kSide * kSide, {.rank = kSide / 2, .min_compression = 1}), 0);
  EXPECT_EQ(choose_compressed_stages(outline_of(even), options, over(1e6)).compressed, 0);
  options.parallel.scheme.columns = kColumns;  // control
  EXPECT_EQ(choose_compressed_stages(outline_of(even), options, over(1e6)).compressed, kStages);
}

// By the rule, walked rank by rank: the most columns from which no fewer save a twentieth of a step for each halving. It
// is not the fastest (control), and where nothing is exposed nothing is compressed.
TEST(CompressedStages, ColumnsAreTheMostOfWhichHalvesDoNotPay) {
  // (34 columns would be as long as 48 x 128 values.)
  const Outline outline = outline_of({1, 2, 1, 1}, 128, 48);
  constexpr std::array kRanks{32, 16, 8, 4, 2, 1};
  std::vector<int> of_rate;
  for (const double rate : {4e8, 2.5e7, 2e6}) {
    std::vector<double> seconds;
    for (const int rank : kRanks) {
      EmulationOptions options = options_of({1, 2, 1, 1}, "");
      options.parallel.scheme.columns = options.backward.columns = rank;
      const StagesChoice choice = choose_compressed_stages(outline, options, over(rate));
      EXPECT_EQ(choice.columns, 0);  // nobody has asked
      seconds.push_back(choice.candidates[static_cast<std::size_t>(choice.compressed)].step_seconds);
    }
    std::size_t expected = 0;
    for (std::size_t fewer = 1; fewer < seconds.size(); ++fewer) {
      const auto halvings = static_cast<double>(fewer - expected);
      if (seconds[fewer] < seconds[expected] * (1 - 0.05 * halvings)) {
        ++expected;
        fewer = expected;  // from the next one on
      }
    }
    EmulationOptions options = options_of({1, 2, 1, 1}, "");
    options.backward.columns = 3;  // not used, but that there are some
    const StagesChoice chosen = choose_compressed_stages(outline, options, over(rate), true);
    EXPECT_EQ(chosen.columns, kRanks[expected]) << rate << ": " << chosen.why;
    ASSERT_EQ(chosen.candidates.size(), kRanks.size());
    for (std::size_t i = 0; i < kRanks.size(); ++i) {
      EXPECT_EQ(chosen.candidates[i].columns, kRanks[i]);
      EXPECT_EQ(chosen.candidates[i].step_seconds, seconds[i]);
    }
    SchemeOptions scheme;
    StageOptions stage;
    BackwardOptions factors{.columns = 3}, none;
    chosen.apply(scheme, stage, factors);
    chosen.apply(scheme, stage, none);
    EXPECT_EQ(std::tie(scheme.columns, factors.columns, none.columns, stage.compressed),
              std::make_tuple(chosen.columns, chosen.columns, 0, chosen.compressed));
    of_rate.push_back(chosen.columns);
    const std::size_t fastest = static_cast<std::size_t>(std::ranges::min_element(seconds) - seconds.begin());
    if (chosen.columns > 1 && rate < 1e8) {
      EXPECT_LT(kRanks[fastest], chosen.columns) << rate;  // control
    }
  }
  // Of what would be no shorter nothing is chosen: 32 columns of 40 tokens are not, of 2 by 2 values no number is.
  EmulationOptions options = options_of({1, 2, 1, 1}, "");
  options.backward.columns = 3;
  const StagesChoice short_ones =
      choose_compressed_stages(outline_of({1, 2, 1, 1}, 128, 40), options, over(4e8), true);
  EXPECT_EQ(std::make_pair(short_ones.candidates.front().columns, short_ones.columns),
            std::make_pair(16, 16));
  EXPECT_THROW(choose_compressed_stages(outline_of({1, 2, 1, 1}, 2, 2), options, over(4e8), true),
               UsageError);
  EXPECT_EQ(of_rate.front(), 32);
  EXPECT_TRUE(std::ranges::is_sorted(of_rate, std::greater<>())) << ::testing::PrintToString(of_rate);
  EXPECT_LT(of_rate.back(), of_rate.front());
}

TEST(CompressedStages, AreTheFirst) {
  const std::vector<int> even(kStages, 1);
  for (int k = 0; k <= kStages; ++k) {
    EmulationOptions options = options_of(even, "");
    options.stage.compressed = k;
    const Plan plan = make_tables(outline_of(even), options, kStages * kReplicas);
    for (int stage = 0; stage < kStages; ++stage) {
      const std::string head = "stage " + std::to_string(stage) + ":";
      for (const PlanRow& row : plan.rows) {
        if (row.strategy != "data_parallel" || !row.why.starts_with(head)) continue;
        EXPECT_EQ(row.scheme, stage < k ? "powersgd" : "dense") << head << " of " << k;
      }
    }
  }
}

}  // namespace
}  // namespace weft
