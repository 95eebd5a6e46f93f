// Training steps of an outline in virtual time: their length is compared with what follows from the times of
// blocks and buckets by hand.
#include "workload/emulate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "weft/error.h"

namespace weft {
namespace {

constexpr double kRate = 1e7;  // bytes a second

double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

// Two blocks with a tensor each, of so many seconds on the link between two ranks.
struct Times {
  double first_wire = 0.02, second_wire = 0.01;
  double forward[2] = {0.003, 0.005}, backward[2] = {0.025, 0.008}, update[2] = {0.002, 0.001};
};

OutlineTensor vector_of(const std::string& name, double wire_seconds, int block) {
  return {.name = name, .length = static_cast<std::int64_t>(wire_seconds * kRate / 4), .block = block};
}

Outline outline_of(const Times& t) {
  Outline out;
  out.model = "two blocks";
  out.tokens_per_rank = 1;
  for (int b = 0; b < 2; ++b)
    out.blocks.push_back({"block " + std::to_string(b), t.forward[b], t.backward[b], t.update[b]});
  out.tensors = {vector_of("first", t.first_wire, 0), vector_of("second", t.second_wire, 1)};
  out.parameters = out.tensors[0].length + out.tensors[1].length;
  return out;
}

EmulationOptions options_of(const std::string& algorithm) {
  EmulationOptions out;
  out.parallel.scheme.name = algorithm;
  out.parallel.scheme.buckets = {.bucket_bytes = 4, .dense_below = 0};  // one for each tensor
  out.steps = 4;
  out.warmup = 1;
  return out;
}

SimulationOptions simulation_of(int ranks, double rate = kRate) {
  SimulationOptions out;
  out.ranks = ranks;
  out.link.bytes_per_second = rate;
  return out;
}

// All ranks agree within what one short message takes; steady steps only.
double step_of(const std::vector<EmulatedSteps>& ranks) {
  std::vector<double> steady = ranks[0].step_seconds;
  steady.pop_back();  // is settled at its end
  return mean(steady);
}

double step_of(const Times& t, const EmulationOptions& options, const SimulationOptions& simulation) {
  return step_of(simulate_ranks(outline_of(t), options, simulation));
}

// The agreement on tokens takes 16 or 32 bytes, the window of the link two micro-ops.
constexpr double kClose = 0.0012;

TEST(Simulate, WithoutALimitAStepIsItsComputation) {
  Outline outline = outline_of({});
  outline.other_seconds = 0.0011;
  const std::vector<EmulatedSteps> ranks = simulate_ranks(outline, options_of("dense"), simulation_of(3, 0));
  ASSERT_EQ(ranks.size(), 3u);
  for (const EmulatedSteps& rank : ranks) {
    ASSERT_EQ(rank.step_seconds.size(), 4u);
    EXPECT_NEAR(rank.step_seconds[0], compute_seconds(outline), 1e-6);
    EXPECT_NEAR(mean(rank.waited_seconds), 0, 1e-6);
  }
}

// What is sent while backward still runs costs nothing; the rest is in the open.
TEST(Simulate, GradientsOverlapWithBackward) {
  const Times t;  // the second's 10 ms fit into the first block's backward of 25 ms
  const double computed = compute_seconds(outline_of(t));
  const double step = step_of(t, options_of("dense"), simulation_of(2));
  EXPECT_NEAR(step, computed + t.first_wire, kClose);
  EXPECT_GT(computed + t.first_wire + t.second_wire - step, 4 * kClose);  // without overlap
}

// The first block's gradients go first, and its forward hides what is left of the second's. (Of four ranks:
// two swap piece by piece, and what is urgent then shares the link with what is not.)
TEST(Simulate, TheNextForwardWaitsOnlyForItsBlock) {
  Times t;
  t.second_wire = 0.05;
  t.forward[0] = 0.02;
  const double first = 1.5 * t.first_wire, second = 1.5 * t.second_wire;  // 2 (P-1)/P of the vector
  const double left = second - t.backward[0];  // when the first block's gradients come
  const double ready = t.backward[1] + t.backward[0] + first;
  const double step = step_of(t, options_of("dense"), simulation_of(4));
  const double expected = ready + std::max(t.update[0] + t.forward[0], left) + t.update[1] + t.forward[1];
  EXPECT_NEAR(step, expected, 4 * kClose);
  // With clipping all of it must be there first.
  EmulationOptions clipped = options_of("dense");
  clipped.updates_wait = "clipping";
  const double whole = ready + left + t.update[0] + t.update[1] + t.forward[0] + t.forward[1];
  EXPECT_NEAR(step_of(t, clipped, simulation_of(4)), whole, 4 * kClose);
  EXPECT_GT(whole - expected, 10 * kClose);
}

// Gradients are there in the last micro-batch, so only its backward hides what is sent.
TEST(Simulate, MicroBatchesOverlapWithTheLastBackwardOnly) {
  Times t;
  t.second_wire = 0.02;
  EmulationOptions options = options_of("dense");
  options.updates_wait = "clipping";  // so that no forward hides anything
  const Outline outline = outline_of(t);
  std::vector<double> bytes;
  for (const int count : {1, 2, 4}) {
    options.micro_batches = count;
    const double hidden = std::min(t.second_wire, t.backward[0] / count);
    const double exposed = t.first_wire + t.second_wire - hidden;
    const std::vector<EmulatedSteps> ranks = simulate_ranks(outline, options, simulation_of(2));
    EXPECT_NEAR(step_of(ranks), compute_seconds(outline) + exposed, 2 * kClose) << count;
    if (bytes.empty()) bytes = ranks[0].payload_bytes;
    EXPECT_EQ(ranks[0].payload_bytes, bytes) << count;
    // Control: all of them compute the same.
    EXPECT_NEAR(step_of(t, options, simulation_of(2, 0)), compute_seconds(outline), 1e-6) << count;
  }
}

TEST(Simulate, TensorsGoOutWhenTheyAreReady) {
  Times t;
  t.backward[1] = 0.04;
  t.second_wire = 0.05;
  t.first_wire = 0.004;
  Outline outline = outline_of(t);
  outline.tensors[1].ready = 0.25;  // 30 ms before the end of its block's backward
  const double late = step_of(t, options_of("dense"), simulation_of(2));
  const double early = step_of(simulate_ranks(outline, options_of("dense"), simulation_of(2)));
  EXPECT_LT(early, late);
  EXPECT_NEAR(early, compute_seconds(outline) + t.first_wire, 2 * kClose);
}

TEST(Simulate, ABucketsWorkTakesItsSecondsOfAWorker) {
  const Times t;
  EmulationOptions options = options_of("dense");
  options.parallel.scheme.buckets.bucket_bytes = 1 << 24;  // one, worked on when backward is over
  const double base = step_of(t, options, simulation_of(2));
  SimulationOptions costly = simulation_of(2);
  const double work = 0.015;
  costly.costs.kernels.check_element = work / static_cast<double>(outline_of(t).parameters);
  EXPECT_NEAR(step_of(t, options, costly), base + work, kClose);
  costly.costs.workers = 2;
  EXPECT_NEAR(step_of(t, options, costly), base + work, kClose);
  // One for both ranks: the second waits for the first, who is a part of that ahead in the next step.
  costly.costs.workers = 1;
  EXPECT_GT(step_of(t, options, costly), base + 1.5 * work);
  EXPECT_LT(step_of(t, options, costly), base + 2 * work + kClose);
}

TEST(Simulate, OnlyGradientsThatShareABucketAreCopied) {
  const Outline outline = outline_of({});
  const EmulationOptions apart = options_of("dense");
  EmulationOptions together = apart;
  together.parallel.scheme.buckets.bucket_bytes = 1 << 24;
  SimulationOptions copied = simulation_of(2);
  copied.costs.kernels.copy_byte = 0.01 / (4 * static_cast<double>(outline.parameters));
  const std::vector<EmulatedSteps> none = simulate_ranks(outline, apart, copied);
  for (const double s : none[0].hand_over_seconds) EXPECT_EQ(s, 0);
  const std::vector<EmulatedSteps> all = simulate_ranks(outline, together, copied);
  for (const double s : all[0].hand_over_seconds) EXPECT_NEAR(s, 0.01, 1e-12);
  const double free = step_of(simulate_ranks(outline, together, simulation_of(2)));
  EXPECT_GE(step_of(simulate_ranks(outline, together, copied)), free + 0.01 - kClose);
}

TEST(Simulate, BytesAreThoseOfTheFormula) {
  const Outline outline = outline_of({});
  for (const int ranks : {2, 4}) {
    const std::vector<EmulatedSteps> dense =
        simulate_ranks(outline, options_of("dense"), simulation_of(ranks));
    const double expected = 2.0 * (ranks - 1) / ranks * 4 * static_cast<double>(outline.parameters);
    for (const EmulatedSteps& rank : dense) {
      for (const double bytes : rank.payload_bytes) EXPECT_NEAR(bytes, expected, 64);
      EXPECT_NEAR(static_cast<double>(rank.formula_bytes), expected, 64);
    }
    const std::vector<EmulatedSteps> sparse =
        simulate_ranks(outline, options_of("spardl"), simulation_of(ranks));
    for (const EmulatedSteps& rank : sparse) {
      EXPECT_GT(rank.payload_bytes[0], 0);
      EXPECT_LE(rank.payload_bytes[0], static_cast<double>(rank.formula_bytes));
    }
    EXPECT_LT(step_of(sparse), step_of(dense));
  }
}

// Of the time in which some exchange is under way, what nobody waits is hidden.
TEST(Simulate, ExchangesHideBehindComputation) {
  const auto run = [](const Times& t) {
    std::vector<EmulatedSteps> ranks = simulate_ranks(outline_of(t), options_of("dense"), simulation_of(2));
    for (std::vector<double>* values : {&ranks[0].waited_seconds, &ranks[0].exchange_seconds})
      values->pop_back();  // is settled at its end
    return ranks[0];
  };
  // All of it but for the last tenth of a millisecond or so: the second one is here before the first starts.
  const EmulatedSteps all = run({.first_wire = 0.0004, .backward = {0.05, 0.008}});
  EXPECT_NEAR(mean(all.exchange_seconds), 0.0104, kClose);
  EXPECT_LT(mean(all.waited_seconds), kClose);
  // Nothing: a model that computes nothing waits all the time.
  const Times idle{.forward = {0, 0}, .backward = {0, 0}, .update = {0, 0}};
  const EmulatedSteps none = run(idle);
  EXPECT_NEAR(mean(none.exchange_seconds), 0.03, kClose);
  EXPECT_NEAR(mean(none.waited_seconds), mean(none.exchange_seconds), 1e-6);
  // What comes last is the first block's: nothing goes on before it is here.
  const EmulatedSteps late = run({.first_wire = 0.02, .second_wire = 0.0004, .forward = {0, 0.01}});
  EXPECT_NEAR(mean(late.exchange_seconds), 0.0204, kClose);
  EXPECT_NEAR(mean(late.waited_seconds), 0.02, kClose);
}

TEST(Simulate, TheSameOptionsGiveTheSameNumbers) {
  const Outline outline = outline_of({});
  EmulationOptions options = options_of("spardl");
  const auto run = [&] { return simulate_ranks(outline, options, simulation_of(3)); };
  const std::vector<EmulatedSteps> a = run(), b = run();
  EXPECT_EQ(a[1].step_seconds, b[1].step_seconds);
  EXPECT_EQ(a[1].payload_bytes, b[1].payload_bytes);
  EXPECT_NE(a[1].payload_bytes, a[2].payload_bytes);  // ranks have their own gradients
  options.seed = 2;
  EXPECT_NE(a[1].payload_bytes, run()[1].payload_bytes);
}

TEST(Simulate, PausesSettleTheStepBeforeThem) {
  const Outline outline = outline_of({});
  EmulationOptions options = options_of("dense");
  std::vector<std::int64_t> began;
  options.before_step = [&](std::int64_t step) { began.push_back(step); };
  const std::vector<EmulatedSteps> on = simulate_ranks(outline, options, simulation_of(1));
  EXPECT_EQ(began, (std::vector<std::int64_t>{0, 1, 2, 3, 4}));
  options.settles_after = [](std::int64_t step) { return step == 2; };
  const std::vector<EmulatedSteps> paused = simulate_ranks(outline, options, simulation_of(1));
  // The update of step 2 (the second measured one) moves from the step behind it into it.
  const double update = outline.blocks[0].update_seconds + outline.blocks[1].update_seconds;
  EXPECT_NEAR(paused[0].step_seconds[1], on[0].step_seconds[1] + update, 1e-6);
  EXPECT_NEAR(paused[0].step_seconds[2], on[0].step_seconds[2] - update, 1e-6);
  EXPECT_NEAR(mean(paused[0].step_seconds), mean(on[0].step_seconds), 1e-6);
}

TEST(Simulate, RefusesWhatCannotBeMeant) {
  const Outline outline = outline_of({});
  const EmulationOptions options = options_of("dense");
  EmulationOptions none = options;
  none.steps = 0;
  EXPECT_THROW(simulate_ranks(outline, none, simulation_of(2)), UsageError);
  none = options;
  none.micro_batches = 0;
  EXPECT_THROW(simulate_ranks(outline, none, simulation_of(2)), UsageError);
  EmulationOptions unknown = options_of("dnse");
  EXPECT_THROW(simulate_ranks(outline, unknown, simulation_of(2)), UsageError);
  EXPECT_THROW(simulate_ranks(outline, options, simulation_of(0)), UsageError);
  EXPECT_THROW(simulate_ranks(outline, options, simulation_of(2, -1)), UsageError);
  SimulationOptions costly = simulation_of(2);
  costly.costs.workers = -1;
  EXPECT_THROW(simulate_ranks(outline, options, costly), UsageError);
  costly.costs.workers = 0;
  costly.costs.kernels.fold_byte = -1e-9;
  EXPECT_THROW(simulate_ranks(outline, options, costly), UsageError);
  Outline spoilt = outline;
  ++spoilt.parameters;
  EXPECT_THROW(simulate_ranks(spoilt, options, simulation_of(2)), UsageError);
  EmulationOptions throws = options;
  throws.before_step = [](std::int64_t step) {
    if (step == 2) throw Error("enough");
  };
  EXPECT_THROW(simulate_ranks(outline, throws, simulation_of(2)), Error);
}

}  // namespace
}  // namespace weft
