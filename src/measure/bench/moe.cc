// weft bench moe: dispatch and combine of a layer of experts, alone on the link, by every all-to-all and in
// every number of slices that was asked for: how long, how many bytes, who gets how much.
#include "measure/bench/moe.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>

#include "base/statistics.h"
#include "measure/text.h"
#include "patterns/blocks.h"
#include "weft/error.h"

namespace weft {

namespace {

constexpr int kWarmUp = 3;
constexpr double kSecondsPerCase = 1.0;
constexpr int kFewest = 10, kMost = 1000;
constexpr double kMostBytes = 16e9;  // of all ranks' rows, out and home

struct MoeMeasured {
  std::vector<double> seconds;      // of each iteration: its slowest rank
  std::vector<std::uint64_t> sent;  // of each rank, in one
  bool correct = true;
};

std::vector<std::string> algorithms_of(const BenchOptions& options) {
  const Shape shape{.size = options.ranks, .uneven = true, .node_size = std::max(1, node_size(options))};
  std::vector<std::string> out;
  for (const std::string& name : options.algorithms) {
    if (name == "auto")
      throw UsageError("bench moe measures algorithms by name: --algorithm pairwise, hierarchical");
    const Algorithm& row = find_algorithm(Family::all_to_all, name);
    if (!row.supports(shape))
      throw UsageError("--algorithm " + name +
                       " cannot carry tokens to experts: " + std::string(row.summary));
    if (name == "hierarchical" && shape.node_size == 1)
      throw UsageError(
          "--algorithm hierarchical needs --nodes with as many ranks on each, and more than one");
    out.push_back(name);
  }
  if (!out.empty()) return out;
  for (const Algorithm& row : algorithms(Family::all_to_all)) {
    if (row.supports(shape) && (row.name != "hierarchical" || shape.node_size > 1))
      out.emplace_back(row.name);
  }
  return out;
}

std::vector<MoeCase> cases_of(const BenchOptions& options) {
  std::vector<MoeCase> out;
  for (const int slices : options.moe.slices) {
    for (const std::string& algorithm : algorithms_of(options)) {
      const int node = algorithm == "hierarchical" ? node_size(options) : 1;
      out.push_back({.algorithm = algorithm, .slices = slices, .node_size = node});
    }
  }
  return out;
}

// Of the busiest port, out or in (as much: what goes out comes home), dispatch and combine together.
double port_bytes(const BenchOptions& options, const MoeRouting& routing) {
  const auto size = static_cast<std::size_t>(options.ranks);
  const int nodes = options.nodes > 1 ? options.nodes : options.ranks;
  const Blocks blocks(nodes, options.ranks);
  std::vector<double> of_port(static_cast<std::size_t>(nodes));
  std::vector<std::size_t> node_of(size);
  for (int n = 0; n < nodes; ++n) {
    for (std::int64_t r = blocks.begin(n); r < blocks.begin(n + 1); ++r)
      node_of[static_cast<std::size_t>(r)] = static_cast<std::size_t>(n);
  }
  const std::vector<std::int64_t> rows = moe_rows(options.moe, routing, options.ranks, 1).front();
  for (std::size_t from = 0; from < size; ++from) {
    for (std::size_t to = 0; to < size; ++to) {
      if (node_of[from] == node_of[to]) continue;
      const double bytes = static_cast<double>(rows[from * size + to] * options.moe.width) * sizeof(float);
      of_port[node_of[from]] += bytes;
      of_port[node_of[to]] += bytes;
    }
  }
  return *std::ranges::max_element(of_port);
}

std::optional<double> ideal_seconds(const BenchOptions& options, const MoeRouting& routing) {
  const std::optional<LinkSpec>& link = options.link ? options.link : options.ideal;
  if (!link || options.ranks == 1) return std::nullopt;
  double rate = link->bytes_per_second;
  if (options.nodes == 1) {  // nothing leaves the node
    rate = options.scale_up_bytes_per_second;
    if (rate <= 0) return std::nullopt;
  }
  const double bytes = port_bytes(options, routing);
  return bytes > 0 ? std::optional(bytes / rate) : std::nullopt;
}

// Of the rank with the most rows, out and home.
double bytes_of(const BenchOptions& options, const MoeRouting& routing) {
  const auto size = static_cast<std::size_t>(options.ranks);
  const std::vector<std::int64_t> rows = moe_rows(options.moe, routing, options.ranks, 1).front();
  std::int64_t most = 0;
  for (std::size_t r = 0; r < size; ++r) {
    std::int64_t mine = 0;
    for (std::size_t to = 0; to < size; ++to) mine += rows[r * size + to];
    most = std::max(most, mine);
  }
  return 2.0 * static_cast<double>(most * options.moe.width) * sizeof(float);
}

Json object(const BenchOptions& options, const MoeRouting& routing, const MoeCase& c, const MoeMeasured& m) {
  const MoeBench& bench = options.moe;
  const std::vector<std::uint64_t> formula = moe_formula(bench, routing, options.ranks, c);
  const auto [middle, low, high] = median_with_interval(m.seconds);
  const double bytes = bytes_of(options, routing);
  const std::optional<double> ideal = ideal_seconds(options, routing);
  const std::vector<std::int64_t> load = routing.load();
  std::int64_t copies = 0, tokens = 0;
  for (const std::int64_t of_expert : load) copies += of_expert;
  for (int r = 0; r < options.ranks; ++r) tokens = std::max(tokens, routing.tokens(r));
  const std::int64_t most = *std::ranges::max_element(load);
  const double mean = static_cast<double>(copies) / bench.experts;
  return {{"family", options.family},
          {"algorithm", c.algorithm},
          {"transport", options.transport},
          {"simulated", options.transport == "sim"},
          {"shaped", options.link.has_value() && options.transport != "sim"},
          {"ranks", options.ranks},
          {"nodes", options.nodes},
          {"dtype", "float32"},
          {"tokens", tokens},
          {"width", bench.width},
          {"experts", bench.experts},
          {"choices", bench.choices},
          {"capacity_factor", bench.capacity_factor},
          {"slices", c.slices},
          {"routing", bench.routing},
          {"bytes", std::llround(bytes)},
          {"byte_scale", 1},
          {"iterations", m.seconds.size()},
          {"seconds_median", middle},
          {"seconds_low", low},
          {"seconds_high", high},
          {"seconds_p99", quantile(m.seconds, 0.99)},
          {"algbw_bytes_per_second", middle > 0 ? bytes / middle : 0},
          {"busbw_bytes_per_second", middle > 0 ? bytes / middle * (options.ranks - 1) / options.ranks : 0},
          {"payload_bytes_per_rank", *std::ranges::max_element(m.sent)},
          {"formula_bytes_per_rank", *std::ranges::max_element(formula)},
          {"formula_is_bound", false},
          {"bytes_as_formula", m.sent == formula},
          {"rounds", nullptr},
          {"formula_rounds", nullptr},
          {"link_bytes_per_second", options.link ? Json(options.link->bytes_per_second) : Json(nullptr)},
          {"latency_seconds", options.link ? Json(options.link->latency_seconds) : Json(nullptr)},
          {"ideal_seconds", ideal ? Json(*ideal) : Json(nullptr)},
          {"efficiency", ideal && middle > 0 ? Json(*ideal / middle) : Json(nullptr)},
          {"load", load},
          {"load_max", most},
          {"load_mean", mean},
          {"load_max_over_mean", static_cast<double>(most) / mean},
          {"dropped_share", static_cast<double>(routing.num_dropped()) / static_cast<double>(copies)},
          {"correct", m.correct}};
}

struct Column {
  const char* title;
  int width;  // negative: to the left
};
constexpr Column kColumns[] = {{"algorithm", -14}, {"slices", 8},      {"median", 10},
                               {"p99", 10},        {"bytes/rank", 12}, {"formula", 12},
                               {"ideal", 10},      {"efficiency", 12}, {"correct", 9}};

std::string joined(const std::vector<std::string>& cells) {
  std::string line;
  for (std::size_t i = 0; i < cells.size(); ++i) line += padded(cells[i], kColumns[i].width);
  return line;
}

std::vector<std::string> head_text(const Json& row) {
  const double factor = row["capacity_factor"];
  const std::string what = row["tokens"].dump() + " tokens a rank of width " + row["width"].dump() + ", " +
                           row["experts"].dump() + " experts, " + row["choices"].dump() +
                           " for each token (" + row["routing"].get<std::string>() + "): the busiest gets " +
                           number_text("%.2f", row["load_max_over_mean"]) + " of the mean; " +
                           (factor > 0 ? "capacity factor " + number_text("%g", factor) + " drops " +
                                             number_text("%.1f %%", 100 * row["dropped_share"].get<double>())
                                       : std::string("none is dropped"));
  std::vector<std::string> titles;
  for (const Column& column : kColumns) titles.emplace_back(column.title);
  return {what, "", joined(titles)};
}

std::string row_text(const Json& row) {
  const bool off = !row["bytes_as_formula"].get<bool>();
  const Json &ideal = row["ideal_seconds"], &efficiency = row["efficiency"];
  return joined({row["algorithm"], row["slices"].dump(), seconds_text(row["seconds_median"]),
                 seconds_text(row["seconds_p99"]),
                 size_text(row["payload_bytes_per_rank"].get<double>()) + (off ? "!" : ""),
                 size_text(row["formula_bytes_per_rank"].get<double>()),
                 ideal.is_null() ? "-" : seconds_text(ideal),
                 efficiency.is_null() ? "-" : number_text("%.1f %%", 100 * efficiency.get<double>()),
                 row["correct"].get<bool>() ? "yes" : "NO"});
}

// One rank's part of a case, in wall time.
MoeMeasured measure(const BenchOptions& options, const MoeRouting& routing, MoeCase& c,
                    const BenchRank& rank) {
  World& world = rank.world;
  MoeRank mine(options, routing, c, world.engine(), false);
  Walker walker(mine, mine.strategies());
  SteadyClock clock;
  MoeMeasured m;
  const auto iterate = [&](bool looked_at) {
    mine.prepare(looked_at);
    world.barrier();
    const Time start = clock.now();
    walker.walk(mine.strategies().forward_table());
    const double took = seconds(clock.now() - start);
    if (!looked_at) return took;
    world.barrier();
    m.correct = m.correct && mine.correct(options.spoil && world.rank() == 0);
    return took;
  };
  try {
    for (const Ticket& ticket : mine.strategies().tickets()) ticket.wait();
    std::vector<double> last(1);
    for (int i = 0; i < kWarmUp; ++i) last[0] = iterate(i == 0);
    largest_of_ranks(world, last);
    const int fits = static_cast<int>(std::min<double>(kMost, kSecondsPerCase / std::max(last[0], 1e-9)));
    const int iterations = options.iterations > 0 ? options.iterations : std::max(kFewest, fits);
    for (int i = 0; i < iterations; ++i) m.seconds.push_back(iterate(false));
    std::vector<double> values(static_cast<std::size_t>(world.size()) + 1);
    values[static_cast<std::size_t>(world.rank())] = static_cast<double>(mine.bytes_sent());
    static_cast<void>(iterate(true));
    values.back() = m.correct ? 0 : 1;
    largest_of_ranks(world, values);
    largest_of_ranks(world, m.seconds);
    m.correct = values.back() == 0;
    values.pop_back();
    for (const double bytes : values) m.sent.push_back(static_cast<std::uint64_t>(bytes));
  } catch (...) {
    abandon(mine.strategies(), std::current_exception());
    throw;
  }
  c.slot = mine.strategies().next_slot(world.comm());
  return m;
}

Task<void> settle(MoeRank* rank) {
  const std::vector<Ticket> tickets = rank->strategies().tickets();
  for (const Ticket& ticket : tickets) {
    if (ticket.valid()) co_await ticket;
  }
}

MoeMeasured simulate(const BenchOptions& options, const MoeRouting& routing, const MoeCase& c,
                     std::vector<Trace>* traces) {
  SimRanksOptions sim = sim_options(options);
  sim.traces = traces;
  SimRanks ranks(sim);
  std::vector<std::unique_ptr<MoeRank>> all;
  MoeMeasured m;
  try {
    for (int r = 0; r < options.ranks; ++r)
      all.push_back(std::make_unique<MoeRank>(options, routing, c, ranks.engine(r), true));
    const auto run = [&](const char* name, auto body) {
      return seconds(ranks.run({.name = name}, [&all, body](const Comm&, int r) {
        return body(all[static_cast<std::size_t>(r)].get());
      }));
    };
    static_cast<void>(run("plans", &settle));
    const int iterations = options.iterations > 0 ? options.iterations : 1;
    for (int i = 0; i <= iterations; ++i) {  // the last is looked at, and not counted
      for (const auto& rank : all) rank->prepare(i == iterations);
      const double took = run("dispatch and combine", &MoeRank::forward);
      if (i < iterations) m.seconds.push_back(took);
    }
    for (std::size_t r = 0; r < all.size(); ++r) {
      m.correct = m.correct && all[r]->correct(options.spoil && r == 0);
      m.sent.push_back(all[r]->bytes_sent());
    }
  } catch (...) {
    // Operations end before the memory that they use does.
    for (int r = 0; r < options.ranks; ++r) ranks.engine(r).shut_down(std::current_exception());
    throw;
  }
  return m;
}

void write_trace(const std::string& path, const std::vector<Trace>& traces) {
  std::vector<const Trace*> of_rank;
  of_rank.reserve(traces.size());
  for (const Trace& trace : traces) of_rank.push_back(&trace);
  std::ofstream file(path);
  file << chrome_trace(of_rank);
  if (!file.flush()) throw UsageError("--trace " + path + ": cannot be written");
}

void add(const Json& row, bool first, BenchReport& report) {
  std::vector<std::string> lines;
  if (first) lines = head_text(row);
  lines.push_back(row_text(row));
  report.add_object(row, lines);
}

}  // namespace

void check_moe(const BenchOptions& options) {
  static_cast<void>(algorithms_of(options));
  const MoeBench& bench = options.moe;
  check(RouteOptions{
      .experts = bench.experts, .choices = bench.choices, .capacity_factor = bench.capacity_factor});
  if (bench.experts % options.ranks != 0)
    throw UsageError("--experts " + std::to_string(bench.experts) + " cannot be dealt to " +
                     std::to_string(options.ranks) + " ranks, as many to each");
  if (options.byte_scale != 1) throw UsageError("bench moe counts every byte as one, without --byte-scale");
  const double rows =
      std::max(1.0, bench.capacity_factor) * static_cast<double>(bench.tokens) * bench.choices;
  if (rows * static_cast<double>(bench.width) * options.ranks * 2 * sizeof(float) > kMostBytes)
    throw UsageError("the rows of " + std::to_string(options.ranks) +
                     " ranks would take more than 16 GB: fewer "
                     "--tokens, --width or --ranks");
}

void bench_moe(const BenchOptions& options, bool launched, BenchReport* report) {
  const MoeRouting routing(options.moe, options.ranks);
  std::vector<MoeCase> cases = cases_of(options);
  const auto title = [](const MoeCase& c) {
    return "moe " + c.algorithm + ", " + std::to_string(c.slices) + " slices ...";
  };
  if (options.transport == "sim") {
    std::vector<Trace> traces;
    for (std::size_t i = 0; i < cases.size(); ++i) {
      report->progress(title(cases[i]));
      const MoeMeasured m = simulate(options, routing, cases[i], options.trace.empty() ? nullptr : &traces);
      add(object(options, routing, cases[i], m), i == 0, *report);
    }
    if (!options.trace.empty()) write_trace(options.trace, traces);
  } else {
    on_ranks(options, {.launched = launched}, report, [&](const BenchRank& rank) {
      std::uint32_t slot = 1;
      for (std::size_t i = 0; i < cases.size(); ++i) {
        MoeCase c = cases[i];
        c.slot = slot;
        if (rank.report != nullptr) rank.report->progress(title(c));
        const MoeMeasured m = measure(options, routing, c, rank);
        slot = c.slot;
        if (rank.report != nullptr) add(object(options, routing, cases[i], m), i == 0, *rank.report);
        rank.world.barrier();
      }
    });
  }
  if (report == nullptr || options.json) return;
  std::puts(
      "\nmedian, p99 of dispatch and combine over iterations of the slowest rank, with nothing computed; "
      "bytes: "
      "payload of rows that the busiest\nrank sent, ! where it is not the formula's; ideal: bytes at the "
      "busiest "
      "port / rate (docs/measuring.md)");
}

}  // namespace weft
