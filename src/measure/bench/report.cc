#include "measure/bench/report.h"

#include <cmath>
#include <cstdio>

#include "base/statistics.h"

namespace weft {

namespace {

struct Column {
  const char* title;
  int width;  // negative: to the left
};
constexpr Column kColumns[] = {{"algorithm", -22}, {"bytes", 10},      {"median", 10},       {"p99", 10},
                               {"algbw", 11},      {"busbw", 11},      {"payload/rank", 14}, {"rounds", 7},
                               {"ideal", 10},      {"efficiency", 11}, {"correct", 8}};
constexpr Column kAgainst = {"x MPI", 8};

Json or_null(const std::optional<double>& value) { return value ? Json(*value) : Json(nullptr); }

std::uint64_t scaled(std::uint64_t bytes, double scale) {
  return static_cast<std::uint64_t>(std::llround(static_cast<double>(bytes) * scale));
}

std::string where(const BenchOptions& options, const std::string& transport) {
  std::string text = options.family + ", " + std::to_string(options.ranks) + " ranks on " + transport;
  if (options.link) {
    text += options.transport == "sim" ? ", simulated link " : ", shaped to ";
    text += link_text(options.link->bytes_per_second) + " and " + seconds_text(options.link->latency_seconds);
  }
  if (options.nodes > 0) {
    text += ", " + std::to_string(options.nodes) + " nodes";
    if (options.scale_up_bytes_per_second > 0)
      text += " (" + link_text(options.scale_up_bytes_per_second) + " inside)";
  }
  if (options.ideal) text += ", ideal of " + link_text(options.ideal->bytes_per_second);
  return text + ", " + std::string(name_of(options.dtype)) +
         (options.transport == "sim" ? "; SIMULATED time" : "; wall time");
}

}  // namespace

BenchReport::BenchReport(const BenchOptions& options, std::string transport)
    : options_(options), transport_(std::move(transport)), progress_(true) {}

const MpiBest* BenchReport::mpi_for(const BenchCase& c) const {
  for (const MpiBest& best : mpi_) {
    if (best.bytes == c.bytes) return &best;
  }
  return nullptr;
}

Json BenchReport::object(const BenchCase& c, const Measured& m) const {
  const auto [middle, low, high] = median_with_interval(m.seconds);
  Shape shape = c.shape;
  shape.micro_op_bytes = m.micro_op_bytes;
  shape.node_size = m.node_size;
  const std::optional<double> ideal = ideal_seconds(options_, c);
  const double scale = options_.byte_scale;
  Json row = {
      {"family", options_.family},
      {"algorithm", m.algorithm->name},
      {"auto", m.chosen_by_auto},
      {"transport", transport_},
      {"simulated", options_.transport == "sim"},
      {"shaped", options_.link && options_.transport != "sim"},
      {"ranks", c.shape.size},
      {"nodes", options_.nodes},
      {"dtype", name_of(c.dtype)},
      {"bytes", c.bytes},
      {"byte_scale", scale},
      {"iterations", m.seconds.size()},
      {"seconds_median", middle},
      {"seconds_low", low},
      {"seconds_high", high},
      {"seconds_p99", quantile(m.seconds, 0.99)},
      {"algbw_bytes_per_second", middle > 0 ? algorithm_bytes(c) / middle : 0},
      {"busbw_bytes_per_second", middle > 0 ? algorithm_bytes(c) * bus_factor(c) / middle : 0},
      {"payload_bytes_per_rank", scaled(m.payload_bytes, scale)},
      {"formula_bytes_per_rank", scaled(m.algorithm->bytes(shape), scale)},
      {"rounds", m.rounds},
      {"formula_rounds", m.algorithm->rounds(shape)},
      {"micro_op_bytes", scaled(m.micro_op_bytes, scale)},
      {"link_bytes_per_second", options_.link ? Json(options_.link->bytes_per_second) : Json(nullptr)},
      {"latency_seconds", options_.link ? Json(options_.link->latency_seconds) : Json(nullptr)},
      {"ideal_seconds", or_null(ideal)},
      {"efficiency", ideal && middle > 0 ? Json(*ideal / middle) : Json(nullptr)},
      {"correct", m.correct}};
  if (const MpiBest* mpi = mpi_for(c)) {
    row["mpi_seconds_median"] = mpi->seconds_median;
    row["mpi_algorithm"] = mpi->algorithm;
    row["speed_over_mpi"] = mpi->seconds_median / middle;
  }
  return row;
}

void BenchReport::print_head() {
  if (std::exchange(head_, true)) return;
  std::printf("%s\n\n", where(options_, transport_).c_str());
  std::string line;
  for (const Column& column : kColumns) line += padded(column.title, column.width);
  if (options_.against_mpi) line += padded(kAgainst.title, kAgainst.width);
  std::puts(line.c_str());
}

void BenchReport::print_row(const std::vector<std::string>& cells) {
  std::string line;
  for (std::size_t i = 0; i < cells.size(); ++i) {
    line += padded(cells[i], i < std::size(kColumns) ? kColumns[i].width : kAgainst.width);
  }
  std::puts(line.c_str());
  std::fflush(stdout);
}

void BenchReport::add(const BenchCase& c, const Measured& m) {
  progress_.clear();
  all_correct_ = all_correct_ && m.correct;
  const Json row = object(c, m);
  if (options_.json) {
    std::puts(row.dump().c_str());
    std::fflush(stdout);
    return;
  }
  print_head();
  marked_ = marked_ || m.chosen_by_auto;
  const bool as_formula = row["payload_bytes_per_rank"] == row["formula_bytes_per_rank"];
  const Json& ideal = row["ideal_seconds"];
  const Json& efficiency = row["efficiency"];
  std::vector<std::string> cells = {
      std::string(m.algorithm->name) + (m.chosen_by_auto ? " *" : ""),
      size_text(static_cast<double>(c.bytes)),
      seconds_text(row["seconds_median"]),
      seconds_text(row["seconds_p99"]),
      rate_text(row["algbw_bytes_per_second"]),
      rate_text(row["busbw_bytes_per_second"]),
      size_text(row["payload_bytes_per_rank"].get<double>()) + (as_formula ? "" : "!"),
      std::to_string(m.rounds) + (row["rounds"] == row["formula_rounds"] ? "" : "!"),
      ideal.is_null() ? "-" : seconds_text(ideal),
      efficiency.is_null() ? "-" : number_text("%.1f %%", 100 * efficiency.get<double>()),
      m.correct ? "yes" : "NO"};
  if (options_.against_mpi)
    cells.push_back(row.contains("speed_over_mpi") ? number_text("%.2f", row["speed_over_mpi"]) : "-");
  print_row(cells);
}

void BenchReport::add_mpi(const std::vector<MpiBest>& best, Family family) {
  progress_.clear();
  mpi_ = best;
  for (const MpiBest& mpi : best) {
    BenchCase c;
    c.family = family;
    c.bytes = mpi.bytes;
    c.shape.size = options_.ranks;
    const double algbw = algorithm_bytes(c) / mpi.seconds_median;
    all_correct_ = all_correct_ && mpi.correct;
    if (options_.json) {
      const Json row = {{"family", options_.family},
                        {"algorithm", mpi.algorithm},
                        {"transport", "Open MPI"},
                        {"ranks", options_.ranks},
                        {"bytes", mpi.bytes},
                        {"seconds_median", mpi.seconds_median},
                        {"seconds_p99", mpi.seconds_p99},
                        {"algbw_bytes_per_second", algbw},
                        {"busbw_bytes_per_second", algbw * bus_factor(c)},
                        {"payload_bytes_per_rank", nullptr},  // nobody counts them here
                        {"formula_bytes_per_rank", nullptr},
                        {"rounds", nullptr},
                        {"formula_rounds", nullptr},
                        {"ideal_seconds", nullptr},
                        {"efficiency", nullptr},
                        {"correct", mpi.correct}};
      std::puts(row.dump().c_str());
      continue;
    }
    print_head();
    print_row({"MPI " + mpi.algorithm, size_text(static_cast<double>(mpi.bytes)),
               seconds_text(mpi.seconds_median), seconds_text(mpi.seconds_p99), rate_text(algbw),
               rate_text(algbw * bus_factor(c)), "-", "-", "-", "-", mpi.correct ? "yes" : "NO", "1"});
  }
}

void BenchReport::add_object(const Json& object, const std::vector<std::string>& lines, bool anywhere) {
  progress_.clear();
  if (object.contains("correct")) all_correct_ = all_correct_ && object["correct"].get<bool>();
  if (options_.json) {
    std::puts(object.dump().c_str());
    std::fflush(stdout);
    return;
  }
  if (!anywhere && !std::exchange(object_head_, true))
    std::printf("%s\n\n", where(options_, transport_).c_str());
  for (const std::string& line : lines) std::puts(line.c_str());
  std::fflush(stdout);
}

void BenchReport::finish() {
  progress_.clear();
  if (options_.json || !std::exchange(head_, false)) return;
  std::string under =
      "\nmedian, p99 over iterations of the slowest rank; algbw: bytes of the operation / median, busbw: "
      "what a port must carry of "
      "it;\npayload: what the busiest rank sent, without frames, ! where it is not the formula's; ";
  under += "ideal: bytes at the busiest port / rate (docs/measuring.md)";
  if (marked_) under += "; * what auto takes here";
  if (options_.against_mpi) under += "; x MPI: speed over Open MPI at its best";
  std::puts(under.c_str());
}

}  // namespace weft
