// Layers of experts in training steps of an outline, in virtual time: every policy on every layout, what the
// traces show, and what sharing the network costs.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "experts/policies.h"
#include "measure/emulated.h"
#include "step/strategies.h"
#include "weft/error.h"
#include "workload/emulate.h"
#include "workload/model_shapes.h"
#include "world/calibrate.h"

namespace weft {
namespace {

constexpr int kRanks = 8;

struct Job {
  std::string policy = "lina";
  int ep = 8;
  int slices = 2;
  double capacity = 1.25;
  int micro_batches = 1;
  int nodes = 0;
  double rate = 20e6;  // bytes a second
  bool gradients = true;
  std::int64_t tokens = 128;
  std::int64_t steps = 3;
};

struct Outcome {
  double step_seconds = 0, waited_seconds = 0;
  std::vector<Trace> traces;
};

double mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

Outcome simulated(const Job& job) {
  ModelOptions o = model_options("gpt-moe", "tiny");
  o.vocabulary = 512;
  o.width = 64;
  o.layers = 4;
  o.experts.count = 8;
  o.experts.capacity_factor = job.capacity;
  const bool cut = find_expert_policy(job.policy).slices;
  o.experts.slices = cut ? job.slices : 1;
  const Outline outline = outline_from_flops(model_shape("gpt-moe", o), job.tokens, 2e9);
  TrainOptions options;
  options.model = "gpt-moe";
  options.sizes = o;
  options.sizes.experts.policy = job.policy;
  options.sizes.experts.ranks = job.ep;
  options.scheme.name = "dense";
  options.scheme.buckets.bucket_bytes = 64 << 10;
  options.accumulate = job.micro_batches;
  options.steps = job.steps;
  SimulationOptions simulation;
  simulation.ranks = kRanks;
  simulation.link.bytes_per_second = job.rate;
  simulation.link.latency_seconds = 20e-6;
  if (job.nodes > 0) {
    simulation.link.nodes = job.nodes;
    simulation.link.scale_up_bytes_per_second = 10 * job.rate;
  }
  Outcome out;
  simulation.traces = &out.traces;
  const EmulatedRun run = simulate(options, outline, simulation);
  for (const EmulatedSteps& rank : run.ranks) {
    out.step_seconds = std::max(out.step_seconds, mean(rank.step_seconds));
    out.waited_seconds = std::max(out.waited_seconds, mean(rank.waited_seconds));
  }
  return out;
}

TEST(SimulatedExperts, EveryPolicyRunsOnEveryLayout) {
  for (const ExpertPolicy& policy : kExpertPolicies) {
    for (const int ep : {1, 2, 8}) {
      for (const double capacity : {1.25, 0.0}) {
        for (const int micro_batches : {1, 2}) {
          const Outcome run = simulated({.policy = std::string(policy.name),
                                         .ep = ep,
                                         .slices = 3,
                                         .capacity = capacity,
                                         .micro_batches = micro_batches,
                                         .nodes = ep == 2 ? 2 : 0});
          EXPECT_GT(run.step_seconds, 0) << policy.name;
        }
      }
    }
  }
}

// Seconds of all operations of that name, from when the engine knew of them.
double seconds_of(const Trace& trace, const std::string& name) {
  double sum = 0;
  for (const TraceEvent& e : trace.events()) {
    if (e.kind == TraceEvent::Kind::operation && e.name == name) sum += seconds(e.finished - e.ready);
  }
  return sum;
}

double forward_seconds(const Trace& trace) {
  return seconds_of(trace, "dispatch") + seconds_of(trace, "combine");
}
double backward_seconds(const Trace& trace) {
  return seconds_of(trace, "gradients of dispatch") + seconds_of(trace, "gradients of combine");
}

// Gradients of parameters give way, and none of them loses its patience.
TEST(SimulatedExperts, GradientsGiveWay) {
  for (const char* policy : {"lina", "micro-ops", "deferred"}) {
    const Outcome run = simulated({.policy = policy});
    for (const Trace& trace : run.traces) {
      const TraceReport report = verify_trace(trace);
      EXPECT_TRUE(report.breaches.empty()) << policy << ": " << report.breaches.front();
      EXPECT_EQ(report.aged, 0u) << policy;
    }
  }
  // Control: where nothing gives way, it is seen.
  const Outcome plain = simulated({.policy = "plain"});
  EXPECT_FALSE(verify_trace(plain.traces[0]).breaches.empty());
}

// Seconds in which experts compute in backward while rows are on their way.
double overlap(const Trace& trace) {
  std::vector<std::pair<Time, Time>> moving, computing;
  for (const TraceEvent& e : trace.events()) {
    if (e.kind == TraceEvent::Kind::micro_op && e.traffic == TrafficClass::blocking && e.bytes > 256)
      moving.emplace_back(e.started, e.finished);
    if (e.kind == TraceEvent::Kind::computing && e.name.starts_with("backward") &&
        e.name.find(".slice.") != std::string::npos)
      computing.emplace_back(e.started, e.finished);
  }
  double sum = 0;
  for (const auto& [from, to] : computing) {
    for (const auto& [begins, ends] : moving)
      sum += std::max(0.0, seconds(std::min(to, ends) - std::max(from, begins)));
  }
  return sum;
}

TEST(SimulatedExperts, SlicesOverlapWithExpertsInBackward) {
  const Outcome sliced = simulated({.policy = "lina"}), naive = simulated({.policy = "micro-ops"});
  for (const Trace& trace : sliced.traces) EXPECT_GT(overlap(trace), 0);
  for (const Trace& trace : naive.traces) EXPECT_EQ(overlap(trace), 0);
}

// A link that is fair: an all-to-all beside one all-reduce gets half of a port, no less. A backward one is then
// 1.3 to 2.2 times as long as a forward one, where gradients are as many bytes as here.
TEST(SimulatedExperts, PlainOverlapIsSlowedDownAsAFairLinkDoes) {
  const Outcome plain = simulated({.policy = "plain", .rate = 8e6});
  for (const Trace& trace : plain.traces) {
    const double ratio = backward_seconds(trace) / forward_seconds(trace);
    EXPECT_GT(ratio, 1.3);
    EXPECT_LT(ratio, 2.2);
  }
  // With priority they are as long as one another.
  const Outcome first = simulated({.policy = "micro-ops", .rate = 8e6});
  for (const Trace& trace : first.traces) EXPECT_LT(backward_seconds(trace) / forward_seconds(trace), 1.3);
}

// 12 layers, every second with experts (and one that is shared), 1,024 tokens a rank, on 2 nodes of 4 ranks that
// are ten times as fast inside; hierarchical all-to-alls.
Outcome on_two_nodes(const std::string& policy) {
  ModelOptions o = model_options("gpt-moe", "tiny");
  o.vocabulary = 2048;
  o.context = 256;
  o.width = 256;
  o.heads = 4;
  o.layers = 12;
  o.experts.count = 8;
  o.experts.shared = 1;
  o.experts.slices = 1;
  TrainOptions options;
  options.model = "gpt-moe";
  options.sizes = o;
  options.sizes.experts.ranks = kRanks;
  options.sizes.experts.policy = policy;
  options.sizes.experts.all_to_all = "hierarchical";
  options.scheme.name = "dense";
  options.scheme.buckets.bucket_bytes = 4 << 20;
  options.steps = 2;
  const Outline outline = outline_from_flops(model_shape("gpt-moe", o), 1024, 2e12);
  constexpr double kPort = 30e9 / 8;
  SimulationOptions simulation;
  simulation.ranks = kRanks;
  simulation.link = {.bytes_per_second = kPort,
                     .latency_seconds = 20e-6,
                     .nodes = 2,
                     .scale_up_bytes_per_second = 10 * kPort};
  options.planned_link = {.hop_seconds = 20e-6, .seconds_per_byte = 1 / kPort, .fold_seconds_per_byte = 0};
  set_nodes(options.planned_link, kRanks, 2, 0, 10 * kPort);
  Outcome out;
  simulation.traces = &out.traces;
  const EmulatedRun run = simulate(options, outline, simulation);
  out.step_seconds = mean(run.ranks[0].step_seconds);
  return out;
}

double bytes_to_other_nodes(const Trace& trace, int rank, TrafficClass traffic) {
  double sum = 0;
  for (const TraceEvent& e : trace.events()) {
    if (e.kind == TraceEvent::Kind::micro_op && e.traffic == traffic && e.peer / 4 != rank / 4)
      sum += static_cast<double>(e.bytes);
  }
  return sum;
}

// The same where ranks share a node's port: gradients by two levels, all-to-alls by hierarchy.
TEST(SimulatedExperts, PlainOverlapOnTwoNodesIsSlowedDownAsAFairLinkDoes) {
  const Outcome plain = on_two_nodes("plain");
  double gradients = 0, all_to_alls = 0;
  for (int r = 0; r < kRanks; ++r) {
    const Trace& trace = plain.traces[static_cast<std::size_t>(r)];
    const double ratio = backward_seconds(trace) / forward_seconds(trace);
    EXPECT_GT(ratio, 1.3) << r;
    EXPECT_LT(ratio, 2.2) << r;
    gradients += bytes_to_other_nodes(trace, r, TrafficClass::gradient);
    all_to_alls += bytes_to_other_nodes(trace, r, TrafficClass::blocking);
  }
  EXPECT_GT(gradients / (all_to_alls / 2), 0.6) << "backward has half of the all-to-alls";
  // Control: where all-to-alls go first, they are as long backward as forward.
  const Outcome first = on_two_nodes("micro-ops");
  for (const Trace& trace : first.traces) EXPECT_LT(backward_seconds(trace) / forward_seconds(trace), 1.3);
}

TEST(SimulatedExperts, LinaIsFasterThanWhatItIsComparedWith) {
  std::map<std::string, double> step;
  for (const ExpertPolicy& policy : kExpertPolicies)
    step[std::string(policy.name)] =
        simulated({.policy = std::string(policy.name), .slices = 4}).step_seconds;
  EXPECT_LT(step["micro-ops"], step["plain"]);
  EXPECT_LT(step["lina"], step["micro-ops"]);
  for (const auto& [name, took] : step) EXPECT_LE(step["lina"], took * 1.001) << name;
}

TEST(SimulatedExperts, AnOutlineThatDoesNotTellExpertsApartIsRefused) {
  ModelOptions o = model_options("gpt-moe", "tiny");
  Outline outline = outline_from_flops(model_shape("gpt-moe", o), 16, 1e9);
  outline.experts.clear();
  for (OutlineTensor& tensor : outline.tensors) tensor.of = OutlineTensor::Of::block;
  EmulationOptions options;
  options.parallel.scheme.name = "dense";
  options.experts = o.experts;
  options.experts.ranks = 2;
  SimulationOptions simulation;
  simulation.ranks = 2;
  EXPECT_THROW(static_cast<void>(simulate_ranks(outline, options, simulation)), UsageError);
  options.experts.ranks = 1;
  EXPECT_NO_THROW(static_cast<void>(simulate_ranks(outline, options, simulation)));
}

}  // namespace
}  // namespace weft
