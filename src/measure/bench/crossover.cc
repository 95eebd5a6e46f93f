// weft bench sparse_allreduce --crossover: from which density on the best dense all-reduce beats spardl, and
// how many teams are best, over numbers of ranks and links, in virtual time.
//
//   Step 1  by the cost formulas: bisection of the density
//   Step 2  simulated at fewer elements, each counted as many: from the formula's answer on, by false
//           position, since time is nearly linear in density
//   Step 3  team counts at the given density, simulated: all of them, or at many ranks one team and those
//           that the formulas rank best
// Blocks keep at least one entry: no density below P / elements is looked at. Wire time alone: selection is
// not in it.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>

#include "measure/bench/sparse.h"
#include "measure/text.h"
#include "weft/collective.h"
#include "weft/error.h"
#include "weft/random.h"

namespace weft {

namespace {

struct Size {
  int ranks;
  // Real elements. Heads of blocks count as often as elements do, so there must be enough of these beside the
  // blocks: at the crossover (many entries), and at the given density.
  std::int64_t crossover, teams;
};
constexpr Size kSizes[] = {
    {14, 1 << 16, 1 << 18}, {64, 1 << 16, 1 << 18}, {256, 1 << 16, 1 << 18}, {1024, 1 << 16, 1 << 19}};
constexpr int kAllTeams = 64;       // ranks up to which every number of teams is tried
constexpr std::size_t kBest = 2;    // beyond: so many of each kind, as the formulas rank them
constexpr std::size_t kDrawn = 32;  // different gradients; further ranks have them shifted
constexpr double kRates[] = {125e6, 1.25e9, 12.5e9};  // 1, 10, 100 Gbit/s
constexpr double kLatency = 50e-6;
constexpr int kSettle = 3;  // steps for the controller of B-SAG

// The row that takes teams.
const SparseAlgorithm& team_algorithm() {
  return *std::ranges::find_if(sparse_algorithms(), &SparseAlgorithm::teams);
}

struct Point {
  const BenchOptions& options;
  int ranks;
  LinkCost link;

  Shape dense_shape() const { return {.size = ranks, .count = options.sparse.length, .element_bytes = 4}; }
  const Algorithm& dense() const { return choose(Family::all_reduce, dense_shape(), link); }
  double dense_formula() const { return dense().seconds(dense_shape(), link); }

