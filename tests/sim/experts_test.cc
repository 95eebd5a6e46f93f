// Layers of experts in training steps of an outline, in virtual time: every policy on every layout, what the
// traces show, and what sharing the network costs.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "experts/policies.h"
#include "measure/emulated.h"
#include "planner/slices.h"
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
  double flops = 2e9;  // a second
  double merge = 0;    // seconds of its backward
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
  Outline outline = outline_from_flops(model_shape("gpt-moe", o), job.tokens, job.flops);
  for (OutlineExperts& layer : outline.experts) layer.merge_backward_seconds = job.merge;
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

std::map<std::string, int> operations_of(const Trace& trace) {
  std::map<std::string, int> out;
  for (const TraceEvent& e : trace.events()) out[e.name] += e.kind == TraceEvent::Kind::operation;
  return out;
}

// Four all-to-alls of rows for each layer, micro-batch and slice, none where no expert is remote; without a capacity
// one of counts in addition for each layer and micro-batch, in forward (backward knows what came).
TEST(SimulatedExperts, AllToAllsAreAsManyAsThereMustBe) {
  constexpr int kLayers = 2, kSlices = 3;
  constexpr std::int64_t kSteps = 2;
  for (const int ep : {1, 2, 8}) {
    for (const double capacity : {1.25, 0.0}) {
      for (const int micro_batches : {1, 2}) {
        const Outcome run = simulated({.ep = ep,
                                       .slices = kSlices,
                                       .capacity = capacity,
                                       .micro_batches = micro_batches,
                                       .steps = kSteps});
        for (const Trace& trace : run.traces) {
          std::map<std::string, int> found = operations_of(trace);
          const int of_layers = ep == 1 ? 0 : kLayers * micro_batches * static_cast<int>(kSteps);
          for (const char* name : {"dispatch", "combine", "gradients of dispatch", "gradients of combine"})
            EXPECT_EQ(found[name], kSlices * of_layers) << name << ", ep " << ep << ", capacity " << capacity;
          EXPECT_EQ(found["rows for each expert"], capacity > 0 ? 0 : of_layers) << "ep " << ep;
        }
      }
    }
  }
}

double forward_seconds(const Trace& trace) {
  return seconds_of(trace, "dispatch") + seconds_of(trace, "combine");
}
double backward_seconds(const Trace& trace) {
  return seconds_of(trace, "gradients of dispatch") + seconds_of(trace, "gradients of combine");
}

// Gradients' micro-ops that start while a merge's backward is computed, behind which all-to-alls come: by what the
// driver says, whatever was announced.
int starts_before_all_to_alls(const std::vector<Trace>& traces) {
  int out = 0;
  for (const Trace& trace : traces) {
    for (const TraceEvent& c : trace.events()) {
      if (c.kind != TraceEvent::Kind::computing || !c.name.starts_with("backward") ||
          !c.name.ends_with(".experts"))
        continue;
      for (const TraceEvent& e : trace.events())
        out += e.kind == TraceEvent::Kind::micro_op && e.traffic == TrafficClass::gradient &&
               e.started > c.started && e.started < c.finished;
    }
  }
  return out;
}

// Gradients of parameters give way, and none of them loses its patience: on flat links and nodes, in any number
// of slices.
TEST(SimulatedExperts, GradientsGiveWay) {
  for (const char* policy : {"lina", "micro-ops", "deferred"}) {
    for (const int slices : {1, 2, 5}) {
      if (slices > 1 && !find_expert_policy(policy).slices) continue;
      for (const int nodes : {0, 2}) {
        for (const int ep : {2, 8}) {
          const Outcome run = simulated({.policy = policy, .ep = ep, .slices = slices, .nodes = nodes});
          for (const Trace& trace : run.traces) {
            const TraceReport report = verify_trace(trace);
            EXPECT_TRUE(report.breaches.empty()) << policy << ": " << report.breaches.front();
            EXPECT_EQ(report.aged, 0u)
                << policy << ", " << slices << " slices, " << nodes << " nodes, ep " << ep;
          }
        }
      }
    }
  }
  // Controls: where nothing gives way, and where nothing is announced, it is seen.
  EXPECT_FALSE(verify_trace(simulated({.policy = "plain"}).traces[0]).breaches.empty());
  EXPECT_GT(starts_before_all_to_alls(simulated({.policy = "priority", .merge = 2e-3}).traces), 0);
  EXPECT_EQ(starts_before_all_to_alls(simulated({.policy = "lina", .merge = 2e-3}).traces), 0);
}

