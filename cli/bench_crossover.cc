// weft bench sparse_allreduce --crossover: from which density on the best dense all-reduce beats spardl, and
// how many teams are best, over numbers of ranks and links, in virtual time.
//
//   Step 1  by the cost formulas: bisection of the density
//   Step 2  simulated at fewer elements, each counted as many: from the formula's answer on, by the secant,
//   since
//           time is nearly linear in density
// Sizes that are too large to simulate keep step 1's answer and say `formula`. Blocks keep at least one
// entry: no density below P / elements is looked at.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>

#include "bench_sparse.h"
#include "text.h"
#include "weft/collective.h"
#include "weft/random.h"

namespace weft::cli {

namespace {

struct Size {
  int ranks;
  // Real elements, 0: too slow to simulate. Heads of blocks count as often as elements do, so there must be
  // enough of these beside the blocks: at the crossover (many entries), and at the given density.
  std::int64_t crossover, teams;
};
constexpr Size kSizes[] = {{14, 1 << 16, 1 << 18}, {64, 1 << 16, 1 << 18}, {256, 1 << 15, 0}, {1024, 0, 0}};
constexpr double kRates[] = {125e6, 1.25e9, 12.5e9};  // 1, 10, 100 Gbit/s
constexpr double kLatency = 50e-6;
constexpr int kSettle = 3;  // steps for the controller of B-SAG

struct Point {
  const BenchOptions& options;
  int ranks;
  LinkCost link;

  Shape dense_shape() const { return {.size = ranks, .count = options.sparse.length, .element_bytes = 4}; }
  const Algorithm& dense() const { return choose(Family::all_reduce, dense_shape(), link); }
  double dense_formula() const { return dense().seconds(dense_shape(), link); }

  TeamChoice teams_at(double density) const {
    return choose_teams(ranks, options.sparse.length, entries_at(density, options.sparse.length), link);
  }
  double sparse_formula(double density, TeamChoice teams, double bytes_per_entry) const {
    const SparseShape shape{.size = ranks,
                            .length = options.sparse.length,
                            .k = entries_at(density, options.sparse.length),
                            .teams = teams.teams,
                            .recursive = teams.recursive};
    const SparseAlgorithm& row = find_sparse_algorithm("spardl");
    const double bytes = bytes_per_entry * static_cast<double>(row.entries(shape)) +
                         4.0 * static_cast<double>(row.heads(shape));
    return row.rounds(shape) * link.hop_seconds + bytes * link.seconds_per_byte;
  }
};

// Of a block with this density, in the codec that was asked for.
double bytes_per_entry(const BenchOptions& options, double density) {
  constexpr std::uint32_t kLength = 1 << 16;
  Random random(1);
  Entries entries;
  for (std::uint32_t i = 0; i < kLength; ++i) {
    if (random.uniform() < density) entries.push_back(i, 1.0F);
  }
  if (entries.size() == 0) entries.push_back(0, 1.0F);
  const std::size_t bytes =
      wire::encoded_bytes(wire::sparse_codec_of(options.sparse.codec), entries.view(), kLength);
  return static_cast<double>(bytes - 4) / static_cast<double>(entries.size());
}

// Smallest density at which dense is at least as fast; above 1 where there is none.
double crossover_by_formula(const Point& point) {
  const double dense = point.dense_formula();
  const auto sparse = [&](double density) {
    return point.sparse_formula(density, point.teams_at(density), bytes_per_entry(point.options, density));
  };
  double low = static_cast<double>(point.ranks) / static_cast<double>(point.options.sparse.length), high = 1;
  if (sparse(low) >= dense) return low;
  if (sparse(high) < dense) return 2;
  for (int i = 0; i < 30; ++i) {
    const double middle = (low + high) / 2;
    (sparse(middle) < dense ? low : high) = middle;
  }
  return high;
}

// One operation, every rank on the simulated network.
class Simulated {
 public:
  Simulated(const BenchOptions& options, int ranks, double rate, std::int64_t elements)
      : options_(options), elements_(elements) {
    options_.ranks = ranks;
    options_.link = LinkSpec{rate, kLatency};
    options_.byte_scale = static_cast<double>(options.sparse.length) / static_cast<double>(elements);
    gradients_.resize(static_cast<std::size_t>(ranks),
                      std::vector<float>(static_cast<std::size_t>(elements)));
    draw_all(0);
  }
  double dense(const Algorithm& algorithm) const {
    std::vector<std::vector<float>> data(static_cast<std::size_t>(options_.ranks), gradients_[0]);
    AllReduceOptions call;
    call.algorithm = algorithm.name;
    SimRanks ranks(sim_options(options_));
    return run(ranks, 0, [&](Comm comm, int r) {
      return all_reduce(comm, Dense(std::span(data[static_cast<std::size_t>(r)])), call);
    });
  }
  double sparse(double density, TeamChoice teams, int settle = 0) const {
    SparseBench bench = options_.sparse;
    bench.teams = teams.teams;
    bench.gather = teams.recursive ? "r-sag" : teams.teams > 1 ? "b-sag" : "auto";
    SparseCase c;
    c.row = &find_sparse_algorithm("spardl");
    c.length = elements_;
    c.k = entries_at(density, elements_);
    const SparseOptions call = sparse_options(bench, c);
    std::vector<SparseState> states;
    for (int r = 0; r < options_.ranks; ++r) states.emplace_back(elements_);
    std::vector<SparseResult> results(states.size());
    SimRanks ranks(sim_options(options_));
    double took = 0;
    for (int step = 0; step <= settle; ++step) {
      took = run(ranks, step, [&](Comm comm, int r) {
        const auto i = static_cast<std::size_t>(r);
        return sparse_all_reduce(comm, gradients_[i], states[i], results[i], call);
      });
      for (SparseState& state : states) state.commit();
    }
    return took;
  }
  double scale() const { return options_.byte_scale; }

