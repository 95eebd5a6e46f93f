// weft bench embedding: every way to exchange a table on the same ids, what each sends and how long a step of
// it takes, alone on the link.
#include "measure/bench/embedding.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "base/statistics.h"
#include "kernels/rows.h"
#include "measure/text.h"
#include "weft/error.h"

namespace weft {

namespace {

constexpr std::uint32_t kSlots = 64;  // of a way, more than it takes

struct Column {
  const char* title;
  int width;  // negative: to the left
};
constexpr Column kColumns[] = {{"way", -17},    {"median", 10}, {"p99", 10},        {"bytes/rank", 12},
                               {"formula", 13}, {"ideal", 10},  {"efficiency", 12}, {"correct", 9}};

std::string joined(const std::vector<std::string>& cells) {
  std::string line;
  for (std::size_t i = 0; i < cells.size(); ++i) line += padded(cells[i], kColumns[i].width);
  return line;
}

std::vector<TableWay> ways_of(const BenchOptions& options) {
  std::vector<TableWay> out;
  for (const std::string& name : options.algorithms) {
    out.push_back(find_table_way(name));
    if (out.back().kind == TableWay::Kind::scheme)
      throw UsageError("--ways: '" + name + "' is what --scheme does; bench sparse_allreduce measures that");
  }
  if (!out.empty()) return out;
  for (const TableWay& way : table_ways()) {
    if (way.kind != TableWay::Kind::scheme) out.push_back(way);
  }
  return out;
}

// What all ways have in common: the batches, and shares of their rows. Rank 0's alone.
class Batches {
 public:
  explicit Batches(const EmbeddingIds& ids) : ids_(ids) {}

  const TableBatch& at(std::int64_t step) {
    while (static_cast<std::int64_t>(batches_.size()) <= step)
      batches_.push_back(ids_.batch(static_cast<std::int64_t>(batches_.size())));
    return batches_[static_cast<std::size_t>(step)];
  }
  double unique_ratio(std::int64_t steps) {
    double rows = 0, tokens = 0;
    for (std::int64_t s = 0; s < steps; ++s) {
      for (const auto& list : at(s).lists) rows += static_cast<double>(list.size());
      for (const std::int64_t n : at(s).tokens) tokens += static_cast<double>(n);
    }
    return tokens > 0 ? rows / tokens : 0;
  }
  double prior_ratio(std::int64_t steps) {
    double prior = 0, rows = 0;
    for (std::int64_t s = 0; s < steps; ++s) {
      at(s + 1);  // (may move the batches)
      const std::vector<std::span<const std::int32_t>> next(at(s + 1).lists.begin(), at(s + 1).lists.end());
      const std::vector<std::int32_t> need = union_of(next);
      for (const auto& list : at(s).lists) {
        prior += static_cast<double>(split_ids(list, need).in.size());
        rows += static_cast<double>(list.size());
      }
    }
    return rows > 0 ? prior / rows : 0;
  }
  // A plain program's value of a row after so many steps.
  float value(std::int64_t row, std::size_t column, std::int64_t steps) {
    float out = embedding_value(row, column);
    for (std::int64_t s = 0; s < steps; ++s) {
      const TableBatch& batch = at(s);
      for (std::size_t r = 0; r < batch.lists.size(); ++r) {
        const auto& list = batch.lists[r];
        const auto found = std::ranges::lower_bound(list, row);
        if (found == list.end() || *found != row) continue;
        out -=
            embedding_gradient(static_cast<int>(r), static_cast<std::size_t>(found - list.begin()), column);
      }
    }
    return out;
  }

