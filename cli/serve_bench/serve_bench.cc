// weft serve-bench: requests through layers of experts over several ranks, under one placement of the experts
// after the other; how long they take. What ranks compute is emulated (workload/serve.h).
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

#include "base/statistics.h"
#include "base/units.h"
#include "measure/emulated.h"
#include "measure/text.h"
#include "torch_verbs.h"
#include "train_flags.h"
#include "verbs.h"
#include "weft/error.h"
#include "workload/model_shapes.h"
#include "workload/serve.h"

namespace weft::cli {

namespace {

using Json = nlohmann::ordered_json;

// At these a rank's part of a request takes about 20 ms a layer, and what has to do with experts is 85 % of the
// time of static placement.
struct ServeBench : NetworkFlags {
  ServeBench() { link = "400mbit,50us"; }

  int ranks = 8, experts = 8, layers = 12, heads = 8, path = 3, profile_batches = 64;
  std::int64_t width = 512, tokens = 128, sequence = 64;
  std::string transport = "threads", flops = "20gflops", outline;
  std::string placements = "static,history,lina,ideal", routers = "stationary", weights = "resident";
  std::string expert_time = "50us", plan_time;
  std::uint64_t seed = 2, table_seed = 1, profile_seed = 100;
  std::int64_t requests = 100, warmup = 16;
  DrawnRouterOptions router;
  PlacerOptions placer;
  bool json = false;
};

std::vector<std::string> list_in(const std::string& text) {
  std::vector<std::string> out;
  std::stringstream in(text);
  for (std::string name; std::getline(in, name, ',');) out.push_back(name);
  return out;
}

void add_flags(CLI::App& app, Settings& s, ServeBench& c) {
  s.group("Serving");
  s.add("placement", c.placements, "of experts, one or several: " + list_of(placement_names()));
  s.add("router", c.routers, "whose topics are: stationary, drifting; one or both");
  s.add("ranks", c.ranks, "that serve together");
  s.add("experts", c.experts, "of a layer");
  s.add("layers", c.layers, "each with experts");
  s.add("width", c.width, "of a token's row");
  s.add("tokens", c.tokens, "of a request, on each rank");
  s.add("sequence", c.sequence, "tokens of a sequence: one of them needs the head");
  s.add("requests", c.requests, "that are measured, one after the other");
  s.add("warmup", c.warmup, "requests before them");
  s.add("seed", c.seed, "of the tokens");
  s.group("Placement");
  s.add("most", c.placer.place.most, "experts of a rank");
  s.add("path", c.path, "layers that the estimate looks back to");
  s.add("check", c.placer.check, "of a plan: load, sets");
  s.add("tolerance", c.placer.tolerance, "of the check by load: busiest rank over what was expected of it");
  s.add("window", c.placer.window, "requests that history looks back to");
  s.add("every", c.placer.every, "requests between two placements of history");
  s.add("weights", c.weights, "resident (all ranks have all experts) or moved (to ranks that lack them)");
  s.group("Router");
  s.add("table-seed", c.table_seed, "of the transition table");
  s.add("profile-seed", c.profile_seed, "of the tokens that the estimator is fitted on");
  s.add("profile-batches", c.profile_batches, "of 2048 tokens that it is fitted on");
  s.add("period", c.router.period, "requests after which a drifting topic comes again");
  s.add("swing", c.router.swing, "of a drifting topic: exp(swing) times as frequent at its best");
  s.add("persistence", c.router.persistence, "of topics");
  s.group("Computation and network");
  s.add("flops", c.flops, "RATE of a rank: seconds from FLOPs");
  s.add("outline", c.outline, "FILE of `weft outline --model gpt-moe --flops RATE` instead");
  s.add("expert-time", c.expert_time, "TIME that an expert with rows takes beside them");
  s.add("plan-time", c.plan_time, "TIME of a plan in virtual time (default: measured first)");
  s.add("transport", c.transport, "threads (wall time) or sim (virtual time)");
  s.add("link", c.link, "RATE[,LATENCY] between ranks");
  add_node_flags(s, c);
  app.add_flag("--json", c.json, "one object a placement: seconds_p50, seconds_p95, seconds_p99 ...")
      ->group("Serving");
  app.footer(
      "Examples:\n"
      "  weft serve-bench\n"
      "  weft serve-bench --transport sim --router stationary,drifting\n"
      "  weft serve-bench --placement static,lina --check sets --json");
}

Outline outline_of(const ServeBench& c) {
  if (!c.outline.empty()) return read_named_outline(c.outline, "");
  ModelOptions sizes = model_options("gpt-moe");
  sizes.width = c.width;
  sizes.layers = c.layers;
  sizes.heads = c.heads;
  sizes.context = c.sequence;
  sizes.experts.count = c.experts;
  sizes.experts.choices = 1;
  sizes.experts.capacity_factor = 0;
  sizes.experts.every = 1;
  return outline_from_flops(model_shape("gpt-moe", sizes), c.tokens, parse_flops(c.flops));
}

// On this machine, of a layer of the router's table.
double measured_plan_seconds(const DrawnRouter& router, const PlacementOptions& place) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> taken;
  for (int i = 0; i < 21; ++i) {
    const std::span shares = router.popularity(i % router.options().layers);
    const Clock::time_point start = Clock::now();
    const ExpertPlacement plan = plan_placement(shares, place);
    taken.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
  return median(taken);
}

ServeOptions options_of(const ServeBench& c, const Outline& outline, bool drifts) {
  ServeOptions out;
  out.times = serve_times(outline, c.sequence);
  out.tokens = outline.tokens_per_rank;
  out.width = outline.experts.front().width;
  out.requests = c.requests;
  out.warmup = c.warmup;
  out.seed = c.seed;
  out.placements = list_in(c.placements);
  out.router = c.router;
  out.router.layers = static_cast<int>(out.times.layers.size());
  out.router.experts = outline.experts.front().experts;
  out.router.seed = c.table_seed;
  out.router.drifts = drifts;
  out.placer = c.placer;
  out.placer.layers = out.router.layers;
  out.placer.place.ranks = c.ranks;
  out.placer.place.experts = out.router.experts;
  out.expert_seconds = seconds(parse_duration(c.expert_time));
  const double row = out.times.layers.front().row_seconds;
  if (row > 0) {
    out.placer.place.expert_rows = out.expert_seconds / row;
    const std::optional<EmulatedLink> link = resolve_network(c.link, c, c.ranks);
    const double bytes = 2 * sizeof(float) * static_cast<double>(out.width);  // there and back
    if (link && link->bytes_per_second > 0)
      out.placer.place.remote_rows = bytes / link->bytes_per_second / row;
  }
  check(out.router);
  check(out.placer);
  const DrawnRouter router(out.router);
  out.profile = fitted_profile(router, c.profile_seed, c.profile_batches,
                               {.layers = out.router.layers, .experts = out.router.experts, .path = c.path});
  out.plan_seconds = c.plan_time.empty() ? measured_plan_seconds(router, out.placer.place)
                                         : seconds(parse_duration(c.plan_time));
  if (c.weights != "resident" && c.weights != "moved")
    throw UsageError("--weights '" + c.weights + "' is none of: resident, moved");
  if (c.weights == "moved")  // two matrices and their biases
    out.weight_bytes = std::int64_t{sizeof(float)} * (8 * out.width * out.width + 5 * out.width);
  return out;
}

// Of all ranks: a request takes as long as on the slowest.
struct Row {
  std::string placement, router;
  std::vector<double> seconds;
  double expert_share = 0, load_p50 = 0, load_p95 = 0, replans = 0, moved_bytes = 0, busiest_bytes = 0;
};

Row row_of(const std::vector<std::vector<Served>>& ranks, std::size_t placement, const ServeBench& c) {
  Row row;
  row.placement = list_in(c.placements)[placement];
  const Served& first = ranks.front()[placement];
  row.seconds = first.seconds;
  std::vector<double> shares;
  for (std::size_t i = 0; i < row.seconds.size(); ++i) {
    double in_experts = 0, whole = 0;
    for (const std::vector<Served>& rank : ranks) {
      row.seconds[i] = std::max(row.seconds[i], rank[placement].seconds[i]);
      in_experts += rank[placement].expert_seconds[i];
      whole += rank[placement].seconds[i];
    }
    shares.push_back(in_experts / whole);
  }
  row.expert_share = median(shares);
  row.load_p50 = median(first.load);
  row.load_p95 = quantile(first.load, 0.95);
  if (first.checks > 0) row.replans = static_cast<double>(first.replans) / static_cast<double>(first.checks);
  for (const std::vector<Served>& rank : ranks) {
    row.moved_bytes += static_cast<double>(rank[placement].moved_bytes);
    row.busiest_bytes = std::max(row.busiest_bytes, static_cast<double>(rank[placement].payload_bytes) /
                                                        static_cast<double>(row.seconds.size()));
  }
  return row;
}

void print_json(const Row& row, const ServeBench& c, const ServeOptions& options) {
  const Json out{{"placement", row.placement},
                 {"router", row.router},
                 {"seconds_p50", median(row.seconds)},
                 {"seconds_p95", quantile(row.seconds, 0.95)},
                 {"seconds_p99", quantile(row.seconds, 0.99)},
                 {"expert_share", row.expert_share},
                 {"max_load_p50", row.load_p50},
                 {"max_load_p95", row.load_p95},
                 {"replans", row.replans},
                 {"moved_bytes", row.moved_bytes},
                 {"payload_bytes", row.busiest_bytes},
                 {"requests", row.seconds.size()},
                 {"ranks", c.ranks},
                 {"experts", options.router.experts},
                 {"layers", options.router.layers},
                 {"tokens", options.tokens},
                 {"weights", c.weights},
                 {"transport", c.transport},
                 {"compute", "emulated"},
                 {"link", c.link}};
  std::printf("%s\n", out.dump().c_str());
}

void print_table(const std::vector<Row>& rows, const ServeBench& c, const ServeOptions& options) {
  std::printf(
      "%s router: %d ranks, %d experts in each of %d layers, %lld tokens a rank and request, %s; %s\n",
      rows.front().router.c_str(), c.ranks, options.router.experts, options.router.layers,
      static_cast<long long>(options.tokens), c.link.c_str(),
      c.transport == "sim" ? "simulated time" : "wall time with emulated computation");
  std::printf(
      "weights %s; a request's time has planning, planning again and moving in it\n\n",
      c.weights == "moved" ? "move to ranks that lack them" : "are resident: all ranks have all experts");
  std::printf("%-10s %11s %11s %11s %8s %10s %10s %8s %10s\n", "placement", "median", "p95", "p99", "speed",
              "experts", "max load", "replans", "moved");
  const double first = quantile(rows.front().seconds, 0.95);
  for (const Row& row : rows) {
    const double p95 = quantile(row.seconds, 0.95);
    std::printf("%-10s %11s %11s %11s %7.2fx %9.1f%% %10.3f %7.1f%% %10s\n", row.placement.c_str(),
                seconds_text(median(row.seconds)).c_str(), seconds_text(p95).c_str(),
                seconds_text(quantile(row.seconds, 0.99)).c_str(), first / p95, 100 * row.expert_share,
                row.load_p95, 100 * row.replans, size_text(row.moved_bytes).c_str());
  }
  std::printf(
      "\nspeed: p95 of the first row over this one's; experts: share of the time from the gate to the rows' "
      "return;\nmax load: rows of the busiest rank over the mean, p95; replans: share of plans that were "
      "made "
      "again\n\n");
}

void serve(const ServeBench& c, const Outline& outline, const std::string& router) {
  if (router != "stationary" && router != "drifting")
    throw UsageError("--router '" + router + "' is none of: stationary, drifting");
  const ServeOptions options = options_of(c, outline, router == "drifting");
  const std::optional<EmulatedLink> link = resolve_network(c.link, c, c.ranks);
  const std::vector<std::vector<Served>> ranks =
      c.transport == "sim" ? serve_simulated(c.ranks, link.value_or(EmulatedLink{}), options)
                           : serve_emulated(c.ranks, link, options);
  std::vector<Row> rows;
  for (std::size_t p = 0; p < options.placements.size(); ++p) {
    rows.push_back(row_of(ranks, p, c));
    rows.back().router = router;
    if (c.json) print_json(rows.back(), c, options);
  }
  if (!c.json) print_table(rows, c, options);
}

int serve_bench(const std::vector<std::string>& arguments) {
  CLI::App app{
      "How long requests take that go through experts on several ranks, by the experts' placement.\n",
      "weft serve-bench"};
  Settings settings(app);
  ServeBench command;
  add_flags(app, settings, command);
  parse_flags(app, arguments);
  if (command.ranks < 1 || command.ranks > kMostRanks)
    throw UsageError("ranks must be 1 to " + std::to_string(kMostRanks) + ", not " +
                     std::to_string(command.ranks));
  if (command.transport != "threads" && command.transport != "sim")
    throw UsageError("--transport '" + command.transport + "' is none of: threads, sim");
  const Outline outline = outline_of(command);
  for (const std::string& router : list_in(command.routers)) serve(command, outline, router);
  return kOk;
}

}  // namespace

Run add_serve_bench(CLI::App& app) {
  CLI::App* verb = app.add_subcommand("serve-bench", "how long requests take, by where experts are placed");
  verb->set_help_flag();  // the verb's own flags have it
  verb->prefix_command();
  return [](const Invocation& call) -> int {
    const std::vector<std::string> arguments(call.arguments.begin() + 1, call.arguments.end());
    return guarded("serve-bench", [&] { return serve_bench(arguments); });
  };
}

}  // namespace weft::cli
