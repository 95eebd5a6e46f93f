// All four systems in one step, in virtual time: experts that four ranks share, tables of which rows travel, stages
// whose gradients travel as factors, sparse or thin gradients. What holds of each alone holds of all together.
#include <gtest/gtest.h>

#include <cmath>

#include "measure/emulated.h"
#include "step/strategies.h"
#include "workload/emulate.h"
#include "workload/model_shapes.h"

namespace weft {
namespace {

struct Job {
  std::string scheme = "spardl";
  std::string policy = "lina";
  std::string tables = "embrace";
  int columns = 2;
  bool untied = true;
};

EmulatedRun simulated(const Job& job, std::vector<Trace>& traces) {
  ModelOptions o = model_options("gpt-moe", "tiny");
  o.vocabulary = 512;
  o.width = 64;
  o.layers = 4;
  o.experts.count = 8;
  o.untied = job.untied;
  o.experts.slices = job.policy == "lina" ? 2 : 1;
  constexpr std::int64_t kTokens = 128;
  const Outline outline = outline_from_flops(model_shape("gpt-moe", o), kTokens, 2e9);
  TrainOptions options;
  options.model = "gpt-moe";
  options.sizes = o;
  options.sizes.stage.stages = 2;
  options.sizes.experts.policy = job.policy;
  options.sizes.experts.ranks = 4;
  options.scheme.name = job.scheme;
  options.scheme.density = 0.02;
  options.scheme.buckets.bucket_bytes = 64 << 10;
  options.tables.way = job.tables;
  options.backward.columns = job.columns;
  options.accumulate = 4;
  options.steps = 4;
  SimulationOptions simulation;
  simulation.ranks = 8;
  simulation.link.bytes_per_second = 20e6;
  simulation.link.latency_seconds = 20e-6;
  simulation.traces = &traces;
  return simulate(options, outline, simulation);
}

TEST(AllFour, GradientsGiveWayToWhatBlocks) {
  for (const char* scheme : {"spardl", "powersgd"}) {
    for (const bool untied : {true, false}) {
      std::vector<Trace> traces;
      simulated({.scheme = scheme, .tables = untied ? "embrace" : "scheme", .untied = untied}, traces);
      ASSERT_EQ(traces.size(), 8u);
      for (const Trace& trace : traces) {
        const TraceReport report = verify_trace(trace);
        EXPECT_TRUE(report.breaches.empty()) << scheme << ": " << report.breaches.front();
        EXPECT_EQ(report.aged, 0u) << scheme;
      }
    }
  }
  // Control: where nothing gives way, it is seen.
  std::vector<Trace> traces;
  simulated({.scheme = "dense", .policy = "plain"}, traces);
  std::size_t breaches = 0;
  for (const Trace& trace : traces) breaches += verify_trace(trace).breaches.size();
  EXPECT_GT(breaches, 0u);
}

// Faster than plain 3D, and than each system alone beside it, on a link this slow; what it sends is less.
TEST(AllFour, TogetherFasterThanEachAlone) {
  const auto seconds_of = [](const Job& job) {
    std::vector<Trace> traces;
    double most = 0;
    for (const EmulatedSteps& rank : simulated(job, traces).ranks) {
      double sum = 0;
      for (const double s : rank.step_seconds) sum += s;
      most = std::max(most, sum / static_cast<double>(rank.step_seconds.size()));
    }
    return most;
  };
  const Job plain{.scheme = "dense", .policy = "plain", .tables = "dense", .columns = 0};
  const auto with = [&plain](auto change) {
    Job out = plain;
    change(out);
    return out;
  };
  const double all = seconds_of({});
  EXPECT_LT(all, seconds_of(plain));
  EXPECT_LT(all, seconds_of(with([](Job& j) { j.scheme = "spardl"; })));
  EXPECT_LT(all, seconds_of(with([](Job& j) { j.policy = "lina"; })));
  EXPECT_LT(all, seconds_of(with([](Job& j) { j.tables = "embrace"; })));
  EXPECT_LT(all, seconds_of(with([](Job& j) { j.columns = 2; })));
}

}  // namespace
}  // namespace weft
