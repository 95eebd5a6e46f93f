// Tables in training steps of an outline, in virtual time: bytes against formulas written out from the ids
// that were drawn, and what scheduling is worth.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include "embedding/table.h"
#include "embedding/trace_rules.h"
#include "planner/plan.h"
#include "weft/error.h"
#include "workload/emulate.h"
#include "workload/model_shapes.h"
#include "workload/table_draws.h"

namespace weft {
namespace {

constexpr std::int64_t kRows = 900, kWidth = 12, kTokens = 160, kShared = 40;

// A table that is read first, two dense blocks, a table that is read last.
Outline two_tables() {
  Outline out;
  out.model = "two tables";
  out.tokens_per_rank = kTokens;
  for (const char* name : {"embedding", "layer 0", "layer 1", "softmax"})
    out.blocks.push_back({name, 0.004, 0.008, 0.001});
  out.tensors = {{.name = "in", .length = kRows * kWidth, .rows = kRows, .columns = kWidth, .block = 0},
                 {.name = "w0", .length = 30'000, .block = 1},
                 {.name = "w1", .length = 30'000, .block = 2},
                 {.name = "out", .length = kRows * kWidth, .rows = kRows, .columns = kWidth, .block = 3}};
  out.parameters = 2 * kRows * kWidth + 60'000;
  out.tables.resize(2);
  for (std::size_t t = 0; t < 2; ++t) {
    out.tables[t].name = t == 0 ? "in" : "out";
    out.tables[t].rows = kRows;
    out.tables[t].width = kWidth;
    assume_lookups(out.tables[t], kTokens, t == 0 ? 0 : kShared);
  }
  return out;
}

EmulationOptions options_of(const std::string& way, const std::string& scheduling = "") {
  EmulationOptions out;
  out.parallel.scheme.name = "dense";
  out.parallel.scheme.buckets = {.bucket_bytes = 4, .dense_below = 0};
  out.tables.way = way;
  out.tables.scheduling = scheduling;
  out.steps = 6;
  out.warmup = 0;
  return out;
}

SimulationOptions simulation_of(int ranks, double rate) {
  SimulationOptions out;
  out.ranks = ranks;
  out.link.bytes_per_second = rate;
  return out;
}

std::set<std::int64_t> list_of(const OutlineTable& table, int rank, std::int64_t step) {
  const std::vector<std::int64_t> ids = TableDraws(table).ids(EmulationOptions{}.seed, rank, step);
  return {ids.begin(), ids.end()};
}

// Of one rank in a step: ids, rows and gradients of both tables.
std::int64_t bytes_by_hand(const Outline& outline, int rank, int ranks, std::int64_t step) {
  const std::int64_t width = kWidth * (rank + 1) / ranks - kWidth * rank / ranks;
  std::int64_t sum = 0;
  for (const OutlineTable& table : outline.tables) {
    const auto mine = static_cast<std::int64_t>(list_of(table, rank, step).size());
    std::int64_t others = 0;
    for (int r = 0; r < ranks; ++r)
      if (r != rank) others += static_cast<std::int64_t>(list_of(table, r, step).size());
    sum += 4 * mine * (ranks - 1) + 4 * width * others + 4 * (kWidth - width) * mine;
  }
  return sum;
}

// Of every step, whenever its exchanges ended.
TEST(SimulatedTables, BytesAreThoseOfTheFormulas) {
  const Outline outline = two_tables();
  for (const int ranks : {1, 2, 4}) {  // that divide the columns: blocks are as written out
    for (const char* scheduling : {"off", "horizontal", "both", "two-sided"}) {
      const EmulationOptions options = options_of("embrace", scheduling);
      const std::vector<EmulatedSteps> got = simulate_ranks(outline, options, simulation_of(ranks, 1e7));
      for (int r = 0; r < ranks; ++r) {
        const EmulatedSteps& mine = got[static_cast<std::size_t>(r)];
        // A ring over two vectors of 30,000, which every number of ranks here divides.
        const double dense = 2 * 2.0 * (ranks - 1) / ranks * 30'000 * 4;
        ASSERT_EQ(mine.payload_bytes.size(), 6u);
        for (std::size_t step = 0; step < mine.payload_bytes.size(); ++step) {
          const auto tables =
              static_cast<double>(bytes_by_hand(outline, r, ranks, static_cast<std::int64_t>(step)));
          EXPECT_EQ(mine.payload_bytes[step] - dense, tables) << ranks << " ranks, " << scheduling;
          EXPECT_EQ(mine.table_formula_bytes[step], tables) << ranks << " ranks, " << scheduling;
          // Control: another step has other bytes, so that one that is booked late is seen.
          if (ranks > 1 && step > 0) {
            EXPECT_NE(mine.payload_bytes[step], mine.payload_bytes[step - 1]);
          }
        }
        EXPECT_EQ(static_cast<double>(mine.formula_bytes), dense + mine.table_formula_bytes.back());
      }
    }
  }
}

double sum_of(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0);
}

// Steady ones.
double step_of(const EmulatedSteps& rank) {
  const std::vector<double> steady(rank.step_seconds.begin() + 1, rank.step_seconds.end() - 1);
  return sum_of(steady) / static_cast<double>(steady.size());
}
double step_of(const Outline& outline, const EmulationOptions& options, const SimulationOptions& simulation) {
  return step_of(simulate_ranks(outline, options, simulation)[0]);
}

TEST(SimulatedTables, SchedulingHelpsAndALinkWithoutLimitNeedsNone) {
  const Outline outline = two_tables();
  const std::vector<std::string> all{"off", "horizontal", "vertical", "both", "two-sided"};
  for (const double rate : {2e7, 1e7, 5e6}) {
    std::map<std::string, double> seconds;
    for (const std::string& scheduling : all) {
      const std::vector<EmulatedSteps> ranks =
          simulate_ranks(outline, options_of("embrace", scheduling), simulation_of(4, rate));
      seconds[scheduling] = step_of(ranks[0]);
      EXPECT_GE(seconds[scheduling], compute_seconds(outline)) << scheduling << " " << rate;
      for (const EmulatedSteps& rank : ranks)
        EXPECT_GE(sum_of(rank.step_seconds), sum_of(rank.payload_bytes) / rate) << scheduling << " " << rate;
    }
    // Rows in two parts are two messages: of each table, one that has more slack may be under way where the
    // other one comes. It has at most a row for each token, this rank's quarter of its columns.
    const double slack = 2 * 4 * (kWidth / 4) * (kTokens + kShared) / rate;
    EXPECT_LT(slack, 0.02 * compute_seconds(outline));
    // The same messages, earlier.
    EXPECT_LT(seconds["horizontal"], seconds["off"]) << rate;
    EXPECT_LE(seconds["vertical"], seconds["off"] + slack) << rate;
    EXPECT_LE(seconds["both"], seconds["horizontal"] + slack) << rate;
    EXPECT_LE(seconds["two-sided"], seconds["both"] + slack) << rate;
    EXPECT_LT(seconds["both"], seconds["off"]) << rate;
    EXPECT_LT(seconds["two-sided"], seconds["horizontal"]) << rate;
    // Where the link is never idle, what is not urgent leaves it to what is.
    if (rate <= 1e7) {
      EXPECT_LT(seconds["both"], seconds["horizontal"]) << rate;
    }
  }
  for (const std::string& scheduling : all) {
    const double seconds = step_of(outline, options_of("embrace", scheduling), simulation_of(4, 0));
    EXPECT_NEAR(seconds, compute_seconds(outline), 1e-4) << scheduling;
  }
  // The default is the last of them.
  const auto by_default = simulate_ranks(outline, options_of("embrace"), simulation_of(4, 1e7));
  const auto two_sided = simulate_ranks(outline, options_of("embrace", "two-sided"), simulation_of(4, 1e7));
  EXPECT_EQ(by_default[0].step_seconds, two_sided[0].step_seconds);
}

// Traces of a run with all rules checked: those of all traffic, in virtual time to the instant, and those of
// each table.
struct TracedRun {
  std::vector<Trace> traces;
  std::map<std::string, std::uint32_t> slots;  // first ones, by table
};
TracedRun traced(const std::string& way, const std::string& scheduling, const std::string& waits = {}) {
  const Outline outline = two_tables();
  EmulationOptions options = options_of(way, scheduling);
  options.updates_wait = waits;
  SimulationOptions simulation = simulation_of(4, 1e7);
  simulation.link.latency_seconds = 50e-6;
  TracedRun out;
  for (const PlanRow& row : make_plan(outline, options, simulation).rows) {
    if (row.tensor == "in" || row.tensor == "out") out.slots[row.tensor] = row.slot;
  }
  out.traces.resize(4);
  simulation.traces = &out.traces;
  simulate_ranks(outline, options, simulation);
  return out;
}
std::vector<std::string> breaches_of(const TracedRun& run) {
  std::vector<std::string> out;
  for (const Trace& trace : run.traces) {
    for (std::string& breach : verify_trace(trace, Time{0}).breaches) out.push_back(std::move(breach));
    for (const auto& [table, slot] : run.slots) {
      for (std::string& breach : verify_table(trace, table, slot)) out.push_back(std::move(breach));
    }
  }
  return out;
}

TEST(SimulatedTables, TracesHoldToTheRules) {
  const std::vector<std::string> none;
  for (const char* scheduling : {"off", "horizontal", "vertical", "both", "two-sided"}) {
    EXPECT_EQ(breaches_of(traced("embrace", scheduling)), none) << scheduling;
    EXPECT_EQ(breaches_of(traced("embrace", scheduling, "clipping")), none) << scheduling;
  }
  for (const char* way : {"allgather", "parallax", "hashed", "alltoall"})
    EXPECT_EQ(breaches_of(traced(way, "")), none) << way;
  // Controls: the trace of a run in which somebody came too early or too late.
  const TracedRun run = traced("embrace", "two-sided");
  const auto changed = [&](TableExchange exchange, TraceEvent::Kind kind, void (*change)(TraceEvent&)) {
    TracedRun other = run;
    for (Trace& trace : other.traces) {
      const std::vector<TraceEvent> events(trace.events().begin(), trace.events().end());
      trace.clear();
      for (TraceEvent e : events) {
        const bool named = e.slot == run.slots.at("in") + static_cast<std::uint32_t>(exchange);
        if (named && e.kind == kind) change(e);
        trace.add(std::move(e));
      }
    }
    return breaches_of(other);
  };
  const auto says = [](const std::vector<std::string>& breaches, std::string_view what) {
    return std::ranges::any_of(breaches, [&](const std::string& b) { return b.find(what) != b.npos; });
  };
  constexpr auto kOperation = TraceEvent::Kind::operation, kMicroOp = TraceEvent::Kind::micro_op;
  const auto soon = [](TraceEvent& e) { e.started = e.ready = e.ready - Time{5ms}; };
  const auto late = [](TraceEvent& e) { e.finished += Time{90ms}; };
  EXPECT_TRUE(says(changed(TableExchange::rows, kMicroOp, soon), "'in', operation"));
  const std::vector<std::string> delayed = changed(TableExchange::delayed, kOperation, late);
  EXPECT_TRUE(says(delayed, "behind the prior rows of the next step"));
  EXPECT_TRUE(says(delayed, "behind a lookup that may read them"));
  EXPECT_TRUE(says(delayed, "behind a lookup in advance"));
  EXPECT_TRUE(says(changed(TableExchange::prior, kOperation, late), "before the prior rows"));
  const auto last = [](TraceEvent& e) { e.traffic = TrafficClass::delayed; };
  EXPECT_TRUE(says(changed(TableExchange::prior, kMicroOp, last), "goes first"));
}

// Who holds all rows asks nobody for them.
TEST(SimulatedTables, ReplicatedRowsDoNotTravel) {
  for (const auto& [way, sends] : {std::pair{"allgather", false}, std::pair{"allgather-raw", false},
                                   std::pair{"parallax-pushed", false}, std::pair{"hashed", true}}) {
    const TracedRun run = traced(way, "");
    const std::uint32_t slot = run.slots.at("in") + static_cast<std::uint32_t>(TableExchange::rows);
    const auto of_rows = [slot](const TraceEvent& e) {
      return e.kind == TraceEvent::Kind::micro_op && e.slot == slot;
    };
    EXPECT_EQ(std::ranges::any_of(run.traces[1].events(), of_rows), sends) << way;
  }
}

// What every rank has all of costs its computation in addition, and its bytes are the table's.
TEST(SimulatedTables, DenseTablesTakeMore) {
  Outline outline = two_tables();
  const auto sent = [&](const std::string& way) {
    const std::vector<EmulatedSteps> got = simulate_ranks(outline, options_of(way), simulation_of(4, 1e7));
    return got[0].payload_bytes[1];
  };
  const double dense = 2 * 0.75 * 4 * (60'000.0 + 2 * kRows * kWidth);
  EXPECT_EQ(sent("dense"), dense);
  EXPECT_EQ(sent("scheme"), dense);
  EXPECT_LT(sent("embrace"), sent("allgather"));
  outline.tables[1].dense_update_seconds = 0.005;
  const SimulationOptions unlimited = simulation_of(4, 0);
  EXPECT_NEAR(step_of(outline, options_of("dense"), unlimited), compute_seconds(outline) + 0.005, 1e-4);
  EXPECT_NEAR(step_of(outline, options_of("embrace"), unlimited), compute_seconds(outline), 1e-4);
}

// Of gradients every element stands for some, of rows each for itself: the same bytes, and nearly the same
// time, with and without what computation costs.
TEST(SimulatedTables, AByteScaleLeavesThemAlone) {
  const Outline outline = two_tables();
  for (const char* way : {"embrace", "allgather", "hashed"}) {
    for (const double cost : {0.0, 1e-9}) {
      SimulationOptions simulation = simulation_of(4, 1e7);
      simulation.costs.kernels.copy_byte = simulation.costs.kernels.fold_byte = cost;
      simulation.costs.kernels.unite_index = cost;
      const auto run = [&](const Outline& of, int scale) {
        simulation.byte_scale = scale;
        return simulate_ranks(of, options_of(way), simulation);
      };
      const std::vector<EmulatedSteps> all = run(outline, 1), some = run(outline, 5);
      for (std::size_t r = 0; r < all.size(); ++r) {
        EXPECT_EQ(some[r].payload_bytes, all[r].payload_bytes) << way;
        EXPECT_EQ(some[r].table_formula_bytes, all[r].table_formula_bytes) << way;
        EXPECT_EQ(some[r].formula_bytes, all[r].formula_bytes) << way;
      }
      EXPECT_NEAR(step_of(some[0]), step_of(all[0]), 0.01 * step_of(all[0])) << way;
      // Controls: a fifth of the gradients without a scale, and rows that count as gradients do.
      Outline small = outline;
      for (const std::size_t w : {1u, 2u}) small.tensors[w].length /= 5;
      small.parameters -= 2 * 24'000;
      EXPECT_LT(step_of(run(small, 1)[0]), 0.95 * step_of(all[0])) << way;
      Outline more = outline;
      for (OutlineTable& table : more.tables) table.width *= 5;
      for (const std::size_t t : {0u, 3u}) {
        more.tensors[t].columns *= 5;
        more.tensors[t].length *= 5;
      }
      more.parameters += 2 * 4 * kRows * kWidth;
      EXPECT_GT(step_of(run(more, 1)[0]), 1.01 * step_of(all[0])) << way;
    }
  }
}

// Rows that every batch reads cannot be delayed: a plan says so in its row, and a run in its notes.
TEST(SimulatedTables, ASplitThatIsUselessIsSaidToBe) {
  Outline outline = two_tables();
  const auto why = [&] {
    std::string out;
    for (const PlanRow& row : make_plan(outline, options_of("embrace"), simulation_of(4, 1e7)).rows)
      if (row.tensor == "out") out = row.why;
    return out;
  };
  const std::string kSays = "are read again by the next batch: none are delayed any more";
  EXPECT_EQ(why().find(kSays), std::string::npos);  // control
  assume_lookups(outline.tables[1], 50 * kRows, 0);
  EXPECT_NE(why().find(kSays), std::string::npos) << why();
  const std::vector<EmulatedSteps> got =
      simulate_ranks(outline, options_of("embrace"), simulation_of(4, 1e7));
  ASSERT_EQ(got[3].notes.size(), 1u);
  EXPECT_TRUE(got[3].notes[0].starts_with("table 'out': ") && got[3].notes[0].ends_with(kSays));
}

double peak_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return 1024.0 * static_cast<double>(usage.ru_maxrss);
}

// Plans of the papers' shapes hold no table and no whole gradient.
TEST(SimulatedTables, PlansOfLargeShapesNeedLittleMemory) {
  constexpr double kBound = 2.5e9;
  const double before = peak_bytes();
  for (const char* way : {"embrace", "scheme"}) {
    const Outline outline = outline_from_flops(model_shape("lm", model_options("lm", "paper")), 200, 50e9);
    EmulationOptions options;
    options.parallel.scheme.name = "dense";
    options.tables.way = way;
    SimulationOptions simulation = simulation_of(8, 1.25e9);
    simulation.byte_scale = walk_scale(outline, options, simulation.ranks);
    const Plan plan = make_plan(outline, options, simulation);
    EXPECT_LT(peak_bytes() - before, kBound) << way;
    EXPECT_GT(plan.prediction.step_seconds, 0);
    // Control: the walk that has it all would need more, of gradients or of tables with their moments.
    EXPECT_GT((std::string_view(way) == "scheme" ? 8.0 : 3.0) * 4 * static_cast<double>(outline.parameters),
              kBound);
    if (std::string_view(way) == "scheme") {  // its bytes are those of all elements: 2 (P-1)/P of 4 bytes
      const double exact = 1.75 * 4 * static_cast<double>(outline.parameters);
      EXPECT_NEAR(plan.prediction.busiest_port_bytes, exact, 0.01 * exact);
    }
  }
}

TEST(TableDraws, HitAsManyRowsAsTheyWereFittedTo) {
  OutlineTable table{.name = "t", .rows = 5000, .width = 4};
  for (const double zipf : {0.6, 1.0, 1.3}) {
    table.zipf = zipf;
    table.lookups_per_step = 2000;
    const std::vector<std::int64_t> ids = TableDraws(table).ids(3, 1, 7);
    ASSERT_EQ(ids.size(), 2000u);
    OutlineTable fitted = table;
    describe_lookups(fitted, ids, 0);
    EXPECT_NEAR(fitted.zipf, zipf, 0.06);
    const std::set<std::int64_t> distinct(ids.begin(), ids.end());
    EXPECT_EQ(fitted.rows_per_step, static_cast<double>(distinct.size()));
    EXPECT_NE(ids, TableDraws(table).ids(3, 2, 7));
    EXPECT_EQ(ids, TableDraws(table).ids(3, 1, 7));
  }
  // Shared ones are the same on all ranks, own ones are not.
  table.shared_per_step = 500;
  const std::vector<std::int64_t> a = TableDraws(table).ids(3, 0, 1), b = TableDraws(table).ids(3, 1, 1);
  EXPECT_TRUE(std::equal(a.end() - 500, a.end(), b.end() - 500));
  EXPECT_FALSE(std::equal(a.begin(), a.end() - 500, b.begin()));
}

}  // namespace
}  // namespace weft