  TeamChoice teams_at(double density) const {
    return choose_teams(ranks, options.sparse.length, entries_at(density, options.sparse.length), link,
                        wire::sparse_codec_of(options.sparse.scheme.codec));
  }
  double sparse_formula(double density, TeamChoice teams, double bytes_per_entry) const {
    const SparseShape shape{.size = ranks,
                            .length = options.sparse.length,
                            .k = entries_at(density, options.sparse.length),
                            .teams = teams.teams,
                            .recursive = teams.recursive};
    const SparseAlgorithm& row = team_algorithm();
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
      wire::encoded_bytes(wire::sparse_codec_of(options.sparse.scheme.codec), entries.view(), kLength);
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
    bench.scheme.teams = teams.teams;
    bench.scheme.gather = teams.recursive ? "r-sag" : teams.teams > 1 ? "b-sag" : "auto";
    SparseCase c;
    c.row = &team_algorithm();
    c.length = elements_;
    c.k = entries_at(density, elements_);
    const SparseOptions call = sparse_call(find_scheme(c.row->name), bench.scheme, c.k);
    std::vector<SparseState> states;
    states.reserve(static_cast<std::size_t>(options_.ranks));
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
      if (r < kDrawn) {
        draw({.distribution = options_.sparse.distribution,
              .seed = 1,
              .rank = static_cast<std::uint32_t>(r),
              .step = step},
             gradients_[r]);
      } else {
        const auto shift = static_cast<std::ptrdiff_t>(r * 7919 % gradients_[r].size());
        const std::vector<float>& drawn = gradients_[r % kDrawn];
        std::rotate_copy(drawn.begin(), drawn.begin() + shift, drawn.end(), gradients_[r].begin());
      }
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
  double scale = 1;
};

Crossover crossover(const Point& point, const Size& size, double rate) {
  const Simulated sim(point.options, size.ranks, rate, size.crossover);
  Crossover found{.density = crossover_by_formula(point),
                  .dense_seconds = sim.dense(point.dense()),
                  .scale = sim.scale()};
  const auto over = [&](double density) {
    return sim.sparse(density, point.teams_at(density)) - found.dense_seconds;
  };
  // Between a density at which sparse wins and one at which dense does; the number of teams may jump there.
  double low = static_cast<double>(size.ranks) / static_cast<double>(size.crossover), high = 1;
  double at_low = over(low), at_high = over(high);
  if (at_high < 0 || at_low >= 0) {
    found.density = at_high < 0 ? 2 : low;
    return found;
  }
  double now = std::clamp(found.density, low, 0.99);
  for (int i = 0; i < 5; ++i) {
    const double at_now = over(now);
    (at_now < 0 ? low : high) = now;
    (at_now < 0 ? at_low : at_high) = at_now;
    const double next = low - at_low * (high - low) / (at_high - at_low);
    if (std::abs(std::exchange(now, next) - next) < 0.005 * next) break;
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

// One team, and the team counts of one kind that are worth a simulation.
std::vector<TeamChoice> candidates(const Point& point, bool recursive) {
  const double density = point.options.sparse.scheme.density;
  const double entry = bytes_per_entry(point.options, density);
  std::vector<TeamChoice> out;
  for (int teams = 2; teams <= point.ranks; ++teams) {
    if (point.ranks % teams != 0 || (recursive && !std::has_single_bit(static_cast<unsigned>(teams))))
      continue;
    out.push_back({.teams = teams, .recursive = recursive});
  }
  if (point.ranks <= kAllTeams) return out;
  std::ranges::sort(out, {}, [&](TeamChoice c) {  // of equal ones the fewest teams
    return std::pair(point.sparse_formula(density, c, entry), c.teams);
  });
  out.resize(std::min(out.size(), kBest));
  return out;
}

BestTeams best_teams(const Point& point, const Size& size, double rate) {
  const double density = point.options.sparse.scheme.density;
  const Simulated sim(point.options, size.ranks, rate, size.teams);
  BestTeams best;
  best.scale = sim.scale();
  constexpr TeamChoice kOne{.teams = 1, .recursive = false};
  best.take(kOne, sim.sparse(density, kOne));
  for (const TeamChoice& c : candidates(point, true)) best.take(c, sim.sparse(density, c));
  for (const TeamChoice& c : candidates(point, false)) best.take(c, sim.sparse(density, c, kSettle));
  return best;
}

std::string cells(const std::vector<std::string>& texts) {
  constexpr int kWidths[] = {6, 12, 14, 10, 12, 8, 6, 10, 7, 10, 7, 10, 8, 6};
  std::string line;
  for (std::size_t i = 0; i < texts.size(); ++i) line += padded(texts[i], kWidths[i]);
  return line;
}

void add_point(const BenchOptions& options, const Size& size, double rate, bool first, BenchReport& report) {
  const LinkCost link{.hop_seconds = kLatency, .seconds_per_byte = 1 / rate, .fold_seconds_per_byte = 0};
  const Point point{options, size.ranks, link};
  const Crossover c = crossover(point, size, rate);
  const BestTeams t = best_teams(point, size, rate);
  const bool none = c.density > 1;
  const Json row = {{"family", options.family},
                    {"mode", "crossover"},
                    {"simulated", true},
                    {"ranks", size.ranks},
                    {"link_bytes_per_second", rate},
                    {"latency_seconds", kLatency},
                    {"length", options.sparse.length},
                    {"codec", options.sparse.scheme.codec},
                    {"crossover_density", none ? Json(nullptr) : Json(c.density)},
                    {"crossover_elements", size.crossover},
                    {"crossover_byte_scale", c.scale},
                    {"least_density", static_cast<double>(size.ranks) / static_cast<double>(size.crossover)},
                    {"dense_algorithm", point.dense().name},
                    {"dense_seconds", c.dense_seconds},
                    {"teams_density", options.sparse.scheme.density},
                    {"teams", t.fixed.teams},
                    {"teams_b_sag", t.bruck.teams},
                    {"teams_elements", size.teams},
                    {"teams_byte_scale", t.scale},
                    {"teams_seconds", t.fixed_seconds},
                    {"teams_b_sag_seconds", t.bruck_seconds},
                    {"one_team_seconds", t.one_team_seconds}};
  std::vector<std::string> lines;
  if (first) {
    lines = {"spardl against the best dense all-reduce, " + std::to_string(options.sparse.length) +
                 " elements, codec " + options.sparse.scheme.codec + ", 50 us; SIMULATED, wire time alone",
             "teams (R-SAG; B-SAG, whose bytes depend on the data) at density " +
                 number_text("%g", options.sparse.scheme.density) +
                 "; n: elements simulated, each counted x times",
             "",
             cells({"ranks", "link", "dense", "seconds", "dense wins", "n", "x", "one team", "r-sag",
                    "seconds", "b-sag", "seconds", "n", "x"})};
  }
  lines.push_back(
      cells({std::to_string(size.ranks), link_text(rate), std::string(point.dense().name),
             seconds_text(c.dense_seconds), none ? "never" : "> " + number_text("%.3f", c.density),
             std::to_string(size.crossover), number_text("%.0f", c.scale), seconds_text(t.one_team_seconds),
             std::to_string(t.fixed.teams), seconds_text(t.fixed_seconds), std::to_string(t.bruck.teams),
             seconds_text(t.bruck_seconds), std::to_string(size.teams), number_text("%.0f", t.scale)}));
  report.add_object(row, lines, true);
}

}  // namespace

void bench_crossover(const BenchOptions& options, BenchReport& report) {
  bool first = true;
  for (const Size& size : kSizes) {
    for (const double rate : kRates) {
      if (options.ranks_given && size.ranks != options.ranks) continue;
      report.progress("crossover: " + std::to_string(size.ranks) + " ranks, " + link_text(rate) + " ...");
      add_point(options, size, rate, first, report);
      first = false;
    }
  }
  if (!first) return;
  std::string sizes;
  for (const Size& size : kSizes) sizes += (sizes.empty() ? "" : ", ") + std::to_string(size.ranks);
  throw UsageError("--crossover is made for --ranks " + sizes + "; without --ranks for all of them");
}

}  // namespace weft
