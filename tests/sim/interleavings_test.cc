// Random interleavings of experts' all-to-alls and gradients' all-reduces, in virtual time: ranks that are late
// by random times, messages that come in any order, links of any kind. Nothing may wait for ever, and nothing
// may need its patience to end before it goes on: what is held ages after an hour here, and no run is that long.
//
// Training steps   through the real strategies, tables, engine and scheduler (workload/emulate.h)
// Programs         the backward pass of some layers, submitted to the engine by hand: here the rule can be
//                  another one. Two-way exclusion must deadlock, a gate that is left out and inverted
//                  priorities must be seen (negative controls)
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "experts/policies.h"
#include "weft/collective.h"
#include "weft/error.h"
#include "weft/random.h"
#include "workload/emulate.h"
#include "workload/model_shapes.h"
#include "world/sim_ranks.h"

namespace weft {
namespace {

constexpr Time kPatience = 3600s;
constexpr double kTooLong = 600;  // seconds, of a run whose computation and bytes take less

bool full_grid() {
  const char* grid = std::getenv("WEFT_TEST_GRID");
  return grid != nullptr && std::string(grid) == "full";
}
std::uint64_t first_seed() {
  const char* round = std::getenv("WEFT_SOAK_ROUND");
  return round != nullptr ? std::strtoull(round, nullptr, 10) * 1'000'000 : 0;
}

enum Purpose : std::uint32_t { kSizes = 1, kLate, kProgram, kPauses };

double between(Random& random, double from, double to) {  // every power of ten as often
  return from * std::pow(to / from, random.uniform());
}
template <class T>
T one_of(Random& random, const std::vector<T>& values) {
  return values[random.below(static_cast<std::uint32_t>(values.size()))];
}
// Mostly short, now and then ten times as long.
double pause(Random& random, double mean) {
  const double scale = random.below(8) == 0 ? 10 * mean : mean;
  return -scale * std::log(random.uniform());
}

// ---- training steps ----

// Drawing gradients takes longer than a run, and nobody looks at them: models of one shape share them.
using DrawnOnce = std::map<std::tuple<int, int, int>, std::shared_ptr<const GradientWindows>>;

struct Steps {
  Steps(std::uint64_t seed, DrawnOnce& drawn) {
    Random random(seed, kSizes);
    ModelOptions model = model_options("gpt-moe", "tiny");
    model.vocabulary = 16;
    model.context = 8;
    model.width = 8;
    model.layers = 2 + static_cast<int>(random.below(3));
    model.experts.every = 1 + static_cast<int>(random.below(2));
    const auto [world, ep] =
        one_of<std::pair<int, int>>(random, {{2, 2}, {3, 3}, {4, 2}, {4, 4}, {6, 3}, {6, 2}});
    model.experts.count = ep * (1 + static_cast<int>(random.below(2)));
    model.experts.choices = 1 + static_cast<int>(random.below(2));
    model.experts.capacity_factor = one_of<double>(random, {0, 1.25});
    policy = &kExpertPolicies[random.below(static_cast<std::uint32_t>(kExpertPolicies.size()))];
    model.experts.slices = policy->slices ? 1 + static_cast<int>(random.below(3)) : 1;
    outline =
        outline_from_flops(model_shape("gpt-moe", model), 1 + random.below(24), between(random, 1e6, 1e9));
    emulation.experts = model.experts;
    emulation.experts.policy = policy->name;
    emulation.experts.ranks = ep;
    emulation.parallel.scheme.name = "dense";
    emulation.parallel.scheme.buckets.bucket_bytes = one_of<std::size_t>(random, {256, 1024, 8192});
    emulation.micro_batches = 1 + static_cast<int>(random.below(2));
    emulation.warmup = 0;
    emulation.steps = 2;
    emulation.seed = seed;
    auto& windows = drawn[{model.layers, model.experts.every, model.experts.count}];
    if (windows == nullptr) windows = windows_of(outline, emulation);
    emulation.windows = windows;
    simulation.ranks = world;
    simulation.link.bytes_per_second = between(random, 1e5, 1e8);
    simulation.link.latency_seconds = between(random, 1e-6, 1e-3);
    if (random.below(2) == 0 && world % 2 == 0) {
      simulation.link.nodes = 2;
      simulation.link.scale_up_bytes_per_second = 10 * simulation.link.bytes_per_second;
    }
    simulation.jitter_seconds = one_of<double>(random, {0, 1e-4, 5e-3});
    simulation.eager_limit = one_of<std::size_t>(random, {0, 256, std::size_t{1} << 30});
    simulation.seed = seed;
    simulation.config.hold_limit = kPatience;
    const double late = between(random, 1e-5, 1e-2);
    simulation.late = [seed, late](int rank, std::int64_t step, const Piece& piece) {
      const auto number =
          static_cast<std::uint32_t>(((piece.block * 32 + piece.part) * 4 + piece.micro_batch) * 4) +
          static_cast<std::uint32_t>(piece.work);
      Random of_piece(seed ^ (static_cast<std::uint64_t>(rank) << 40), kLate,
                      static_cast<std::uint32_t>(step), number);
      return pause(of_piece, late);
    };
  }

