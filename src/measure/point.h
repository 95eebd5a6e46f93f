// A point of a comparison: one variant over one link, as it was measured; and the rows that points give
// together, where one stands beside the baseline and beside itself without a link.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/statistics.h"
#include "measure/summary.h"

namespace weft {

inline constexpr const char* kNoLink = "none";  // an unshaped one

// What a variant's ranks recorded.
struct Recorded {
  JobSteps steps;              // all that were trained
  std::vector<double> losses;  // one for each; none where computation is emulated
  double tokens = 0;           // of a step, all ranks
  double formula_bytes = 0;    // of the busiest rank, but for tables, whose steps have their own
  std::int64_t parameters = 0;
  int packing = 0;  // of experts, at the end; 0: there are none, or nobody said
  // Of each step, mean over the ranks: waited for rows of experts. Empty: nobody said.
  std::vector<double> rows_forward_seconds, rows_backward_seconds;
};

struct Point {
  std::string variant;  // a scheme and what it is given: "spardl+teams=2"
  std::string scheme, tables, link, compute, transport;
  std::string tables_why;            // of ways that were chosen: why
  std::string stages_why;            // of a number of compressed stages that was: which, and why
  std::string policy;                // of experts; empty: the model has none
  int packing = 0;                   // of experts, in the measured steps; 0: the model has none
  std::optional<double> density;     // of a scheme that selects
  std::optional<double> bucket_mib;  // only where the fastest of several was taken
  int ranks = 1;
  bool occupies_cores = false;  // emulated computation that takes processor time
  bool oversubscribed = false;  // real computation, more threads than cores
  std::string session;          // points of one session and link took turns,
  bool side_by_side = true;     // unless memory held one variant at a time only
  std::vector<double> step_seconds, waited_seconds, exchange_seconds;  // of the measured steps
  // In them: waited for rows on their way to experts or home, median. None where computation is real.
  std::optional<double> rows_forward_seconds, rows_backward_seconds;
  double tokens = 0;         // of a step, all ranks
  double payload_bytes = 0;  // of a step, busiest rank, median
  double formula_bytes = 0;  // the same by formula
  std::int64_t parameters = 0;
  std::vector<double> losses, wall_seconds;  // of all trained steps; seconds since the first began
  std::int64_t steps = 0;                    // trained
};

// What `recorded` says of its measured steps. The names are left to the caller.
Point point_of(const Recorded& recorded, const std::vector<bool>& measured);

nlohmann::ordered_json to_json(const Point& point);
// None for what is no point (a torn line).
std::optional<Point> point_from(const std::string& line);

// A line of the table. What needs a point that is not there is none.
struct Row {
  const Point* point = nullptr;
  Median seconds;
  double tokens_per_second = 0;
  double waited = 0;                       // seconds, median
  std::optional<double> hidden_share;      // of the time of exchanges, what nobody waited
  std::optional<double> rows_share;        // of the step, in which rows of experts were waited for
  std::string baseline;                    // the variant that speed-ups are over
  std::optional<double> unshaped_seconds;  // T_inf: the same variant and seed without a link
  std::optional<double> exposed_share;     // 1 - T_inf / T
  std::optional<Median> speedup;           // over the baseline; the interval from the ends of both
  std::optional<double> speedup_limit;     // 1 / (1 - exposed share of the baseline)
  std::optional<double> bytes_ratio;       // the baseline's over this one's
  // Where T_inf differs from the baseline's by more than 10 %.
  std::optional<double> speedup_at_equal_compute;
  std::optional<double> final_loss, loss_gap;
  bool took_turns = true;  // with the baseline, at this link

  bool is_baseline() const { return point->variant == baseline; }
};
// Which rows: in the order of `links`, then of `variants`; where `links` has others, those without a link are
// no rows.
struct RowSelection {
  std::vector<std::string> variants, links;
  std::string baseline;
};
std::vector<Row> rows_of(const std::vector<Point>& points, const RowSelection& selection);
nlohmann::ordered_json to_json(const Row& row);

// A variant with buckets of such a size: "dense+bucket-mib=25".
std::string with_buckets(const std::string& variant, double bucket_mib);
// For each variant the one of `bucket_mibs` that is fastest at `link`, by the median, there and without a
// link, under the variant's name alone.
std::vector<Point> fastest_buckets(const std::vector<Point>& points, const std::vector<std::string>& variants,
                                   const std::vector<double>& bucket_mibs, const std::string& link);

}  // namespace weft
