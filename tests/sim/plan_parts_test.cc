// What a predicted step is made of, for each stage: computation, work, bubble, what is exposed and what is behind others.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "planner/plan.h"
#include "workload/model_shapes.h"
#include "workload/step_waits.h"

namespace weft {
namespace {

using namespace std::chrono_literals;

// Every piece is rounded to a nanosecond; a step here has some hundred.
constexpr double kRounding = 1e-6;

// ---- waits of a rank ----

constexpr Occasion kSum{.group = 1, .slot = 2, .step = 3, .micro_batch = 0},
    kMessage{.group = 1, .slot = 4, .step = 3, .micro_batch = 0};

TEST(StepWaits, AreForOthersUntilTheLastOfThemHasStarted) {
  Starts starts({0, 1, 2});
  WaitAccount early(starts, 0), late(starts, 1), later(starts, 2);
  for (WaitAccount* rank : {&early, &late, &later}) rank->begin_step();
  early.waited("tied", kSum, 10ms, 10ms, 50ms);
  later.waited("tied", kSum, 40ms, 40ms, 50ms);
  late.waited("tied", kSum, 20ms, 25ms, 50ms);
  const auto check = [](const WaitAccount& rank, double for_others, double under_way) {
    const StepWaits waits = rank.take().at(0);
    EXPECT_NEAR(waits.for_others, for_others, 1e-12);
    EXPECT_NEAR(waits.under_way, under_way, 1e-12);
    EXPECT_NEAR(waits.waited.at("tied").for_others, for_others, 1e-12);
    EXPECT_NEAR(waits.waited.at("tied").seconds, for_others + under_way, 1e-12);
  };
  check(early, 0.03, 0.01);
  check(late, 0.015, 0.01);
  check(later, 0, 0.01);  // it is who the others wait for: its own start is none of its waits
}

// A sum with rank 1 that takes 50 ms, an update, and a message that rank 2 sends after `sent`, before which it has waited
// for the sum or has computed.
struct Told {
  Time sent{}, update{};
  bool gives_between = false;
  std::vector<int> stages{0, 0, 1};
  bool sender_waits = false;
};
StepWaits sum_and_message(const Told& told) {
  Starts starts(told.stages);
  WaitAccount rank(starts, 0), sender(starts, 2);
  rank.begin_step();
  sender.begin_step();
  starts.add(kSum, {1, 0ms});
  if (told.sender_waits) sender.waited("data_parallel", kSum, 0ms, 0ms, 50ms);
  starts.add(kMessage, {2, told.sent});
  rank.waited("data_parallel", kSum, 0ms, 0ms, 50ms);
  if (told.gives_between) rank.gives(50ms);
  const Time from = 50ms + told.update;
  rank.waited("pipeline", kMessage, 0ms, from, std::max(from, told.sent + 5ms));
  return rank.take().at(0);
}

TEST(StepWaits, UnderWayAreHiddenBehindThoseForOthersThatFollow) {
  // As if the sum took no time: the message would have been awaited until it was sent, at 60 ms.
  const StepWaits hidden = sum_and_message({.sent = 60ms});
  EXPECT_NEAR(hidden.for_others, 0.06, 1e-12);
  EXPECT_NEAR(hidden.under_way, 0.005, 1e-12);
  EXPECT_NEAR(hidden.waited.at("data_parallel").seconds, 0.05, 1e-12);  // what was awaited is as it was
  EXPECT_NEAR(hidden.waited.at("data_parallel").for_others, 0, 1e-12);
  // An update of 4 ms is none of it.
  const StepWaits updated = sum_and_message({.sent = 60ms, .update = 4ms});
  EXPECT_NEAR(updated.for_others, 0.056, 1e-12);
  EXPECT_NEAR(updated.under_way, 0.005, 1e-12);
  // Of one that was sent meanwhile only what comes behind it would have been saved.
  const StepWaits half = sum_and_message({.sent = 30ms});
  EXPECT_NEAR(half.for_others, 0.03, 1e-12);
  EXPECT_NEAR(half.under_way, 0.02, 1e-12);
  // Control: who gave something to others in between has delayed them by the whole sum.
  const StepWaits given = sum_and_message({.sent = 60ms, .gives_between = true});
  EXPECT_NEAR(given.under_way, 0.055, 1e-12);
  EXPECT_NEAR(given.for_others, 0.01, 1e-12);
}

// What is late by the same sum is not waited for: it would have come 50 ms earlier, too.
TEST(StepWaits, ForOthersAreNotThoseThatTheSameHasKept) {
  for (const std::vector<int>& stages :
       {std::vector<int>{0, 0, 0}, {0, 0, 1}}) {  // the sum is of all three of them
    const StepWaits with_it = sum_and_message({.sent = 60ms, .stages = stages, .sender_waits = true});
    EXPECT_NEAR(with_it.for_others, 0.01, 1e-12);
    EXPECT_NEAR(with_it.under_way, 0.055, 1e-12);
  }
  // Control: one of the same stage that has not waited was late with something else.
  const StepWaits late = sum_and_message({.sent = 60ms, .stages = {0, 0, 0}});
  EXPECT_NEAR(late.for_others, 0.06, 1e-12);
  EXPECT_NEAR(late.under_way, 0.005, 1e-12);
}

// ---- of simulated ranks ----

constexpr double kForward = 1.2e-3;  // of a micro-batch and layer; each half of the backward takes as long
constexpr std::int64_t kTokens = 64;

struct Job {
  Mesh mesh;
  int micro_batches = 4;
  std::string scheme = "dense", model = "gpt", schedule = "1f1b", updates_wait;
  int layers = 4;
  double rate = 20e6;  // bytes a second; 0: sending is free
  double latency = 20e-6;
  bool kernels = true;
  double update = 0;  // seconds of a layer's
};

// Layers that take as long as one another; what stands around them takes no time.
Outline outline_of_job(const Job& job) {
  ModelOptions o = model_options(job.model, "tiny");
  o.width = 32;
  o.heads = 4;
  o.vocabulary = 64;
  o.layers = job.layers;
  if (job.model == "gpt-moe") {
    o.experts.count = 4;
    o.experts.capacity_factor = 0;  // whoever has more rows computes longer
    return outline_from_flops(model_shape(job.model, o), kTokens, 2e8);
  }
  Outline out = outline_of(model_shape(job.model, o), kTokens * job.micro_batches);
  for (OutlineBlock& block : out.blocks) {
    if (!block.name.starts_with("layer.")) continue;
    block.forward_seconds = kForward * job.micro_batches;
    block.backward_seconds = 2 * block.forward_seconds;
    block.update_seconds = job.update;
  }
  return out;
}

EmulationOptions options_of(const Job& job) {
  EmulationOptions out;
  out.parallel.scheme.name = job.scheme;
  out.parallel.scheme.buckets.bucket_bytes = 16 << 10;
  out.mesh = job.mesh;
  out.stage.schedule = job.schedule;
  out.experts.ranks = job.mesh.ep;
  out.micro_batches = job.micro_batches;
  out.updates_wait = job.updates_wait;
  return out;
}

SimulationOptions simulation_of(const Job& job) {
  SimulationOptions out;
  out.ranks = job.mesh.ranks();
  out.link = {.bytes_per_second = job.rate, .latency_seconds = job.latency};
  out.config.micro_op_bytes = 1024;  // what passes between stages waits for no sum
  if (job.kernels) for_each_cost(out.costs.kernels, [](const char*, double& seconds) { seconds = 2e-9; });
  return out;
}

Prediction predicted(const Job& job) {
  return predict(outline_of_job(job), options_of(job), simulation_of(job));
}

double sum_of(const StagePrediction& s) {
  return s.compute_seconds + s.work_seconds + s.bubble_seconds + s.exposed_seconds + s.behind_seconds;
}

const std::vector<Job>& jobs() {
  static const std::vector<Job> all{
      {.mesh = {.dp = 4}, .micro_batches = 1},
      {.mesh = {.dp = 4}, .micro_batches = 1, .scheme = "spardl"},
      {.mesh = {.dp = 1, .pp = 4}},
      {.mesh = {.dp = 2, .pp = 2}, .scheme = "powersgd", .update = 3e-4},
      {.mesh = {.dp = 2, .pp = 2}, .updates_wait = "a test says so"},
      {.mesh = {.dp = 2, .pp = 2, .tp = 2}},
      {.mesh = {.dp = 2, .tp = 2}, .micro_batches = 1},
      {.mesh = {.dp = 4, .ep = 4}, .micro_batches = 1, .model = "gpt-moe"},
      {.mesh = {.dp = 2, .pp = 2, .ep = 2}, .micro_batches = 2, .model = "gpt-moe"}};
  return all;
}

std::string title_of(const Job& job) { return job.mesh.text() + " " + job.scheme + " " + job.model; }

// The driver counts what it waits for itself; and what it neither waits for nor computes takes no time here.
TEST(SimulatedWaits, AreAllThatARankWaitsFor) {
  for (Job job : jobs()) {
    job.kernels = false;
    EmulationOptions options = options_of(job);
    options.warmup = 2;
    options.steps = 4;
    SimulationOptions simulation = simulation_of(job);
    std::vector<std::vector<StepWaits>> waits;
    simulation.waits = &waits;
    const std::vector<EmulatedSteps> ranks = simulate_ranks(outline_of_job(job), options, simulation);
    ASSERT_EQ(waits.size(), ranks.size());
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      ASSERT_EQ(waits[r].size(), 4u);
      for (std::size_t step = 0; step < 4; ++step) {
        const StepWaits& mine = waits[r][step];
        double waited = 0;
        for (const auto& [strategy, seconds] : mine.waited) waited += seconds.seconds;
        EXPECT_NEAR(waited, ranks[r].waited_seconds[step], 1e-9) << title_of(job);
        EXPECT_NEAR(mine.under_way + mine.for_others, waited, 1e-9) << title_of(job);
        EXPECT_NEAR(mine.computed + waited, ranks[r].step_seconds[step], kRounding) << title_of(job);
      }
    }
  }
}

TEST(PlanParts, AddUpToTheStepOnEveryStage) {
  for (const Job& job : jobs()) {
    const Prediction step = predicted(job);
    ASSERT_EQ(step.stages.size(), static_cast<std::size_t>(job.mesh.pp)) << title_of(job);
    EXPECT_NEAR(step.compute_seconds + step.work_seconds + step.bubble_seconds + step.exposed_seconds,
                step.step_seconds, kRounding * step.step_seconds)
        << title_of(job);
    EXPECT_GT(step.exposed_seconds, 0) << title_of(job);
    EXPECT_EQ(step.bubble_seconds > 0, job.mesh.pp > 1 || job.mesh.ep > 1) << title_of(job);
    for (const StagePrediction& stage : step.stages) {
      EXPECT_NEAR(sum_of(stage), step.step_seconds, kRounding * step.step_seconds) << title_of(job);
      EXPECT_NEAR(stage.exposed_seconds + stage.behind_seconds, step.exposed_seconds, 1e-12) << title_of(job);
      for (const double part : {stage.compute_seconds, stage.work_seconds, stage.bubble_seconds,
                                stage.exposed_seconds, stage.behind_seconds})
        EXPECT_GE(part, 0) << title_of(job);
      // What is not computed is waited for, but for copies into buckets, of which these are few. Steps whose sparse
      // sums differ a little from one to the next have a median that is not their mean.
      double waited = 0;
      for (const StagePrediction::Waited& w : stage.waited) waited += w.seconds;
      EXPECT_NEAR(waited, step.step_seconds - stage.compute_seconds, 0.03 * step.step_seconds)
          << title_of(job);
    }
  }
}

// (P-1)(f+b+w), of zb-h1 (P-1)(f+b-w): f, b and w are equal here.
TEST(PlanParts, OfAFreeLinkAreComputationAndTheBubbleOfTheFormulas) {
  for (const char* schedule : {"1f1b", "zb-h1"}) {
    for (const int stages : {2, 4}) {
      const Job job{.mesh = {.dp = 2, .pp = stages},
                    .micro_batches = 2 * stages,
                    .schedule = schedule,
                    .layers = stages,
                    .rate = 0,
                    .latency = 0,
                    .kernels = false};
      const Prediction step = predicted(job);
      const double bubble = (schedule == std::string("1f1b") ? 3 : 1) * kForward * (stages - 1);
      for (const StagePrediction& stage : step.stages) {
        EXPECT_EQ(stage.exposed_seconds + stage.behind_seconds, 0) << schedule;
        EXPECT_NEAR(stage.bubble_seconds, bubble, kRounding) << schedule << " " << stages;
        EXPECT_NEAR(stage.compute_seconds, 3 * kForward * job.micro_batches, 1e-12) << schedule;
        EXPECT_NEAR(stage.work_seconds, 0, kRounding) << schedule;
      }
      // Control: on a link with a limit the bubble is the same, and something is exposed.
      Job limited = job;
      limited.rate = 1e6;
      const Prediction slow = predicted(limited);
      for (const StagePrediction& stage : slow.stages) {
        EXPECT_NEAR(stage.bubble_seconds, bubble, kRounding) << schedule;
        EXPECT_GT(stage.exposed_seconds, 0.1 * kForward) << schedule;
      }
    }
  }
}

// A stage that computes less is idle for longer; one rank of two that computes longer lets the other wait.
TEST(PlanParts, ABubbleIsOfWhoeverHasLessToDo) {
  Job job{.mesh = {.dp = 1, .pp = 2}, .layers = 3, .rate = 0, .latency = 0, .kernels = false};
  EmulationOptions options = options_of(job);
  options.stage.layers = {2, 1};
  const Prediction uneven = predict(outline_of_job(job), options, simulation_of(job));
  const double less = 3 * kForward * job.micro_batches;
  EXPECT_NEAR(uneven.stages[0].compute_seconds, 2 * less, 1e-12);
  EXPECT_NEAR(uneven.stages[1].compute_seconds, less, 1e-12);
  EXPECT_NEAR(uneven.stages[1].bubble_seconds - uneven.stages[0].bubble_seconds, less, kRounding);

  job = {.mesh = {.dp = 2}, .micro_batches = 1, .rate = 0, .latency = 0, .kernels = false};
  SimulationOptions simulation = simulation_of(job);
  EXPECT_NEAR(predict(outline_of_job(job), options_of(job), simulation).bubble_seconds, 0, kRounding);
  simulation.late = [](int rank, std::int64_t, const Piece& piece) {
    return rank == 1 && piece.work == Work::forward && piece.block == 1 ? 0.004 : 0;
  };
  const Prediction late = predict(outline_of_job(job), options_of(job), simulation);
  ASSERT_EQ(late.stages.size(), 1u);
  EXPECT_NEAR(late.stages[0].bubble_seconds, 0.002, kRounding);  // the mean of 4 ms and none
  EXPECT_NEAR(late.stages[0].compute_seconds, 3 * kForward * job.layers + 0.002, kRounding);
}

// Stages of one matrix each, between which next to nothing passes.
Outline outline_of_stages(int stages, double update) {
  std::vector<ChainBlock> blocks;
  for (int i = 0; i < stages; ++i) {
    const std::string name = "layer." + std::to_string(i);
    blocks.push_back({.name = name, .parameters = {{.name = name + ".w", .dims = {128, 128}}}});
  }
  blocks.push_back({.name = "head", .parameters = {{.name = "head.w", .dims = {1}}}});
  ModelShape shape = chain_shape("layers", blocks);
  shape.width = 1;
  Outline out = weft::outline_of(shape, 4);
  for (int i = 0; i < stages; ++i) {
    OutlineBlock& block = out.blocks[static_cast<std::size_t>(i)];
    block.forward_seconds = 4 * kForward;
    block.backward_seconds = 2 * block.forward_seconds;
    block.update_seconds = update;
  }
  return out;
}

// The last stage ends first: its sum is over, or would be awaited in vain, before the first stage lets it go on, whose own
// is exposed. Where updates wait for a verdict of all, it is only as far as it ends later than that of the second stage,
// which has a backward less to do behind it.
TEST(PlanParts, OfA1F1BWithDenseSumsAreExposedOnTheFirstStage) {
  constexpr double kBytes = 4.0 * 128 * 128, kBackward = 2 * kForward;  // bytes that two ranks send each
  for (const double update : {0.0, 3e-4}) {
    for (const bool together : {false, true}) {
      const std::string title = std::to_string(update) + (together ? ", together" : "");
      Job job{.mesh = {.dp = 2, .pp = 4},
              .updates_wait = together ? "a test says so" : "",
              .latency = 0,
              .kernels = false};
      const double sum = 2.5 * kBackward;  // seconds
      job.rate = kBytes / sum;
      const double queue = 4 * 1024 / job.rate;  // what else is sent may come behind some micro-ops of a sum
      const Prediction step = predict(outline_of_stages(4, update), options_of(job), simulation_of(job));
      EXPECT_NEAR(step.exposed_seconds, sum, queue) << title;
      const std::vector<StagePrediction>& stages = step.stages;
      EXPECT_NEAR(stages[0].exposed_seconds, together ? kBackward : sum, queue) << title;
      for (const int stage : {1, 2, 3}) {
        const StagePrediction& other = stages[static_cast<std::size_t>(stage)];
        EXPECT_LT(other.exposed_seconds, queue) << title << stage;
        EXPECT_NEAR(other.behind_seconds, sum, queue) << title << stage;
      }
      // Control: by what it is awaited for alone, the last stage would be as exposed as the first.
      double sums = 0;
      for (const StagePrediction::Waited& w : stages[3].waited)
        sums += w.strategy == "data_parallel" ? w.seconds : 0;
      EXPECT_GT(sums, 0.9 * sum) << title;
    }
  }
}

// Two stages over four micro-batches, of messages that take nothing but a latency: four of them make the step longer. The
// first stage waits for the gradients of the first, the third and the last micro-batch until the other has sent them and
// for that latency then, the last stage for the activations of the first and the third.
TEST(PlanParts, OfMessagesAreExposedWhereTheyAreAwaitedWhenTheyAreSent) {
  constexpr double kLatency = 1e-4;
  const Job job{.mesh = {.dp = 1, .pp = 2}, .rate = 0, .latency = kLatency, .kernels = false};
  const Prediction step = predict(outline_of_stages(2, 0), options_of(job), simulation_of(job));
  EXPECT_NEAR(step.step_seconds, 5 * 3 * kForward + 4 * kLatency, kRounding);
  EXPECT_NEAR(step.exposed_seconds, 4 * kLatency, kRounding);
  EXPECT_NEAR(step.stages[0].exposed_seconds, 3 * kLatency, kRounding);
  EXPECT_NEAR(step.stages[0].behind_seconds, kLatency, kRounding);
  EXPECT_NEAR(step.stages[1].exposed_seconds, 2 * kLatency, kRounding);
  EXPECT_NEAR(step.stages[1].behind_seconds, 2 * kLatency, kRounding);
}

double waited_for(const StagePrediction& stage, const std::string& strategy) {
  for (const StagePrediction::Waited& w : stage.waited) {
    if (w.strategy == strategy) return w.seconds;
  }
  return 0;
}

TEST(PlanParts, SayWhatIsWaitedFor) {
  // Tensor-parallel sums alone; those of the tied table between the first and the last stage, and messages of both.
  const Prediction cut = predicted({.mesh = {.dp = 1, .tp = 2}, .micro_batches = 1, .kernels = false});
  EXPECT_NEAR(waited_for(cut.stages[0], "tensor"), cut.exposed_seconds, 0.05 * cut.exposed_seconds);
  const Prediction piped = predicted({.mesh = {.dp = 1, .pp = 4}, .rate = 2e6, .kernels = false});
  EXPECT_EQ(waited_for(piped.stages[1], "tensor"), 0);
  EXPECT_EQ(waited_for(piped.stages[1], "tied"), 0);
  EXPECT_GT(waited_for(piped.stages[0], "tied"), 0);
  EXPECT_GT(waited_for(piped.stages[1], "pipeline"), piped.stages[1].bubble_seconds);
  // Work that nothing hides has its name where there is no other rank to wait for: selection, and adding up.
  const Prediction sparse = predicted({.mesh = {.dp = 4}, .micro_batches = 1, .scheme = "spardl", .rate = 0});
  EXPECT_GT(sparse.work_seconds, 0);
  EXPECT_EQ(sparse.bubble_seconds, 0);
  const Prediction none = predicted(
      {.mesh = {.dp = 4}, .micro_batches = 1, .scheme = "spardl", .rate = 0, .latency = 0, .kernels = false});
  EXPECT_NEAR(none.work_seconds, 0, kRounding);  // control
}

}  // namespace
}  // namespace weft