double longest_hold(const std::vector<Trace>& traces) {
  double out = 0;
  for (const Trace& trace : traces) {
    for (const TraceEvent& e : trace.events())
      if (e.kind == TraceEvent::Kind::hold) out = std::max(out, seconds(e.finished - e.started));
  }
  return out;
}

// A layer whose backward takes longer than anything is held for by default: what is announced says how long it
// takes, from the first step on.
TEST(SimulatedExperts, LongLayersAgeNothing) {
  for (const char* policy : {"deferred", "lina", "micro-ops"}) {
    for (const int micro_batches : {1, 2}) {
      const Outcome run = simulated({.policy = policy, .micro_batches = micro_batches, .flops = 2e7});
      for (const Trace& trace : run.traces) EXPECT_EQ(verify_trace(trace).aged, 0u) << policy;
      // Control: longer than ten times that.
      if (policy == std::string("deferred")) {
        EXPECT_GT(longest_hold(run.traces), 10 * seconds(Config{}.hold_limit));
      }
    }
  }
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

// As docs/results/lina.md would have it: 12 layers, every second with 8 experts and one that all tokens go through, a
// head of its own, 1280 tokens a rank, on 2 nodes of 4 ranks that are ten times as fast inside; hierarchical
// all-to-alls, rows of the embedding's table, and the buckets that are plain overlap's best of 1, 4 and 25 MiB.
Outcome on_two_nodes(const std::string& policy) {
  ModelOptions o = model_options("gpt-moe", "tiny");
  o.vocabulary = 12'000;
  o.untied = true;
  o.context = 128;
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
  options.scheme.buckets.bucket_bytes = 1 << 20;
  options.tables.way = "embrace";
  options.steps = 2;
  const Outline outline = outline_from_flops(model_shape("gpt-moe", o), 1280, 100e9);
  constexpr double kPort = 1.075e9 / 8;
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

// A step takes as long as it was predicted with the number of slices that is chosen, and no less with another.
// Where latency is what a message costs, one slice; where bytes are, several.
TEST(SimulatedExperts, SlicesAreChosenByPrediction) {
  ModelOptions o = model_options("gpt-moe", "tiny");
  o.vocabulary = 512;
  o.width = 64;
  o.layers = 4;
  o.experts.count = 8;
  const Outline outline = outline_from_flops(model_shape("gpt-moe", o), 128, 2e9);
  const auto choose = [&](double rate, double latency, const std::string& policy, int ep) {
    EmulationOptions emulation;
    emulation.parallel.scheme.name = "dense";
    emulation.experts = o.experts;
    emulation.experts.policy = policy;
    emulation.experts.ranks = ep;
    emulation.experts.slices = kAutoSlices;
    SimulationOptions simulation;
    simulation.ranks = kRanks;
    simulation.link.bytes_per_second = rate;
    simulation.link.latency_seconds = latency;
    const SlicesChoice choice = choose_slices(outline, emulation, simulation);
    for (const SlicesChoice::Candidate& candidate : choice.candidates) {
      emulation.experts.slices = candidate.slices;
      EXPECT_EQ(predict(outline, emulation, simulation).step_seconds, candidate.step_seconds);
      const auto chosen =
          std::ranges::find(choice.candidates, choice.slices, &SlicesChoice::Candidate::slices);
      EXPECT_LE(chosen->step_seconds, candidate.step_seconds);
    }
    return choice;
  };
  const SlicesChoice slow = choose(20e6, 20e-6, "lina", 8), late = choose(1e9, 5e-3, "lina", 8);
  EXPECT_GT(slow.slices, 1) << slow.why;
  EXPECT_EQ(late.slices, 1) << late.why;
  EXPECT_EQ(slow.candidates.size(), kSlices.size());
  // Nothing to choose.
  EXPECT_EQ(choose(20e6, 20e-6, "micro-ops", 8).slices, 1);
  EXPECT_TRUE(choose(20e6, 20e-6, "lina", 1).candidates.empty());
  EmulationOptions emulation;
  emulation.experts = o.experts;
  emulation.experts.ranks = 2;
  Outline blind = outline;
  blind.experts.clear();
  for (OutlineTensor& tensor : blind.tensors) tensor.of = OutlineTensor::Of::block;
  EXPECT_THROW(choose_slices(blind, emulation, {.ranks = 2}), UsageError);
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
