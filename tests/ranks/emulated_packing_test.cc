// Packing of experts in an emulated job: tokens that take far longer than experts, on two nodes.
#include <gtest/gtest.h>

#include "experts/packing.h"
#include "weft/world.h"
#include "workload/emulate.h"
#include "workload/model_shapes.h"

namespace weft {
namespace {

TEST(EmulatedPacking, RanksPackTogetherBehindStep10) {
  constexpr int kRanks = 4;
  ModelOptions o = model_options("gpt-moe", "tiny");
  const Outline outline = outline_from_flops(model_shape("gpt-moe", o), 256, 1e11);
  EmulationOptions options;
  options.experts = o.experts;
  options.experts.ranks = kRanks;
  options.experts.packing = "auto";
  options.parallel.scheme.name = "dense";
  options.warmup = 0;
  options.steps = 12;
  const EmulatedLink link{
      .bytes_per_second = 4e6, .latency_seconds = 50e-6, .nodes = 2, .scale_up_bytes_per_second = 4e7};
  options.packing_link = link;
  RunOptions run;
  run.link = link;
  std::vector<EmulatedSteps> ranks(kRanks);
  run_ranks(kRanks, run, [&](World& world) {
    ranks[static_cast<std::size_t>(world.rank())] = emulate_rank(world, outline, options);
  });
  for (const EmulatedSteps& rank : ranks) {
    ASSERT_EQ(rank.packings.size(), 2U);
    EXPECT_EQ(rank.packings[1].steps, 10);
    EXPECT_EQ(rank.packings[1].packing, 2);
    EXPECT_EQ(rank.packings[1].bytes, ranks[0].packings[1].bytes);
    EXPECT_EQ(rank.step_seconds.size(), 12U);
    // Half as many bytes leave a rank, and what sums of experts have comes on top.
    EXPECT_NE(rank.payload_bytes[9], rank.payload_bytes[11]);
  }
  EXPECT_LE(ranks[0].payload_bytes[11], static_cast<double>(ranks[0].formula_bytes));
}

}  // namespace
}  // namespace weft
