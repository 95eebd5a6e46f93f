// weft bench sparse_allreduce: every row of the table on the same data, what each sends, how long it takes
// and what it is worth. Every step has data of its own (a function of rank and step) and is committed, so
// that residuals and thresholds are those of a training run.
#include "measure/bench/sparse.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "base/statistics.h"
#include "data_parallel/formula.h"
#include "measure/text.h"
#include "weft/error.h"

namespace weft {

namespace {

struct Column {
  const char* title;
  int width;  // negative: to the left
};
constexpr Column kColumns[] = {{"algorithm", -12},  {"codec", -12}, {"median", 10},     {"p99", 10},
                               {"select", 10},      {"wire", 10},   {"bytes/rank", 12}, {"formula", 13},
                               {"entries out", 12}, {"B/entry", 8}, {"energy", 8},      {"mass error", 11},
                               {"rounds", 9},       {"correct", 8}};

std::string joined(const std::vector<std::string>& cells) {
  std::string line;
  for (std::size_t i = 0; i < cells.size(); ++i) line += padded(cells[i], kColumns[i].width);
  return line;
}

std::vector<SparseCase> make_cases(const BenchOptions& options) {
  const SparseBench& bench = options.sparse;
  const double real = static_cast<double>(bench.length) / options.byte_scale;
  if (real < 1 || real != std::floor(real)) {
    throw UsageError("--length " + std::to_string(bench.length) + " at a byte scale of " +
                     number_text("%g", options.byte_scale) + " is no whole number of elements");
  }
  if (bench.buckets > real) {
    throw UsageError("--buckets " + std::to_string(bench.buckets) + " are more than the " +
                     number_text("%.0f", real) + " elements");
  }
  std::vector<SparseCase> cases;
  std::uint32_t slot = 1;
  const auto add = [&](const SparseAlgorithm& row) {
    SparseCase c;
    c.row = &row;
    c.length = static_cast<std::int64_t>(real);
    c.k = entries_at(bench.scheme.density, c.length);
    c.slot = slot;
    slot += bench.buckets == 0 ? 1 : static_cast<std::uint32_t>(bench.buckets) + 2;
    cases.push_back(c);
  };
  for (const std::string& name : options.algorithms) add(find_sparse_algorithm(name));
  if (options.algorithms.empty()) {
    for (const SparseAlgorithm& row : sparse_algorithms()) add(row);
  }
  return cases;
}

// What all operations have, or null where they differ.
template <class Field>
Json common(const SparseFormula& formula, const Field& field) {
  Json first = field(formula.operations.front());
  for (const SparseFormula::Operation& operation : formula.operations) {
    if (field(operation) != first) return nullptr;
  }
  return first;
}

Json teams_of(const SparseFormula::Operation& operation) {
  return operation.row->teams ? Json(operation.shape.teams) : Json(nullptr);
}

Json gather_of(const SparseFormula::Operation& operation) {
  if (!operation.row->teams) return nullptr;
  if (operation.shape.teams == 1) return "none";
  return operation.shape.recursive ? "r-sag" : "b-sag";
}

Json call_fields(const BenchOptions& options, const SparseCase& c, const SparseMeasured& m) {
  const SparseBench& bench = options.sparse;
  const double scale = options.byte_scale;
  const auto scaled = [scale](double x) { return std::llround(x * scale); };
  return {{"family", options.family},
          {"algorithm", c.row->name},
          {"transport", options.transport},
          {"simulated", options.transport == "sim"},
          {"shaped", options.link && options.transport != "sim"},
          {"ranks", options.ranks},
          {"nodes", options.nodes},
          {"dtype", "float32"},
          {"length", bench.length},
          {"density", bench.scheme.density},
          {"k", scaled(static_cast<double>(c.k))},
          {"distribution", name_of(bench.distribution)},
          {"codec", bench.scheme.codec},
          {"residual", name_of(bench.scheme.residual)},
          {"blocks", bench.scheme.blocks},
          {"teams", common(m.formula, teams_of)},
          {"gather", common(m.formula, gather_of)},
          {"buckets", bench.buckets > 0 ? Json(bench.buckets) : Json(nullptr)},
          {"quotas", bench.buckets > 0 ? Json(name_of(bench.scheme.quotas)) : Json(nullptr)},
          {"threads", bench.scheme.threads},
          {"steps_before", bench.steps_before},
          {"shifted_draws", bench.shifted},
          {"bytes", scaled(4 * static_cast<double>(c.length))},
          {"byte_scale", scale}};
}

// Equal, or below the bound where it is one. Of the median; oktopk exceeds its bound until it has settled.
bool bytes_as_formula(const BenchOptions& options, const SparseMeasured& m) {
  const double sent = median(m.bytes), formula = median(m.formula_bytes);
  return m.formula.is_exact(options.sparse.scheme.codec) ? sent == formula : sent <= formula;
}

Json object(const BenchOptions& options, const SparseCase& c, const SparseMeasured& m) {
  const double scale = options.byte_scale;
  const auto [middle, low, high] = median_with_interval(m.seconds);
  const auto scaled = [scale](double x) { return std::llround(x * scale); };
  const double bytes = 4 * static_cast<double>(options.sparse.length);
  const double payload = median(m.bytes);
  double mean = 0;
  for (const double b : m.bytes) mean += b / static_cast<double>(m.bytes.size());
  const std::optional<LinkSpec>& link = options.link ? options.link : options.ideal;
  const bool has_ideal = link && payload > 0;
  const double ideal = has_ideal ? payload * scale / link->bytes_per_second : 0;
  const auto worth = [&](double SparseWorth::* field) {
    return m.worth ? Json((*m.worth).*field) : Json(nullptr);
  };
  Json row = call_fields(options, c, m);
  const Json measured = {
      {"iterations", m.seconds.size()},
      {"seconds_median", middle},
      {"seconds_low", low},
      {"seconds_high", high},
      {"seconds_p99", quantile(m.seconds, 0.99)},
      {"select_seconds", m.select.empty() ? Json(nullptr) : Json(median(m.select))},
      {"wire_seconds", median(m.wire)},
      {"algbw_bytes_per_second", middle > 0 ? bytes / middle : 0},
      {"busbw_bytes_per_second", middle > 0 ? bytes / middle * 2 * (options.ranks - 1) / options.ranks : 0},
      {"payload_bytes_per_rank", scaled(payload)},
      {"payload_bytes_mean", mean * scale},
      {"formula_bytes_per_rank", scaled(median(m.formula_bytes))},
      {"formula_is_bound", !m.formula.is_exact(options.sparse.scheme.codec)},
      {"bytes_as_formula", bytes_as_formula(options, m)},
      {"rounds", m.rounds},
      {"formula_rounds", m.formula.rounds()},
      {"micro_op_bytes", scaled(static_cast<double>(m.formula.operations[0].shape.micro_op_bytes))},
      {"link_bytes_per_second", options.link ? Json(options.link->bytes_per_second) : Json(nullptr)},
      {"latency_seconds", options.link ? Json(options.link->latency_seconds) : Json(nullptr)},
      {"ideal_seconds", has_ideal ? Json(ideal) : Json(nullptr)},
      {"efficiency", has_ideal && middle > 0 ? Json(ideal / middle) : Json(nullptr)},
      {"entries_out", scaled(m.entries_out)},
      {"bytes_per_entry", m.bytes_per_entry},
      {"captured_energy", worth(&SparseWorth::captured_energy)},
      {"energy_of_best", worth(&SparseWorth::energy_of_best)},
      {"energy_share", worth(&SparseWorth::energy_share)},
      {"mass_error", worth(&SparseWorth::mass_error)},
      {"correct", m.correct}};
  row.update(measured);
  return row;
}

std::string row_text(const Json& row) {
  const auto or_dash = [&row](const char* field, const char* form) {
    return row[field].is_null() ? std::string("-") : number_text(form, row[field]);
  };
  const bool bound = row["formula_is_bound"], off = !row["bytes_as_formula"];
  const bool dense = !find_sparse_algorithm(row["algorithm"].get<std::string>()).selects;
  return joined(
      {row["algorithm"], dense ? "-" : row["codec"].get<std::string>(), seconds_text(row["seconds_median"]),
       seconds_text(row["seconds_p99"]),
       row["select_seconds"].is_null() ? "-" : seconds_text(row["select_seconds"]),
       seconds_text(row["wire_seconds"]),
       size_text(row["payload_bytes_per_rank"].get<double>()) + (off ? "!" : ""),
       (bound ? "<= " : "") + size_text(row["formula_bytes_per_rank"].get<double>()),
       std::to_string(row["entries_out"].get<std::int64_t>()), number_text("%.2f", row["bytes_per_entry"]),
       or_dash("captured_energy", "%.4f"), or_dash("mass_error", "%.1e"),
       std::to_string(row["rounds"].get<int>()) + " of " + std::to_string(row["formula_rounds"].get<int>()),
       row["correct"].get<bool>() ? "yes" : "NO"});
}

std::vector<std::string> head_text(const Json& row, const SparseCase& c, const BenchOptions& options) {
  std::string what = std::to_string(options.sparse.length) + " elements, " +
                     std::string(name_of(options.sparse.distribution)) + ", density " +
                     number_text("%g", options.sparse.scheme.density) + ": k = " + row["k"].dump();
  if (options.sparse.scheme.density * static_cast<double>(options.sparse.length) / options.byte_scale < 0.5) {
    what += " (rounded it would be 0; one is the least)";
  }
  what += "; residual " + std::string(name_of(options.sparse.scheme.residual)) + ", blocks " +
          options.sparse.scheme.blocks;
  if (c.row->teams) what += ", " + (row["teams"].is_null() ? "various" : row["teams"].dump()) + " team(s)";
  if (options.sparse.buckets > 0) {
    what += "; " + std::to_string(options.sparse.buckets) + " bucket(s), " +
            std::string(name_of(options.sparse.scheme.quotas)) + " quotas";
  }
  if (options.byte_scale != 1) what += "; each element counts as " + number_text("%g", options.byte_scale);
  std::vector<std::string> titles;
  for (const Column& column : kColumns) titles.emplace_back(column.title);
  return {what, "", joined(titles)};
}

void add_row(const BenchOptions& options, const SparseCase& c, const SparseMeasured& m, BenchReport& report) {
  const Json row = object(options, c, m);
  std::vector<std::string> lines;
  if (c.slot == 1) lines = head_text(row, c, options);
  lines.push_back(row_text(row));
  report.add_object(row, lines);
}

void progress(const BenchOptions& options, const SparseCase& c, BenchReport& report) {
  report.progress(options.family + " " + std::string(c.row->name) + " ...");
}

void print_legend(const BenchOptions& options) {
  if (options.json) return;
  std::puts(
      "\nmedian, p99 of the slowest rank; select: of the busiest rank; wire: the same messages alone; "
      "bytes/rank: payload that\n"
      "the busiest rank sent, ! where it is not the formula's; <=: a bound; energy: at the chosen places, "
      "over that of the k\n"
      "largest (docs/measuring.md)");
}

}  // namespace

SparseFormula formula_of(const SparseVector& vector, int ranks, const LinkCost& link,
                         std::size_t micro_op_bytes) {
  SparseFormula formula;
  for (const SparseVector::Part& part : vector.parts()) {
    const SparseShape shape = shape_of(part.call, part.length,
                                       {.size = ranks,
                                        .parts = {},
                                        .link = link,
                                        .teams = part.state->work().team_figures.choice,
                                        .micro_op_bytes = micro_op_bytes,
                                        .node_size = link.node_size(ranks)});
    formula.operations.push_back({&find_sparse_algorithm(part.call.algorithm), shape});
  }
  return formula;
}

double SparseFormula::bytes() const {
  double sum = 0;
  for (const Operation& o : operations) sum += static_cast<double>(payload_bytes(*o.row, o.shape));
  return sum;
}

int SparseFormula::rounds() const {
  int most = 0;
  for (const Operation& o : operations) most = std::max(most, o.row->rounds(o.shape));
  return most;
}

bool SparseFormula::is_exact(const std::string& codec) const {
  if (operations.size() > 1) return false;  // the busiest rank of one is not that of another
  const auto& [row, shape] = operations.front();
  const bool no_entries = row->entries(shape) == 0;
  const bool bruck = row->teams && shape.teams > 1 && !shape.recursive;
  return row->exact && !bruck && (no_entries || codec == "coo");
}

bool checks_sum(const BenchOptions& options, const SparseCase& c) {
  constexpr std::int64_t kMost = 1 << 20;  // elements of all ranks together
  return c.row->sums_selections && options.sparse.buckets == 0 && c.length * options.ranks <= kMost &&
         options.sparse.scheme.codec != "packed-bf16";
}

bool conserves(const SparseBench& bench, const SparseAlgorithm& row) {
  const bool rule =
      bench.scheme.residual == ResidualRule::gres || bench.scheme.residual == ResidualRule::drop;
  return row.lossless || (rule && row.selects);
}

double mass_tolerance(int ranks, double largest, const SparseWorth& worth) {
  return worth.largest_sum > 0 ? 4.0 * ranks * 0x1p-24 * largest / worth.largest_sum : 0;
}

void check_sparse(const BenchOptions& options) { (void)make_cases(options); }

void bench_sparse(const BenchOptions& options, bool launched, BenchReport* report) {
  if (options.sparse.crossover) return bench_crossover(options, *report);
  const std::vector<SparseCase> cases = make_cases(options);
  if (options.transport == "sim") {
    for (const SparseCase& c : cases) {
      progress(options, c, *report);
      add_row(options, c, simulate_sparse(options, c), *report);
    }
  } else {
    on_ranks(options, {.launched = launched}, report, [&](const BenchRank& rank) {
      for (const SparseCase& c : cases) {
        if (rank.report != nullptr) progress(options, c, *rank.report);
        const SparseMeasured m = measure_sparse(options, c, rank);
        if (rank.report != nullptr) add_row(options, c, m, *rank.report);
      }
    });
  }
  if (report != nullptr) print_legend(options);
}

}  // namespace weft