  // Empty, or what went wrong.
  std::string run() {
    std::vector<Trace> traces;
    simulation.traces = &traces;
    try {
      for (const EmulatedSteps& rank : simulate_ranks(outline, emulation, simulation)) {
        for (const double seconds : rank.step_seconds)
          if (seconds > kTooLong) return "a step of " + std::to_string(seconds) + " s";
      }
    } catch (const Error& error) {
      return error.what();
    }
    for (const Trace& trace : traces) {
      const TraceReport report = verify_trace(trace, Time{0});  // nor is the link idle
      if (report.aged > 0) return std::to_string(report.aged) + " micro-ops aged";
      if (policy->announces && !report.breaches.empty()) return report.breaches.front();
      for (const TraceEvent& e : trace.events()) {
        if (e.kind == TraceEvent::Kind::micro_op && e.traffic == TrafficClass::blocking &&
            e.started > e.ready)
          return "a micro-op of " + e.name + " waited for its turn";
      }
    }
    return "";
  }

  const ExpertPolicy* policy = nullptr;
  Outline outline;
  EmulationOptions emulation;
  SimulationOptions simulation;
};

TEST(Interleavings, TrainingStepsNeverWaitForEver) {
  const std::uint64_t seeds = full_grid() ? 10'000 : 250;
  DrawnOnce drawn;
  for (std::uint64_t seed = first_seed(); seed < first_seed() + seeds; ++seed) {
    Steps steps(seed, drawn);
    ASSERT_EQ(steps.run(), "") << "seed " << seed << ", policy " << steps.policy->name;
  }
}

// A rank that is late by more than all others compute is waited for, and that is no deadlock.
TEST(Interleavings, WhatIsLateIsSeen) {
  DrawnOnce drawn;
  Steps steps(1, drawn);
  steps.simulation.late = [](int rank, std::int64_t, const Piece&) { return rank == 1 ? 100.0 : 0.0; };
  EXPECT_NE(steps.run().find("a step of"), std::string::npos);
}

// ---- programs ----

// When an all-reduce starts beside an all-to-all.
enum class Rule : std::uint8_t {
  engine,     // the scheduler's: all-to-alls wait for nothing, gradients give way
  exclusive,  // two-way: nothing of one kind starts while something of the other is under way on this rank
  ungated,    // gradients give way to what is in the transport, not to what comes or waits
  inverted,   // gradients go first
};

struct Span {
  Time from, to;
};

// One rank's: behind some gradients a gate closes, and two all-to-alls follow, with experts between them.
class RankProgram {
 public:
  RankProgram(Engine& engine, Rule rule, std::uint64_t seed, int rank)
      : engine_(engine),
        rule_(rule),
        pauses_(seed, kPauses, static_cast<std::uint32_t>(rank)),
        shape_(seed, kProgram, 1),
        mean_(between(shape_, 1e-5, 1e-2)),
        layers_(2 + static_cast<int>(shape_.below(3))) {}