 private:
  void draw_all(std::uint32_t step) {
    for (std::size_t r = 0; r < gradients_.size(); ++r) {
      draw({.distribution = options_.sparse.distribution,
            .seed = 1,
            .rank = static_cast<std::uint32_t>(r),
            .step = step},
           gradients_[r]);
    }
  }
  static double run(SimRanks& ranks, int step, const std::function<Task<void>(Comm, int)>& make) {
    SubmitOptions submit;
    submit.name = "crossover";
    submit.slot = 1;
    submit.step = static_cast<std::uint32_t>(step);
    return seconds(ranks.run(submit, make));
  }
  BenchOptions options_;
  std::int64_t elements_;
  std::vector<std::vector<float>> gradients_;
};

struct Crossover {
  double density = 0;  // above 1: none
  double dense_seconds = 0;
  bool simulated = false;
  double scale = 1;
};

Crossover crossover(const Point& point, const Size& size, double rate) {
  Crossover found{.density = crossover_by_formula(point), .dense_seconds = point.dense_formula()};
  if (size.crossover == 0) return found;
  const Simulated sim(point.options, size.ranks, rate, size.crossover);
  found.simulated = true;
  found.scale = sim.scale();
  found.dense_seconds = sim.dense(point.dense());
  const auto over = [&](double density) {
    return sim.sparse(density, point.teams_at(density)) - found.dense_seconds;
  };
  const double least = static_cast<double>(size.ranks) / static_cast<double>(size.crossover);
  double before = 1, at_before = over(1);
  if (at_before < 0) {
    found.density = 2;
    return found;
  }
  double now = std::clamp(std::min(found.density, 1.0), least, 0.99);
  for (int i = 0; i < 4; ++i) {
    const double at_now = over(now);
    if (at_now == at_before) break;
    const double next = std::clamp(now - at_now * (now - before) / (at_now - at_before), least, 1.0);
    before = std::exchange(now, next);
    at_before = at_now;
    if (std::abs(now - before) < 0.005 * now) break;
  }
  found.density = now;
  return found;
}

// The best of the team counts whose bytes do not depend on the data (one team, R-SAG), and of those with
// B-SAG: there the formula is a bound, and simulated data, in which every rank is different, is near the
// other end.
struct BestTeams {
  TeamChoice fixed, bruck;
  double fixed_seconds = 0, bruck_seconds = 0, one_team_seconds = 0;
  bool simulated = false;
  double scale = 1;

