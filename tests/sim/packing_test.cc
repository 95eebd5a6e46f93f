// Packing of experts that is chosen while a job runs, in virtual time.
#include "experts/packing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "base/statistics.h"
#include "experts/policies.h"
#include "weft/error.h"
#include "workload/emulate.h"
#include "workload/model_shapes.h"

namespace weft {
namespace {

constexpr int kRanks = 8;

struct Job {
  std::string packing = "auto";
  std::string policy = "lina", scheme = "dense";
  std::int64_t tokens = 512;
  double rate = 20e6;  // bytes a second
  int nodes = 2;       // 0: every rank is one
  double capacity = 1.25;
  int micro_batches = 1;
  std::int64_t memory = 0;
  std::int64_t steps = 26;  // behind the last decision that could double it once more
};

std::vector<EmulatedSteps> simulated(const Job& job) {
  ModelOptions o = model_options("gpt-moe", "tiny");
  o.vocabulary = 512;
  o.width = 64;
  o.layers = 4;
  o.experts.count = 8;
  o.experts.capacity_factor = job.capacity;
  o.experts.slices = find_expert_policy(job.policy).slices ? 2 : 1;
  EmulationOptions options;
  options.experts = o.experts;
  options.experts.policy = job.policy;
  options.experts.packing = job.packing;
  options.experts.packing_memory = job.memory;
  options.experts.ranks = is_auto_packing(job.packing) ? kRanks : kRanks / packing_number(job.packing);
  options.parallel.scheme.name = job.scheme;
  options.parallel.scheme.buckets.bucket_bytes = 64 << 10;
  options.micro_batches = job.micro_batches;
  options.warmup = 0;
  options.steps = job.steps;
  SimulationOptions simulation;
  simulation.ranks = kRanks;
  simulation.link.bytes_per_second = job.rate;
  simulation.link.latency_seconds = 20e-6;
  if (job.nodes > 0) {
    simulation.link.nodes = job.nodes;
    simulation.link.scale_up_bytes_per_second = 10 * job.rate;
  }
  const Outline outline = outline_from_flops(model_shape("gpt-moe", o), job.tokens, 2e10);
  return simulate_ranks(outline, options, simulation);
}

// The last steps, which nothing changes any more.
double late_step(const std::vector<EmulatedSteps>& ranks) {
  const std::vector<double>& all = ranks.front().step_seconds;
  return median(std::vector<double>(all.end() - 6, all.end() - 1));
}

int last_packing(const std::vector<EmulatedSteps>& ranks) { return ranks.front().packings.back().packing; }

TEST(SimulatedPacking, AllRanksDecideTheSameBehindTheSameSteps) {
  const std::vector<EmulatedSteps> ranks = simulated({});
  const std::vector<PackingChange>& first = ranks.front().packings;
  ASSERT_GE(first.size(), 2U);
  EXPECT_EQ(first[0].packing, 1);
  EXPECT_EQ(first[1].steps, 10);
  EXPECT_EQ(first[1].packing, 2);
  for (const EmulatedSteps& rank : ranks) {
    ASSERT_EQ(rank.packings.size(), first.size());
    for (std::size_t i = 0; i < first.size(); ++i) {
      EXPECT_EQ(rank.packings[i].steps, first[i].steps);
      EXPECT_EQ(rank.packings[i].packing, first[i].packing);
      EXPECT_EQ(rank.packings[i].bytes, first[i].bytes);
    }
  }
  // Two layers: of an expert 8 d d + 5 d values, with two moments; most get both of theirs.
  EXPECT_EQ(first[1].bytes, 2U * 2 * (8 * 64 * 64 + 5 * 64) * 3 * 4);
}

// Packing that was come to on the way is packing from the start.
TEST(SimulatedPacking, StepsBehindAMoveAreThoseOfAJobThatHadItFromTheStart) {
  const Job job;
  const std::vector<EmulatedSteps> chosen = simulated(job);
  Job fixed = job;
  fixed.packing = std::to_string(last_packing(chosen));
  fixed.steps = 8;
  ASSERT_NE(fixed.packing, "1");
  const std::vector<EmulatedSteps> from_start = simulated(fixed);
  EXPECT_NEAR(late_step(chosen) / late_step(from_start), 1, 0.01);
  EXPECT_EQ(chosen.front().payload_bytes.back(), from_start.front().payload_bytes.back());
  EXPECT_EQ(chosen.front().formula_bytes, from_start.front().formula_bytes);
  fixed.packing = "1";
  EXPECT_LT(late_step(chosen), 0.9 * late_step(simulated(fixed)));  // and it was worth it
}

// Two nodes: above 8 d / (k c) = 205 tokens a rank it pays, below it does not.
TEST(SimulatedPacking, IsChosenWhereItPays) {
  for (const std::int64_t tokens : {128, 512}) {
    const std::vector<EmulatedSteps> chosen = simulated({.tokens = tokens});
    EXPECT_EQ(last_packing(chosen) > 1, tokens > 205)
        << tokens << " tokens: " << chosen.front().packings.back().why;
    double best = 1e9;
    for (const char* packing : {"1", "2", "4"})
      best = std::min(best, late_step(simulated({.packing = packing, .tokens = tokens, .steps = 8})));
    EXPECT_LT(late_step(chosen), 1.1 * best) << tokens;
  }
}

TEST(SimulatedPacking, EveryPolicySchemeAndCut) {
  int packed = 0;
  for (const ExpertPolicy& policy : kExpertPolicies) {
    const bool capped = policy.first || policy.slices;
    const Job job{.policy = std::string(policy.name),
                  .scheme = capped ? "dense" : "spardl",
                  .capacity = capped ? 1.25 : 0.0,
                  .micro_batches = policy.slices ? 2 : 1,
                  .steps = 13};
    const std::vector<EmulatedSteps> ranks = simulated(job);
    EXPECT_EQ(ranks.front().step_seconds.size(), 13U) << policy.name;
    for (const EmulatedSteps& rank : ranks) EXPECT_EQ(rank.packings.size(), ranks[0].packings.size());
    packed += last_packing(ranks) > 1;
  }
  EXPECT_GT(packed, 3);
}

TEST(SimulatedPacking, KeepsToTheMemory) {
  const std::int64_t expert = (8 * 64 * 64 + 5 * 64) * 4 * 4;  // value, gradient, two moments
  const Job job{.memory = 2 * 1 * expert, .steps = 12};        // of two layers, one each
  EXPECT_EQ(last_packing(simulated(job)), 1);
  Job more = job;
  more.memory = 2 * 2 * expert;
  EXPECT_EQ(last_packing(simulated(more)), 2);
  Job less = job;
  less.memory = expert;
  EXPECT_THROW(simulated(less), UsageError);
}

}  // namespace
}  // namespace weft