  // REQUIRES: lives until the task is done.
  static Task<void> run(Comm comm, RankProgram* me) {
    me->comm_ = comm;
    for (int layer = 0; layer < me->layers_; ++layer) {
      co_await me->pass();
      for (std::uint32_t ready = me->shape_.below(3); ready > 0; --ready) me->gradient_ready();
      me->close_gate();
      co_await me->pass();
      co_await me->exchange_rows(2 * layer);
      co_await me->pass();
      if (me->shape_.below(2) == 0) me->gradient_ready();
      co_await me->exchange_rows(2 * layer + 1);
    }
    while (!me->waiting_.empty() || (me->last_.valid() && !me->last_.done())) co_await me->last_;
    for (const Ticket& ticket : me->gradients_) co_await ticket;
  }
  // In which no gradient may start.
  const std::vector<Span>& closed() const { return closed_; }

 private:
  Task<void> pass() { co_await comm_.sleep_until(comm_.now() + from_seconds(pause(pauses_, mean_))); }

  void close_gate() {
    closed_since_ = comm_.now();
    if (rule_ == Rule::engine) engine_.hold();
    gate_ = true;
  }

  Task<void> exchange_rows(int number) {
    if (!gate_) closed_since_ = comm_.now();
    if (rule_ == Rule::exclusive) {
      rows_wait_ = true;
      while (last_.valid() && !last_.done()) co_await last_;
    }
    const auto count = static_cast<std::size_t>(comm_.size()) * (1 + shape_.below(2000));
    values_.emplace_back(count);
    const Dense sent(std::span<float>{values_.back()});
    values_.emplace_back(count);
    const Dense got(std::span<float>{values_.back()});
    const bool blocks = rule_ != Rule::inverted;
    const SubmitOptions how{.name = "all-to-all",
                            .traffic = blocks ? TrafficClass::blocking : TrafficClass::delayed,
                            .slot = static_cast<std::uint32_t>(100 + number),
                            .holds = rule_ == Rule::engine};
    const Ticket ticket =
        engine_.submit(engine_.world(), how, [sent, got](Comm comm) { return all_to_all(comm, sent, got); });
    if (std::exchange(gate_, false) && rule_ == Rule::engine) engine_.release();
    co_await ticket;
    closed_.push_back({closed_since_, ticket.finished()});
    rows_wait_ = false;
    if (rule_ == Rule::exclusive) launch();
  }

  void gradient_ready() {
    values_.emplace_back(1 + shape_.below(4000));
    waiting_.push_back(Dense(std::span<float>{values_.back()}));
    launch();
  }
  // One after the other where they must not run beside all-to-alls; else as they come.
  void launch() {
    const bool alone = rule_ == Rule::exclusive;
    while (!waiting_.empty()) {
      if (alone && (rows_wait_ || (last_.valid() && !last_.done()))) return;
      const Dense data = waiting_.front();
      waiting_.pop_front();
      const bool first = rule_ == Rule::inverted;
      const SubmitOptions how{.name = "gradient",
                              .traffic = first ? TrafficClass::blocking : TrafficClass::gradient,
                              .slot = static_cast<std::uint32_t>(gradients_.size())};
      last_ = engine_.submit(engine_.world(), how, [data](Comm comm) { return all_reduce(comm, data); });
      gradients_.push_back(last_);
      if (alone) last_.then([this] { launch(); });
    }
  }