  void take(TeamChoice choice, double seconds) {
    if (choice.teams == 1) one_team_seconds = seconds;
    const bool is_fixed = choice.teams == 1 || choice.recursive;
    double& least = is_fixed ? fixed_seconds : bruck_seconds;
    if (least != 0 && seconds >= least) return;
    least = seconds;
    (is_fixed ? fixed : bruck) = choice;
  }
};

BestTeams best_teams(const Point& point, const Size& size, double rate) {
  const double density = point.options.sparse.density;
  const double entry = bytes_per_entry(point.options, density);
  BestTeams best;
  best.simulated = size.teams != 0;
  const Simulated sim(point.options, size.ranks, rate, best.simulated ? size.teams : 1);
  if (best.simulated) best.scale = sim.scale();
  for (int teams = 1; teams <= size.ranks; ++teams) {
    if (size.ranks % teams != 0) continue;
    for (const bool recursive : {false, true}) {
      if (recursive && (teams == 1 || !std::has_single_bit(static_cast<unsigned>(teams)))) continue;
      const TeamChoice choice{.teams = teams, .recursive = recursive};
      best.take(choice, best.simulated ? sim.sparse(density, choice, kSettle)
                                       : point.sparse_formula(density, choice, entry));
    }
  }
  return best;
}

std::string cells(const std::vector<std::string>& texts) {
  constexpr int kWidths[] = {6, 12, 14, 10, 12, 9, 10, 7, 10, 7, 10, 9};
  std::string line;
  for (std::size_t i = 0; i < texts.size(); ++i) line += padded(texts[i], kWidths[i]);
  return line;
}

std::string number(const char* form, double value) {
  std::string text(32, '\0');
  text.resize(static_cast<std::size_t>(std::snprintf(text.data(), text.size(), form, value)));
  return text;
}

void add_point(const BenchOptions& options, const Size& size, double rate, Report& report) {
  const LinkCost link{.hop_seconds = kLatency, .seconds_per_byte = 1 / rate, .fold_seconds_per_byte = 0};
  const Point point{options, size.ranks, link};
  const Crossover c = crossover(point, size, rate);
  const BestTeams t = best_teams(point, size, rate);
  const bool none = c.density > 1;
  const Json row = {
      {"family", options.family},
      {"mode", "crossover"},
      {"simulated", true},
      {"ranks", size.ranks},
      {"link_bytes_per_second", rate},
      {"latency_seconds", kLatency},
      {"length", options.sparse.length},
      {"codec", options.sparse.codec},
      {"crossover_density", none ? Json(nullptr) : Json(c.density)},
      {"crossover_by", c.simulated ? "sim" : "formula"},
      {"crossover_byte_scale", c.scale},
      {"least_density", static_cast<double>(size.ranks) /
                            static_cast<double>(c.simulated ? size.crossover : options.sparse.length)},
      {"dense_algorithm", point.dense().name},
      {"dense_seconds", c.dense_seconds},
      {"teams_density", options.sparse.density},
      {"teams", t.fixed.teams},
      {"teams_b_sag", t.bruck.teams},
      {"teams_by", t.simulated ? "sim" : "formula"},
      {"teams_byte_scale", t.scale},
      {"teams_seconds", t.fixed_seconds},
      {"teams_b_sag_seconds", t.bruck_seconds},
      {"one_team_seconds", t.one_team_seconds}};
  std::vector<std::string> lines;
  if (size.ranks == kSizes[0].ranks && rate == kRates[0]) {
    lines = {"spardl against the best dense all-reduce, " + std::to_string(options.sparse.length) +
                 " elements, codec " + options.sparse.codec + ", 50 us; SIMULATED",
             "teams (R-SAG; B-SAG, whose bytes depend on the data) at density " +
                 number("%g", options.sparse.density),
             "",
             cells({"ranks", "link", "dense", "seconds", "dense wins", "by", "one team", "r-sag", "seconds",
                    "b-sag", "seconds", "by"})};
  }
  lines.push_back(
      cells({std::to_string(size.ranks), link_text(rate), std::string(point.dense().name),
             seconds_text(c.dense_seconds), none ? "never" : "> " + number("%.3f", c.density),
             c.simulated ? "sim" : "formula", seconds_text(t.one_team_seconds), std::to_string(t.fixed.teams),
             seconds_text(t.fixed_seconds), std::to_string(t.bruck.teams), seconds_text(t.bruck_seconds),
             t.simulated ? "sim" : "formula"}));
  report.add_object(row, lines, true);
}

}  // namespace

void bench_crossover(const BenchOptions& options, Report& report) {
  for (const Size& size : kSizes) {
    for (const double rate : kRates) {
      report.progress("crossover: " + std::to_string(size.ranks) + " ranks, " + link_text(rate) + " ...");
      add_point(options, size, rate, report);
    }
  }
}

}  // namespace weft::cli
