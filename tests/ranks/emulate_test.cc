// Training steps of an outline in wall time, ranks as threads. Bytes are compared with those of the simulated
// driver, which runs the same strategies; times with the timers that they are made of.
#include "workload/emulate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <ctime>
#include <limits>
#include <mutex>
#include <numeric>
#include <optional>
#include <thread>

#include "base/statistics.h"
#include "planner/plan.h"
#include "weft/error.h"
#include "weft/weft.h"
#include "workload/job_steps.h"
#include "workload/measure_kernels.h"
#include "workload/model_shapes.h"

namespace weft {
namespace {

// Seconds a step are 0.02 without communication; 30,000 parameters.
Outline outline() {
  Outline out;
  out.model = "three blocks";
  out.tokens_per_rank = 8;
  out.other_seconds = 0.001;
  out.blocks = {
      {"embedding", 0.001, 0.003, 0.001}, {"layer", 0.003, 0.005, 0.001}, {"head", 0.001, 0.003, 0.001}};
  out.tensors = {{"table", 12'000, 120, 100, 0, 1.0},
                 {"layer.weight", 10'000, 100, 100, 1, 0.5},
                 {"layer.bias", 100, 0, 0, 1, 0.75},
                 {"head.weight", 7'900, 79, 100, 2, 1.0}};
  out.parameters = 30'000;
  return out;
}

EmulationOptions options_of(const std::string& algorithm) {
  EmulationOptions out;
  out.parallel.scheme.name = algorithm;
  out.parallel.scheme.density = 0.05;
  out.parallel.scheme.buckets = {.bucket_bytes = 48'000, .dense_below = 200};
  out.steps = 4;
  out.warmup = 1;
  out.planned_link = LinkCost{.hop_seconds = 50e-6, .seconds_per_byte = 8e-9, .fold_seconds_per_byte = 0};
  return out;
}

std::vector<EmulatedSteps> emulate(int ranks, const EmulationOptions& options,
                                   const std::optional<EmulatedLink>& link = std::nullopt) {
  std::vector<EmulatedSteps> out(static_cast<std::size_t>(ranks));
  RunOptions run;
  run.link = link;
  run_ranks(ranks, run, [&](World& world) {
    out[static_cast<std::size_t>(world.rank())] = emulate_rank(world, outline(), options);
  });
  return out;
}

double sum(const std::vector<double>& values) { return std::accumulate(values.begin(), values.end(), 0.0); }

TEST(Emulate, SendsWhatTheSimulatedRanksSend) {
  int cases = 0;
  for (const char* algorithm : {"dense", "dense-bf16", "spardl", "topka", "oktopk", "powersgd"}) {
    EmulationOptions options = options_of(algorithm);
    options.micro_batches = 1 + ++cases % 3;
    const std::vector<EmulatedSteps> wall = emulate(3, options);
    const std::vector<EmulatedSteps> simulated =
        simulate_ranks(outline(), options, {.ranks = 3, .link = {.bytes_per_second = 1e9}, .costs = {}});
    ASSERT_EQ(simulated.size(), 3u);
    for (std::size_t r = 0; r < 3; ++r) {
      EXPECT_EQ(wall[r].payload_bytes.size(), 4u) << algorithm;
      EXPECT_EQ(wall[r].payload_bytes, simulated[r].payload_bytes) << algorithm << ", rank " << r;
      EXPECT_EQ(wall[r].formula_bytes, simulated[r].formula_bytes) << algorithm;
    }
  }
  // Of other gradients the packed bytes differ: the comparison above can fail.
  EmulationOptions other = options_of("spardl");
  const std::vector<double> bytes = emulate(3, other)[0].payload_bytes;
  other.seed = 2;
  EXPECT_NE(emulate(3, other)[0].payload_bytes, bytes);
}

// Experts that ranks share, in both drivers: with a capacity and without, whatever the policy.
TEST(Emulate, RowsOfExpertsTravelAsInVirtualTime) {
  ModelOptions o = model_options("gpt-moe", "tiny");
  const Outline moe = outline_from_flops(model_shape("gpt-moe", o), 48, 1e9);
  constexpr int kRanks = 4;
  for (const char* policy : {"lina", "plain"}) {
    for (const int ep : {2, 4}) {
      Outline outline = moe;
      if (ep == 2) outline.experts[0].capacity_factor = 0;
      EmulationOptions options = options_of("dense");
      options.experts.policy = policy;
      options.experts.slices = std::string_view(policy) == "lina" ? 3 : 1;
      options.experts.ranks = ep;
      options.micro_batches = 2;
      std::vector<EmulatedSteps> got(kRanks);
      run_ranks(kRanks, [&](World& world) {
        got[static_cast<std::size_t>(world.rank())] = emulate_rank(world, outline, options);
      });
      SimulationOptions simulation;
      simulation.ranks = kRanks;
      const std::vector<EmulatedSteps> expected = simulate_ranks(outline, options, simulation);
      for (std::size_t r = 0; r < got.size(); ++r) {
        EXPECT_EQ(got[r].payload_bytes, expected[r].payload_bytes) << policy << ", ep " << ep;
        EXPECT_EQ(static_cast<double>(got[r].formula_bytes), got[r].payload_bytes.back())
            << policy << ", ep " << ep;
      }
    }
  }
}

// A sleeping rank uses no core: five of them take as long as one.
TEST(Emulate, TimersOfManyRanksRunSideBySide) {
  const double computed = 4 * compute_seconds(outline());
  for (const int ranks : {1, 5}) {
    for (const EmulatedSteps& rank : emulate(ranks, options_of("spardl"))) {
      EXPECT_GE(sum(rank.step_seconds), computed - 1e-3);
      EXPECT_LT(sum(rank.step_seconds), computed * 4);  // one after the other: five times, and the exchange
    }
  }
}

double process_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

// Of the whole process: what ranks occupy adds up, what they sleep costs nothing.
TEST(Emulate, ComputationThatOccupiesACoreTakesProcessorTime) {
  EmulationOptions options = options_of("dense");
  const double computed = 2 * 5 * compute_seconds(outline());  // two ranks, warm-up among the steps
  const auto processor_seconds = [&] {
    const double before = process_seconds();
    emulate(2, options);
    return process_seconds() - before;
  };
  const double asleep = processor_seconds();
  options.occupies = true;
  const double awake = processor_seconds();
  EXPECT_GE(awake, computed - 1e-3);
  // Control. What the exchange takes is in both, however slow the build.
  EXPECT_LT(asleep, awake - computed / 2);
}

TEST(Emulate, InVirtualTimeWorkOnBucketsDelaysComputationThatOccupiesTheirCore) {
  const EmulationOptions options = options_of("spardl");
  SimulationOptions simulation{.ranks = 1, .link = {}, .costs = {}};
  const auto run = [&] { return simulate_ranks(outline(), options, simulation)[0]; };
  const double free = sum(run().step_seconds);
  EXPECT_GE(free, 4 * compute_seconds(outline()) - 1e-6);
  simulation.costs.kernels.scan_element = simulation.costs.kernels.check_element = 1e-7;
  // On a core of its own: hidden behind backward but for the last bucket's.
  const EmulatedSteps beside = run();
  const double work = sum(beside.compute_seconds);
  EXPECT_GT(work, 4e-3);
  EXPECT_LT(sum(beside.step_seconds), free + 0.7 * work);  // control
  simulation.costs.occupies = true;
  // What the communication thread computes itself comes on top (it looks at the tenth that was selected): it
  // takes the core too, and is no work of the pool's.
  EXPECT_NEAR(sum(run().step_seconds), free + 1.1 * work, 1e-4);
}

TEST(Emulate, ASlowLinkIsWaitedFor) {
  // 120,000 bytes of which 90,000 leave each port, as the last bucket's 36,000 do after backward.
  const EmulatedLink link{.bytes_per_second = 1e6, .latency_seconds = 50e-6};
  const std::vector<EmulatedSteps> slow = emulate(4, options_of("dense"), link);
  const std::vector<EmulatedSteps> fast = emulate(4, options_of("dense"));
  const double bytes = sum(slow[0].payload_bytes);
  EXPECT_NEAR(bytes, 4 * 2 * 0.75 * 120'000, 4 * 200);  // a short bucket may go by more bytes in fewer hops
  for (std::size_t r = 0; r < 4; ++r) {
    EXPECT_GE(sum(slow[r].step_seconds), bytes / 1e6 - 0.05);
    EXPECT_GT(sum(slow[r].waited_seconds), 0.3 * sum(slow[r].step_seconds));
    EXPECT_GT(sum(slow[r].step_seconds), sum(fast[r].step_seconds));
  }
}

// What a run knows of itself when it has ended: what its pieces took, by the clock of the walk, and its link.
TEST(Emulate, AStepIsPredictedFromWhatTheRunMeasuredOfItself) {
  const EmulatedLink link{.bytes_per_second = 1e6, .latency_seconds = 50e-6};
  EmulationOptions options = options_of("dense");
  options.warmup = 3;
  options.steps = 9;
  const std::vector<EmulatedSteps> ranks = emulate(4, options, link);
  std::vector<double> mean(numbers_of(ranks[0].times[0]).size());
  for (const EmulatedSteps& rank : ranks) {
    const std::vector<double> typical = numbers_of(median_of(rank.times));
    for (std::size_t i = 0; i < mean.size(); ++i) mean[i] += typical[i] / 4;
  }
  Outline own = outline();
  set_seconds(own, with_numbers(ranks[0].times[0], mean));
  // Of the 0.02 s of the timers; a rank that wakes up late has waited the less.
  EXPECT_NEAR(compute_seconds(own), compute_seconds(outline()), 0.15 * compute_seconds(outline()));
  const double measured = median(job_steps(seconds_of(ranks)));
  SimulationOptions simulation{.ranks = 4, .link = link, .costs = {}};
  EXPECT_NEAR(predict(own, options, simulation).step_seconds, measured, 0.15 * measured);
  // Control: another link is not what was measured.
  simulation.link.bytes_per_second *= 1.5;
  EXPECT_LT(predict(own, options, simulation).step_seconds, 0.85 * measured);
}

// A gpt whose layers take `seconds` of a micro-batch forward, for gradients of inputs, and for those of weights.
Outline even_layers(int layers, int micro_batches, double seconds) {
  ModelOptions o = model_options("gpt", "tiny");
  o.layers = layers;
  Outline out = outline_of(model_shape("gpt", o), 16 * micro_batches);
  for (OutlineBlock& block : out.blocks) {
    if (!block.name.starts_with("layer.")) continue;
    block.forward_seconds = seconds * micro_batches;
    block.backward_seconds = 2 * seconds * micro_batches;
  }
  return out;
}

// What else the machine does makes steps longer, never shorter, so the shortest counts. Where the machine is busy there
// are more of them: five runs at most, until one is no longer than `enough`.
double shortest_step(const Outline& layers, const EmulationOptions& options,
                     const std::optional<EmulatedLink>& link, double enough) {
  constexpr int kMostRuns = 5;
  const int stages = options.mesh.pp;
  double out = std::numeric_limits<double>::infinity();
  for (int run = 0; run < kMostRuns && out > enough; ++run) {
    std::vector<EmulatedSteps> ranks(static_cast<std::size_t>(stages));
    run_ranks(stages, {.config = {}, .link = link, .traces = nullptr, .decorate = {}}, [&](World& world) {
      ranks[static_cast<std::size_t>(world.rank())] = emulate_rank(world, layers, options);
    });
    out = std::min(out, std::ranges::min(job_steps(seconds_of(ranks))));
  }
  return out;
}

// Four layers on four stages, whose pieces take 15 ms of a micro-batch: a step takes as long as the timed table says.
TEST(Emulate, StagesTakeAsLongAsTheirTimedTable) {
  constexpr int kStages = 4, kMicroBatches = 8;
  constexpr double kPiece = 15e-3;  // forward, and each half of the backward
  const Outline layers = even_layers(kStages, kMicroBatches, kPiece);
  EmulationOptions options = options_of("dense");
  options.mesh = {.dp = 1, .pp = kStages};
  options.micro_batches = kMicroBatches;
  options.warmup = 1;
  options.steps = 5;
  const EmulatedLink link{.bytes_per_second = 1e8, .latency_seconds = 50e-6};
  const SimulationOptions simulation{.ranks = kStages, .link = link, .costs = {}};
  std::vector<double> measured, predicted;
  for (const char* schedule : {"1f1b", "zb-h1"}) {
    options.stage.schedule = schedule;
    predicted.push_back(predict(layers, options, simulation).step_seconds);
    measured.push_back(shortest_step(layers, options, link, 1.1 * predicted.back()));
    EXPECT_NEAR(measured.back(), predicted.back(), 0.1 * predicted.back()) << schedule;
  }
  // By hand: M (f + b + w) + (P - 1)(f + b + w), and with halves (P - 1)(f + b - w); messages take little.
  EXPECT_NEAR(predicted[0], 3 * kPiece * (kMicroBatches + kStages - 1), 0.02 * predicted[0]);
  EXPECT_NEAR(predicted[1], kPiece * (3 * kMicroBatches + kStages - 1), 0.02 * predicted[1]);
  // Control: the other schedule's table is not what was measured.
  EXPECT_GT(std::abs(measured[0] - predicted[1]), 0.1 * predicted[1]);
  EXPECT_GT(std::abs(measured[1] - predicted[0]), 0.1 * predicted[0]);
}

// On a free link a stage is idle as long as the formulas say: the idle time itself is held to them, not the step.
TEST(Emulate, StagesAreIdleAsLongAsTheFormulasSay) {
  constexpr int kStages = 4, kMicroBatches = 4;
  constexpr double kPiece = 25e-3;  // of a stage
  constexpr double kIdle = (kStages - 1) * 3 * kPiece;
  struct Case {
    const char* schedule;
    int chunks;
    double idle;
  };
  for (const Case& c : {Case{"gpipe", 1, kIdle}, Case{"1f1b", 1, kIdle}, Case{"interleaved", 2, kIdle / 2},
                        Case{"zb-h1", 1, kIdle / 3}}) {
    EmulationOptions options = options_of("dense");
    options.mesh = {.dp = 1, .pp = kStages};
    options.stage.schedule = c.schedule;
    options.stage.chunks = c.chunks;
    options.micro_batches = kMicroBatches;
    options.warmup = 1;
    options.steps = 5;
    const Outline layers = even_layers(kStages * c.chunks, kMicroBatches, kPiece / c.chunks);
    const double busy = 3 * kPiece * kMicroBatches;
    const double idle = shortest_step(layers, options, std::nullopt, busy + 1.1 * c.idle) - busy;
    EXPECT_NEAR(idle, c.idle, 0.1 * c.idle) << c.schedule;
    for (const double other : {kIdle, kIdle / 2, kIdle / 3}) {
      if (other == c.idle) continue;
      EXPECT_GT(std::abs(idle - other), 0.1 * other) << c.schedule;  // controls: of other schedules
    }
  }
}

TEST(Emulate, VirtualTimeSendsTheBytesOfWallTimeAndComputesByMeasuredCosts) {
  const EmulationOptions options = options_of("spardl");
  const std::vector<EmulatedSteps> wall = emulate(2, options);
  SimulationOptions simulation{.ranks = 2, .link = {}, .costs = {}};
  const EmulatedSteps free = simulate_ranks(outline(), options, simulation)[0];
  EXPECT_EQ(free.payload_bytes, wall[0].payload_bytes);
  EXPECT_EQ(sum(free.compute_seconds), 0);  // control
  simulation.costs.kernels = measure_kernels({.elements = 1 << 14, .repetitions = 1});
  const EmulatedSteps costly = simulate_ranks(outline(), options, simulation)[0];
  EXPECT_EQ(costly.payload_bytes, wall[0].payload_bytes);
  EXPECT_GT(sum(costly.compute_seconds), 0);
  EXPECT_GT(sum(costly.step_seconds), sum(free.step_seconds));
}

TEST(Emulate, TheTimeOfAPauseBelongsToNoStep) {
  EmulationOptions options = options_of("dense");
  std::atomic<int> calls{0};
  options.settles_after = [](std::int64_t) { return true; };
  options.before_step = [&](std::int64_t step) {
    ++calls;
    if (step > 0) std::this_thread::sleep_for(std::chrono::milliseconds(300));
  };
  for (const EmulatedSteps& rank : emulate(2, options)) EXPECT_LT(sum(rank.step_seconds), 4 * 0.3);
  EXPECT_EQ(calls, 2 * 5);
  options.settles_after = {};
  for (const EmulatedSteps& rank : emulate(2, options)) EXPECT_LT(sum(rank.step_seconds), 4 * 0.3);
}

TEST(Emulate, AFailureOnOneRankEndsAll) {
  EmulationOptions options = options_of("spardl");
  std::atomic<int> ended{0};
  std::atomic<int> next{0};
  options.before_step = [&](std::int64_t step) {
    if (step == 2 && next++ == 0) throw Error("one rank has had enough");
  };
  try {
    run_ranks(3, [&](World& world) {
      try {
        emulate_rank(world, outline(), options);
      } catch (...) {
        ++ended;
        throw;
      }
    });
    FAIL() << "nobody noticed";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("one rank has had enough"), std::string::npos) << e.what();
  }
  EXPECT_EQ(ended, 3);
}

TEST(Emulate, RefusesWhatCannotBeMeant) {
  run_ranks(1, [](World& world) {
    EmulationOptions options = options_of("dense");
    options.warmup = -1;
    EXPECT_THROW(emulate_rank(world, outline(), options), UsageError);
    Outline spoilt = outline();
    spoilt.blocks[0].forward_seconds = -1;
    EXPECT_THROW(emulate_rank(world, spoilt, options_of("dense")), UsageError);
  });
}

}  // namespace
}  // namespace weft