  Engine& engine_;
  const Rule rule_;
  Random pauses_;  // of this rank
  Random shape_;   // of all
  const double mean_;
  const int layers_;
  Comm comm_;
  std::deque<std::vector<float>> values_;
  std::deque<Dense> waiting_;
  std::vector<Ticket> gradients_;
  Ticket last_;  // of them
  bool gate_ = false, rows_wait_ = false;
  Time closed_since_{};
  std::vector<Span> closed_;
};

struct ProgramEnd {
  bool deadlock = false;
  int breaches = 0;  // gradients that started although the gate was closed
  double seconds = 0;
};

// By what the program knows of itself and the names of the micro-ops: not by what the engine says that it held.
int breaches_of(const Trace& trace, const std::vector<Span>& closed) {
  int out = 0;
  for (const TraceEvent& e : trace.events()) {
    if (e.kind != TraceEvent::Kind::micro_op || e.name != "gradient") continue;
    out += std::ranges::any_of(closed, [&](const Span& s) { return e.started > s.from && e.started < s.to; });
  }
  return out;
}

ProgramEnd run_program(std::uint64_t seed, Rule rule) {
  Random random(seed, kProgram, 0);
  std::vector<Trace> traces;
  SimRanksOptions options;
  options.sim.link.ranks = 2 + static_cast<int>(random.below(3));
  options.sim.link.bytes_per_second = between(random, 1e5, 1e8);
  options.sim.link.latency_seconds = between(random, 1e-6, 1e-3);
  options.sim.jitter_seconds = one_of<double>(random, {0, 1e-4, 5e-3});
  options.sim.eager_limit = one_of<std::size_t>(random, {0, 256, std::size_t{1} << 30});
  options.sim.seed = seed;
  options.config.hold_limit = kPatience;
  options.traces = &traces;
  std::vector<std::unique_ptr<RankProgram>> programs;
  SimRanks ranks(options);
  programs.reserve(static_cast<std::size_t>(ranks.size()));
  for (int r = 0; r < ranks.size(); ++r)
    programs.push_back(std::make_unique<RankProgram>(ranks.engine(r), rule, seed, r));
  ProgramEnd out;
  try {
    out.seconds = seconds(ranks.run({.name = "backward", .slot = 1000}, [&](Comm comm, int r) {
      return RankProgram::run(comm, programs[static_cast<std::size_t>(r)].get());
    }));
  } catch (const TransportError& error) {
    out.deadlock = true;
    // Operations end before the memory that they use does.
    for (int r = 0; r < ranks.size(); ++r) ranks.engine(r).shut_down(std::make_exception_ptr(error));
  }
  for (std::size_t r = 0; r < programs.size(); ++r)
    out.breaches += breaches_of(traces[r], programs[r]->closed());
  return out;
}

struct Tally {
  int deadlocks = 0, breaches = 0, long_ones = 0;
};
Tally tally(Rule rule, std::uint64_t seeds) {
  Tally out;
  for (std::uint64_t seed = first_seed(); seed < first_seed() + seeds; ++seed) {
    const ProgramEnd end = run_program(seed, rule);
    out.deadlocks += end.deadlock;
    out.breaches += end.breaches;
    out.long_ones += end.seconds > kTooLong;
  }
  return out;
}

TEST(Interleavings, AllToAllsThatWaitForNothingNeverDeadlock) {
  const Tally rule = tally(Rule::engine, full_grid() ? 10'000 : 2'000);
  EXPECT_EQ(rule.deadlocks, 0);
  EXPECT_EQ(rule.breaches, 0);
  EXPECT_EQ(rule.long_ones, 0);
}

// The same programs, each rank with one kind at a time: one sits in an all-reduce that another rank begins only
// behind an all-to-all, which waits for the first one's.
TEST(Interleavings, TwoWayExclusionDeadlocks) {
  const int deadlocks = tally(Rule::exclusive, 400).deadlocks;
  RecordProperty("deadlocks", deadlocks);
  EXPECT_GT(deadlocks, 0);
}

TEST(Interleavings, WithoutTheGateOrWithInvertedPrioritiesGradientsAreInTheWay) {
  for (const Rule rule : {Rule::ungated, Rule::inverted}) {
    const Tally broken = tally(rule, 100);
    EXPECT_EQ(broken.deadlocks, 0);
    EXPECT_GT(broken.breaches, 100);
  }
}

}  // namespace
}  // namespace weft