 private:
  const EmbeddingIds& ids_;
  std::vector<TableBatch> batches_;
};

// Of a step: means over the steps of the run, of the busiest rank.
struct Bytes {
  double sent = 0, formula = 0, busiest_ports = 0;
  bool is_bound = false, as_formula = true;
};

Bytes bytes_of(const TableWay& way, const EmbeddingMeasured& m, Batches& batches, const LinkCost& link) {
  std::vector<EmbeddingMeasured::Sent> expected(m.sent.size());
  Bytes out;
  for (std::int64_t s = 0; s < m.announced; ++s) {
    const TableTraffic traffic = table_traffic(way, batches.at(s), link);
    out.is_bound = out.is_bound || !traffic.exact;
    if (s < m.steps)
      out.busiest_ports += static_cast<double>(traffic.busiest()) / static_cast<double>(m.steps);
    for (std::size_t r = 0; r < expected.size(); ++r) {
      const auto& sent = traffic.ports[r].sent;
      expected[r].ids += static_cast<double>(sent[0]);
      if (s < m.looked_up) expected[r].rows += static_cast<double>(sent[1]);
      if (s < m.steps) expected[r].gradients += static_cast<double>(sent[2] + sent[3]);
    }
  }
  const auto of_step = [&m](const EmbeddingMeasured::Sent& s) {
    return s.ids / static_cast<double>(m.announced) + s.rows / static_cast<double>(m.looked_up) +
           s.gradients / static_cast<double>(m.steps);
  };
  double gradients = 0, most = 0;
  for (std::size_t r = 0; r < expected.size(); ++r) {
    const EmbeddingMeasured::Sent &sent = m.sent[r], &said = expected[r];
    out.sent = std::max(out.sent, of_step(sent));
    out.formula = std::max(out.formula, of_step(said));
    gradients = std::max(gradients, sent.gradients);
    most = std::max(most, said.gradients);
    const bool dense = way.kind == TableWay::Kind::dense;  // whose formula is the busiest rank's
    const bool fits =
        dense || out.is_bound ? sent.gradients <= said.gradients : sent.gradients == said.gradients;
    out.as_formula = out.as_formula && fits && sent.ids == said.ids && sent.rows == said.rows;
  }
  if (!out.is_bound) out.as_formula = out.as_formula && gradients == most;
  return out;
}

Json object(const BenchOptions& options, const TableWay& way, const EmbeddingMeasured& m, Batches& batches,
            const LinkCost& figures) {
  const EmbeddingBench& bench = options.embedding;
  const Bytes bytes = bytes_of(way, m, batches, figures);
  bool correct = m.same_bits;
  const auto columns = static_cast<std::size_t>(bench.columns);
  for (std::size_t i = 0; correct && i < m.values.size(); ++i)
    correct = m.values[i] == batches.value(m.asked[i / columns], i % columns, m.steps);
  const auto [middle, low, high] = median_with_interval(m.seconds);
  const double table = static_cast<double>(bench.rows * bench.columns) * sizeof(float);
  const std::optional<LinkSpec>& link = options.link ? options.link : options.ideal;
  const bool has_ideal = link && bytes.busiest_ports > 0;
  const double ideal = has_ideal ? bytes.busiest_ports / link->bytes_per_second : 0;
  return {
      {"family", options.family},
      {"algorithm", way.name},
      {"transport", options.transport},
      {"simulated", false},
      {"shaped", options.link.has_value()},
      {"ranks", options.ranks},
      {"nodes", options.nodes},
      {"dtype", "float32"},
      {"rows", bench.rows},
      {"columns", bench.columns},
      {"tokens", bench.tokens},
      {"zipf", bench.zipf},
      {"negatives", bench.negatives},
      {"bytes", std::llround(table)},
      {"byte_scale", 1},
      {"iterations", m.seconds.size()},
      {"seconds_median", middle},
      {"seconds_low", low},
      {"seconds_high", high},
      {"seconds_p99", quantile(m.seconds, 0.99)},
      {"algbw_bytes_per_second", middle > 0 ? table / middle : 0},
      {"busbw_bytes_per_second", middle > 0 ? table / middle * 2 * (options.ranks - 1) / options.ranks : 0},
      {"payload_bytes_per_rank", std::llround(bytes.sent)},
      {"formula_bytes_per_rank", std::llround(bytes.formula)},
      {"formula_is_bound", bytes.is_bound},
      {"bytes_as_formula", bytes.as_formula},
      {"rounds", nullptr},
      {"formula_rounds", nullptr},
      {"link_bytes_per_second", options.link ? Json(options.link->bytes_per_second) : Json(nullptr)},
      {"latency_seconds", options.link ? Json(options.link->latency_seconds) : Json(nullptr)},
      {"ideal_seconds", has_ideal ? Json(ideal) : Json(nullptr)},
      {"efficiency", has_ideal && middle > 0 ? Json(ideal / middle) : Json(nullptr)},
      {"unique_ratio", batches.unique_ratio(m.steps)},
      {"prior_ratio", batches.prior_ratio(m.steps)},
      {"correct", correct}};
}

std::vector<std::string> head_text(const Json& row) {
  const std::string what = row["rows"].dump() + " x " + row["columns"].dump() + " table, " +
                           row["tokens"].dump() + " tokens a rank (Zipf, exponent " +
                           number_text("%g", row["zipf"]) + ") and " + row["negatives"].dump() +
                           " shared negatives: unique " + number_text("%.3f", row["unique_ratio"]) +
                           ", prior " + number_text("%.3f", row["prior_ratio"]);
  std::vector<std::string> titles;
  for (const Column& column : kColumns) titles.emplace_back(column.title);
  return {what, "", joined(titles)};
}

std::string row_text(const Json& row) {
  const bool bound = row["formula_is_bound"], off = !row["bytes_as_formula"].get<bool>();
  const Json &ideal = row["ideal_seconds"], &efficiency = row["efficiency"];
  return joined({row["algorithm"], seconds_text(row["seconds_median"]), seconds_text(row["seconds_p99"]),
                 size_text(row["payload_bytes_per_rank"].get<double>()) + (off ? "!" : ""),
                 (bound ? "<= " : "") + size_text(row["formula_bytes_per_rank"].get<double>()),
                 ideal.is_null() ? "-" : seconds_text(ideal),
                 efficiency.is_null() ? "-" : number_text("%.1f %%", 100 * efficiency.get<double>()),
                 row["correct"].get<bool>() ? "yes" : "NO"});
}

}  // namespace

void check_embedding(const BenchOptions& options) {
  (void)ways_of(options);
  if (options.transport == "sim")
    throw UsageError("bench embedding is measured on ranks that run: --transport threads, tcp or mpi");
}

void bench_embedding(const BenchOptions& options, bool launched, BenchReport* report) {
  const std::vector<TableWay> ways = ways_of(options);
  const EmbeddingIds ids(options.embedding, options.ranks);
  Batches batches(ids);
  on_ranks(options, {.launched = launched}, report, [&](const BenchRank& rank) {
    std::uint32_t slot = 1;
    for (std::size_t w = 0; w < ways.size(); ++w, slot += kSlots) {
      if (rank.report != nullptr) rank.report->progress("embedding " + std::string(ways[w].name) + " ...");
      const EmbeddingMeasured m = measure_embedding(options, ways[w], ids, slot, rank);
      if (rank.report != nullptr) {
        const Json row = object(options, ways[w], m, batches, rank.world.figures());
        std::vector<std::string> lines;
        if (w == 0) lines = head_text(row);
        lines.push_back(row_text(row));
        rank.report->add_object(row, lines);
      }
      rank.world.barrier();
    }
  });
  if (report == nullptr || options.json) return;
  std::puts(
      "\nmedian, p99 over steps of the slowest rank, with nothing computed: ids, rows, gradients, update; "
      "bytes: payload that the busiest\nrank sent a step, ! where it is not the formula's; ideal: bytes at "
      "the "
      "busiest port / rate (docs/measuring.md)");
}

}  // namespace weft
