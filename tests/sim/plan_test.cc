// Plans: rows and tables of a run that is not made, what a walk in virtual time predicts, what auto chooses;
// traces of simulated training.
#include "planner/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>

#include "base/statistics.h"
#include "data_parallel/data_parallel.h"
#include "planner/choose.h"
#include "step/run_step.h"
#include "step_toys.h"
#include "weft/error.h"
#include "weft/trace.h"
#include "workload/job_steps.h"
#include "workload/model_shapes.h"
#include "world/sim_ranks.h"

namespace weft {
namespace {

Outline outline_of(double flops_per_second = 20e9, int layers = 2) {
  ModelOptions sizes = model_options("gpt", "tiny");
  sizes.layers = layers;
  sizes.width = 128;
  sizes.heads = 4;
  sizes.vocabulary = 2000;
  return outline_from_flops(model_shape("gpt", sizes), 512, flops_per_second);
}

EmulationOptions options_of(const char* scheme) {
  EmulationOptions options;
  options.parallel.scheme.name = scheme;
  options.parallel.scheme.buckets.bucket_bytes = 256 << 10;
  return options;
}

SimulationOptions over(double bytes_per_second, int ranks = 4) {
  SimulationOptions out;
  out.ranks = ranks;
  out.link = {.bytes_per_second = bytes_per_second, .latency_seconds = 50e-6};
  return out;
}

TEST(Plan, RowsCoverEveryElementOnceInSlotsOfTheirOwn) {
  const Outline outline = outline_of();
  for (const char* scheme : {"dense", "spardl", "powersgd"}) {
    const Plan plan = make_plan(outline, options_of(scheme), over(125e6));
    std::int64_t elements = 0;
    std::vector<std::uint32_t> slots;
    for (const PlanRow& row : plan.rows) {
      elements += row.count;
      slots.push_back(row.slot);
      EXPECT_EQ(row.divisor, 4);
      EXPECT_FALSE(row.why.empty());
      EXPECT_GT(row.bytes, 0);
      EXPECT_GT(row.seconds, 0);
    }
    EXPECT_EQ(elements, outline.parameters);
    std::ranges::sort(slots);
    EXPECT_EQ(std::ranges::adjacent_find(slots), slots.end());
    EXPECT_EQ(plan.prediction.distinct_tables, 1);  // of all ranks, verified together
    const std::string text = text_of(plan.stages.front(), Phase::steady);
    EXPECT_NE(text.find("compute  forward layer.0"), std::string::npos) << text;
    EXPECT_NE(text.find("step n-1"), std::string::npos);
  }
}

TEST(Plan, PredictsWhatARunInVirtualTimeTakes) {
  const Outline outline = outline_of();
  EmulationOptions options = options_of("dense");
  const Prediction predicted = predict(outline, options, over(12.5e6));
  options.warmup = 5;
  options.steps = 5;
  const std::vector<EmulatedSteps> ranks = simulate_ranks(outline, options, over(12.5e6));
  const std::vector<double> seconds = job_steps(seconds_of(ranks));
  EXPECT_NEAR(predicted.step_seconds, seconds[2], 0.02 * seconds[2]);
  // Dense: 2 (P-1)/P of 4 bytes an element, and what is exposed is what the link adds.
  EXPECT_NEAR(predicted.busiest_port_bytes, 1.5 * 4 * static_cast<double>(outline.parameters), 4096);
  EXPECT_GT(predicted.exposed_seconds, 0.5 * predicted.busiest_port_bytes / 12.5e6);
  EXPECT_NEAR(predicted.compute_seconds, compute_seconds(outline), 1e-12);
  // Control: a link without limits exposes nothing.
  EXPECT_LT(predict(outline, options, over(0)).exposed_seconds, 1e-3 * predicted.step_seconds);
}

// Of so many ranks, one bucket of one tensor.
Prediction of_one_tensor(std::int64_t elements, int ranks, EmulatedLink link,
                         const std::string& all_reduce = "auto") {
  const ModelShape shape = chain_shape(
      "one", {{.name = "block", .parameters = {{.name = "w", .dims = {elements}}}, .flops_per_token = 1}});
  SimulationOptions simulation;
  simulation.ranks = ranks;
  simulation.link = link;
  EmulationOptions options;
  options.parallel.scheme.name = "dense";
  options.parallel.scheme.all_reduce = all_reduce;
  return predict(outline_from_flops(shape, 1, 1e6), options, simulation);
}

TEST(Plan, RanksOfANodeShareItsPort) {
  constexpr std::int64_t kLong = 1 << 20, kShort = 1000;
  const EmulatedLink fast{.bytes_per_second = 1e7, .latency_seconds = 1e-6},
      slow{.bytes_per_second = 1e9, .latency_seconds = 10e-3};
  const auto on = [](EmulatedLink link, int nodes) {
    link.nodes = nodes;
    return link;
  };
  // A ring: every rank sends 2 (P-1)/P of it to the next one, and one rank of a node has its next elsewhere.
  const double ring = 2.0 * 7 / 8 * 4 * kLong;
  EXPECT_EQ(of_one_tensor(kLong, 8, fast).busiest_port_bytes, ring);
  EXPECT_EQ(of_one_tensor(kLong, 8, on(fast, 2), "ring").busiest_port_bytes, ring);
  // What is taken there: of two levels, the ranks of a node together send 2 (M-1)/M of it to M-1 other nodes.
  EXPECT_EQ(of_one_tensor(kLong, 8, on(fast, 2)).busiest_port_bytes, 2.0 * 1 / 2 * 4 * kLong);
  // Doubling: in the last of three hops all four ranks of a node send all of it to the other node.
  EXPECT_EQ(of_one_tensor(kShort, 8, slow).busiest_port_bytes, 3 * 4 * kShort);
  EXPECT_EQ(of_one_tensor(kShort, 8, on(slow, 2)).busiest_port_bytes, 4 * 4 * kShort);
  // With four nodes of two ranks: in two of the three hops.
  EXPECT_EQ(of_one_tensor(kShort, 8, on(slow, 4)).busiest_port_bytes, 2 * 2 * 4 * kShort);
  EXPECT_EQ(of_one_tensor(kShort, 8, on(slow, 1)).busiest_port_bytes, 0);
}

// What a run measures of its own pieces is the outline that it goes by.
TEST(Plan, ARunsOwnTimesPredictIt) {
  Outline truth = outline_of(20e9);
  truth.other_seconds = 0.002;
  for (std::size_t b = 0; b < truth.blocks.size(); ++b)
    truth.blocks[b].update_seconds = 1e-4 * static_cast<double>(b + 1);
  for (std::size_t i = 0; i < truth.tensors.size(); ++i)
    truth.tensors[i].ready = 0.2 + 0.8 / static_cast<double>(i + 1);
  EmulationOptions options = options_of("dense");
  // What is exchanged begins when backward has ended.
  options.parallel.scheme.buckets.bucket_bytes = 64 << 20;
  options.warmup = 3;
  options.steps = 5;
  const std::vector<EmulatedSteps> ranks = simulate_ranks(truth, options, over(12.5e6));
  const StepTimes times = median_of(ranks[1].times);
  ASSERT_GT(times.waited, 0.1 * truth.other_seconds);
  Outline own = truth;
  set_seconds(own, times);
  for (std::size_t b = 0; b < truth.blocks.size(); ++b) {
    EXPECT_NEAR(own.blocks[b].forward_seconds, truth.blocks[b].forward_seconds, 1e-7);
    EXPECT_NEAR(own.blocks[b].backward_seconds, truth.blocks[b].backward_seconds, 1e-7);
    EXPECT_NEAR(own.blocks[b].update_seconds, truth.blocks[b].update_seconds, 1e-7);
  }
  for (std::size_t i = 0; i < truth.tensors.size(); ++i) {
    const double backward = truth.blocks[static_cast<std::size_t>(truth.tensors[i].block)].backward_seconds;
    EXPECT_NEAR(own.tensors[i].ready * backward, truth.tensors[i].ready * backward, 1e-7);
  }
  EXPECT_NEAR(own.other_seconds, truth.other_seconds, 1e-7);
  const double measured = median(job_steps(seconds_of(ranks)));
  EXPECT_NEAR(predict(own, options, over(12.5e6)).step_seconds, measured, 0.02 * measured);
  // Control: waiting that counts as computing.
  own.blocks[0].backward_seconds += times.waited;
  EXPECT_GT(predict(own, options, over(12.5e6)).step_seconds, 1.15 * measured);
}

// Each scheme that auto may take, planned alone.
std::map<std::string, double> alone(const Outline& outline, EmulationOptions options,
                                    const SimulationOptions& simulation) {
  std::map<std::string, double> out;
  for (const char* name : {"dense", "dense-bf16", "spardl", "powersgd"}) {
    options.parallel.scheme.name = name;
    out[name] = predict(outline, options, simulation).step_seconds;
  }
  return out;
}

TEST(Auto, StaysDenseWhereCompressionCannotPay) {
  const Choice fast = choose_scheme(outline_of(1e9), options_of("spardl"), over(1.25e9));
  EXPECT_EQ(fast.scheme.name, "dense");
  EXPECT_NE(fast.why.find("stay dense, because its exchange hides"), std::string::npos) << fast.why;
  // Where working on gradients costs more than it saves, although the exchange is exposed.
  SimulationOptions costly = over(125e6);
  KernelCosts& kernels = costly.costs.kernels;
  kernels.scan_element = kernels.round_element = kernels.multiply.element = 1e-6;
  const Choice dear = choose_scheme(outline_of(200e9), options_of("spardl"), costly);
  EXPECT_EQ(dear.scheme.name, "dense") << dear.why;
  EXPECT_NE(dear.why.find("spardl would take"), std::string::npos) << dear.why;
  EXPECT_NE(dear.why.find("losing bits must save 10 %"), std::string::npos) << dear.why;
}

TEST(Auto, TakesNothingThatIsSlowerThanWhatItCouldHaveTaken) {
  int lossy = 0;
  for (const double rate : {1.25e9, 50e6, 1.25e6}) {
    const Outline outline = outline_of(20e9);
    const Choice choice = choose_scheme(outline, options_of("topka"), over(rate));
    const std::map<std::string, double> single = alone(outline, options_of("dense"), over(rate));
    EmulationOptions taken = options_of("dense");
    taken.parallel.scheme = choice.scheme;
    const double seconds = predict(outline, taken, over(rate)).step_seconds;
    const Scheme& scheme = find_scheme(choice.scheme.name);
    EXPECT_TRUE(scheme.automatic);
    for (const auto& [name, other] : single) {
      // Whatever loses no more is no faster, and what loses more not by the margin.
      const bool rounds = find_scheme(name).dense();
      const double margin =
          scheme.dense() && name != choice.scheme.name && (!rounds || scheme.lossless) ? 0.1 : 0;
      EXPECT_GE(other, (1 - margin) * seconds - 1e-9)
          << name << " against " << choice.scheme.name << ", " << rate;
    }
    EXPECT_EQ(rate == 1.25e9, scheme.lossless) << choice.why;
    if (scheme.lossless) continue;
    ++lossy;
    // Control: dense would not have passed here.
    EXPECT_LE(seconds, 0.9 * single.at("dense")) << choice.why;
  }
  EXPECT_GT(lossy, 0);
  EXPECT_LT(lossy, 3);
}

TEST(Auto, ASlowLinkGetsACompressedSchemeAndItsRowsSayWhy) {
  const Outline outline = outline_of(200e9);
  const Choice slow = choose_scheme(outline, options_of("dense"), over(1.25e6));
  EXPECT_FALSE(find_scheme(slow.scheme.name).dense()) << slow.why;
  ASSERT_GE(slow.candidates.size(), 4U);
  EXPECT_EQ(slow.candidates[0].name, "dense");
  EmulationOptions taken = options_of("dense");
  taken.parallel.scheme = slow.scheme;
  Plan plan = make_plan(outline, taken, over(1.25e6));
  explain(plan, slow);
  for (const PlanRow& row : plan.rows) {
    EXPECT_EQ(row.why.starts_with(row.scheme == slow.scheme.name ? "auto: a step takes " : "stays dense: "),
              true)
        << row.scheme << ": " << row.why;
  }
  // A model of vectors has no factors to send.
  std::vector<ChainBlock> vectors;
  for (const char* name : {"a", "b"})
    vectors.push_back({.name = name,
                       .parameters = {{.name = std::string("w.") + name, .dims = {200'000}}},
                       .flops_per_token = 1e6});
  const Choice flat = choose_scheme(outline_from_flops(chain_shape("vectors", vectors), 64, 200e9),
                                    options_of("dense"), over(1.25e6));
  EXPECT_EQ(flat.scheme.name, "spardl") << flat.why;
  for (const Candidate& c : flat.candidates) EXPECT_NE(c.name, "powersgd");
}

TEST(Auto, SomeParametersMayStayDense) {
  EmulationOptions options = options_of("spardl");
  options.parallel.scheme.buckets.stay_dense = {"embedding.token.weight"};
  const Plan plan = make_plan(outline_of(), options, over(125e6));
  const auto row = std::ranges::find_if(
      plan.rows, [](const PlanRow& r) { return r.tensor.starts_with("embedding.token.weight"); });
  ASSERT_NE(row, plan.rows.end());
  EXPECT_EQ(row->scheme, "dense");
  EXPECT_NE(row->why.find("compression cannot pay"), std::string::npos);
  EXPECT_TRUE(std::ranges::any_of(plan.rows, [](const PlanRow& r) { return r.scheme == "spardl"; }));
  options.parallel.scheme.buckets.stay_dense = {"embeding"};
  EXPECT_THROW(make_plan(outline_of(), options, over(125e6)), UsageError);
}

std::int64_t count_of(const Trace& trace, TraceEvent::Kind kind, TrafficClass traffic) {
  return std::ranges::count_if(trace.events(),
                               [&](const TraceEvent& e) { return e.kind == kind && e.traffic == traffic; });
}

TEST(SimulatedTraining, LeavesMovesInItsTrace) {
  std::vector<Trace> traces(4);
  SimulationOptions simulation = over(12.5e6);
  simulation.traces = &traces;
  simulate_ranks(outline_of(), options_of("spardl"), simulation);
  for (const Trace& trace : traces) {
    const auto count = [&](TraceEvent::Kind kind) {
      return std::ranges::count_if(trace.events(), [&](const TraceEvent& e) { return e.kind == kind; });
    };
    EXPECT_GT(count(TraceEvent::Kind::computing), 10);
    EXPECT_GT(count(TraceEvent::Kind::waiting), 0);
    EXPECT_GT(count(TraceEvent::Kind::micro_op), 0);
  }
}

// Two blocks with a vector each, and letters between their backwards: announced, and blocking.
class Walked final : public Driver {
 public:
  static constexpr int kSteps = 3;
  static constexpr std::int64_t kLength = 100'000;

  Walked(Engine& engine, int micro_batches)
      : micro_batches_(micro_batches),
        strategies_(engine, engine.world(),
                    chain_shape("toy", {{"first", {{"a", {kLength}}}}, {"second", {{"b", {kLength}}}}}),
                    StepOptions{.tokens = false, .updates_wait = {}}) {
    DataParallelOptions options;
    options.scheme.name = "dense";
    options.scheme.buckets = {.bucket_bytes = 4, .dense_below = 0};  // one for each vector
    options.first_slot = strategies_.next_slot(engine.world());
    const std::vector<ParameterInfo> parameters{{"a", kLength, 0}, {"b", kLength, 1}};
    strategies_.add(
        std::make_unique<DataParallel>(engine, engine.world(), parameters, options, &strategies_.state()));
    strategies_.add(std::make_unique<Courier>(engine, engine.world(), strategies_.next_slot(engine.world())));
    strategies_.install();
  }

  // REQUIRES: lives until the task is done.
  static Task<void> run(Comm comm, Walked* me) {
    me->comm_ = comm;
    for (int step = 0; step < kSteps; ++step)
      co_await run_step(me, &me->strategies_, &me->strategies_.next_table(me->micro_batches_));
    co_await run_step(me, &me->strategies_, &me->strategies_.tables(me->micro_batches_).settle);
  }
  const std::vector<Exchange>& exchanges() { return strategies_.tables(micro_batches_).exchanges; }

  // A gradient is there when its backward begins: what was announced before it holds it.
  Task<void> compute(Piece piece) override {
    if (piece.work == Work::backward && piece.micro_batch + 1 == micro_batches_)
      strategies_.gradient_ready(piece.block, std::span<const float>(gradient_));
    co_await comm_.sleep_until(comm_.now() + 2ms);
  }
  Task<void> wait(Ticket ticket) override { co_await ticket; }
  Dense tensor(const TensorName&) override { return Dense(std::span<double>(letters_)); }

 private:
  int micro_batches_;
  std::vector<float> gradient_ = std::vector<float>(kLength, 1);
  std::vector<double> letters_ = std::vector<double>(4000);
  Comm comm_;
  Strategies strategies_;
};

std::vector<Trace> traces_of_walked(bool priority, int micro_batches,
                                    std::vector<Exchange>* exchanges = nullptr) {
  std::vector<Trace> traces(4);
  SimRanksOptions options;
  options.sim.link = {.ranks = 4, .latency_seconds = 50e-6, .bytes_per_second = 12.5e6};
  options.priority = priority;
  options.traces = &traces;
  SimRanks ranks(options);
  std::vector<std::unique_ptr<Walked>> all;
  for (int r = 0; r < ranks.size(); ++r)
    all.push_back(std::make_unique<Walked>(ranks.engine(r), micro_batches));
  ranks.run({.name = "training steps"},
            [&all](Comm comm, int r) { return Walked::run(comm, all[static_cast<std::size_t>(r)].get()); });
  if (exchanges != nullptr) *exchanges = all.front()->exchanges();
  for (int r = 0; r < ranks.size(); ++r) ranks.engine(r).shut_down(nullptr);
  return traces;
}

TEST(SimulatedTraining, GradientsGiveWayToWhatIsAnnouncedAndBlocks) {
  for (const bool priority : {true, false}) {
    std::size_t breaches = 0;
    for (const Trace& trace : traces_of_walked(priority, 1)) {
      EXPECT_EQ(count_of(trace, TraceEvent::Kind::hold, TrafficClass::blocking), Walked::kSteps);
      EXPECT_GE(count_of(trace, TraceEvent::Kind::micro_op, TrafficClass::blocking), Walked::kSteps);
      EXPECT_GE(count_of(trace, TraceEvent::Kind::micro_op, TrafficClass::gradient), 2 * Walked::kSteps);
      const TraceReport report = verify_trace(trace);
      breaches += report.breaches.size();
      EXPECT_EQ(report.aged, 0U);
      EXPECT_EQ(report.wanted, 0U);
    }
    if (priority) {
      EXPECT_EQ(breaches, 0U);
    } else {
      EXPECT_GT(breaches, 0U);  // control: the same steps without priorities
    }
  }
}

TEST(SimulatedTraining, ItsTraceHasTheClassesAndMicroBatchesOfItsTable) {
  std::vector<Exchange> exchanges;
  const std::vector<Trace> traces = traces_of_walked(true, 2, &exchanges);
  std::size_t named = 0;
  for (const Exchange& exchange : exchanges) {
    for (const TraceEvent& e : traces[1].events()) {
      if (e.kind != TraceEvent::Kind::operation || e.name != exchange.name) continue;
      EXPECT_EQ(name_of(e.traffic), name_of(exchange.traffic)) << e.name;
      ++named;
    }
  }
  EXPECT_EQ(named, 2U + 3 * Walked::kSteps);  // the plans of the step and of buckets; buckets and letters
  for (const char* name : {"forward first, micro-batch 0", "forward first, micro-batch 1",
                           "backward second, micro-batch 0", "backward second, micro-batch 1"}) {
    EXPECT_EQ(std::ranges::count_if(traces[1].events(), [&](const TraceEvent& e) { return e.name == name; }),
              Walked::kSteps)
        << name;
  }
}

TEST(SimulatedTraining, AByteScaleKeepsBytesAndTime) {
  const Outline outline = outline_of();
  EmulationOptions options = options_of("dense");
  SimulationOptions simulation = over(12.5e6, 8);
  const EmulatedSteps whole = simulate_ranks(outline, options, simulation)[0];
  simulation.byte_scale = 8;
  const EmulatedSteps small = simulate_ranks(outline, options, simulation)[0];
  EXPECT_NEAR(small.payload_bytes[5], whole.payload_bytes[5], 0.03 * whole.payload_bytes[5]);
  EXPECT_NEAR(small.step_seconds[5], whole.step_seconds[5], 0.05 * whole.step_seconds[5]);
  simulation.byte_scale = 0;
  EXPECT_THROW(simulate_ranks(outline, options, simulation), UsageError);
  simulation.byte_scale = 8;
  EXPECT_THROW(simulate_ranks(outline, options_of("powersgd"), simulation), UsageError);
}

// What passes between stages, and between parts of tensor-parallel ranks, is of tokens: none of its bytes stands for
// others.
TEST(SimulatedTraining, AByteScaleLeavesWhatPassesAlone) {
  struct Case {
    Mesh mesh;
    int columns;
  };
  for (const Case& c :
       {Case{{.dp = 2, .pp = 4}, 0}, Case{{.dp = 2, .pp = 4}, 2}, Case{{.dp = 2, .pp = 2, .tp = 2}, 0},
        Case{{.dp = 2, .pp = 2, .tp = 2}, 2}, Case{{.dp = 4, .tp = 2}, 0}}) {
    const Outline outline = outline_of(20e9, 8);
    EmulationOptions options = options_of("dense");
    options.mesh = c.mesh;
    options.micro_batches = 4;
    options.backward.columns = c.columns;
    SimulationOptions simulation = over(12.5e6, 8);
    const std::vector<EmulatedSteps> whole = simulate_ranks(outline, options, simulation);
    simulation.byte_scale = 8;
    const std::vector<EmulatedSteps> small = simulate_ranks(outline, options, simulation);
    for (std::size_t r = 0; r < whole.size(); ++r) {
      EXPECT_NEAR(small[r].payload_bytes[5], whole[r].payload_bytes[5], 0.03 * whole[r].payload_bytes[5])
          << r;
      EXPECT_NEAR(static_cast<double>(small[r].formula_bytes), static_cast<double>(whole[r].formula_bytes),
                  0.03 * static_cast<double>(whole[r].formula_bytes))
          << r;
      EXPECT_NEAR(small[r].step_seconds[5], whole[r].step_seconds[5], 0.05 * whole[r].step_seconds[5]) << r;
    }
  }
}

}  // namespace
}  // namespace weft
