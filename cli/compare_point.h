// A point of a comparison: one scheme over one link, as it was measured; and the rows that points give
// together, where one stands beside dense and beside itself without a link.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace weft::cli {

inline constexpr const char* kNoLink = "none";  // an unshaped one

// What a scheme's ranks recorded; one value for each trained step.
struct Recorded {
  std::vector<double> seconds;      // of the job (workload/job_steps.h), without what the end of a turn adds
  std::vector<double> all_seconds;  // with it
  std::vector<double> waited_seconds;  // for communication, within `seconds`; mean over the ranks
  std::vector<double> wire_bytes;      // gradient payload of the busiest rank
  std::vector<double> losses;          // none where computation is emulated
  double tokens = 0;                   // of a step, all ranks
  double formula_bytes = 0;
  std::int64_t parameters = 0;
};

// A scheme with buckets of a size of its own: "dense@25". Without one it is the scheme's name alone.
struct Variant {
  std::string scheme;
  std::optional<double> bucket_mib;
};
std::string name_of(const Variant& variant);
Variant variant_of(const std::string& name);

struct Point {
  std::string scheme, link, compute, transport;
  std::optional<double> bucket_mib;  // only where the fastest of several was taken
  int ranks = 1;
  bool occupies_cores = false;                       // emulated computation that takes processor time
  bool oversubscribed = false;                       // real computation, more threads than cores
  std::string session;                               // points of one session and link took turns
  std::vector<double> step_seconds, waited_seconds;  // of the measured steps
  double tokens = 0;                                 // of a step, all ranks
  double wire_bytes = 0;                             // of a step, busiest rank, median
  double formula_bytes = 0;
  std::int64_t parameters = 0;
  std::vector<double> losses, wall_seconds;  // of all trained steps; seconds since the first began
  std::int64_t steps = 0;                    // trained
};

// What `recorded` says of its measured steps. The names are left to the caller.
Point point_of(const Recorded& recorded, const std::vector<bool>& measured);

nlohmann::ordered_json to_json(const Point& point);
// None for what is no point (a torn line).
std::optional<Point> point_from(const std::string& line);

// Median with the narrowest interval between two order statistics that has it inside with a probability of
// 95 % whatever the distribution; of fewer than 6 values, which have none, from the least to the largest.
struct Median {
  double value = 0, low = 0, high = 0;
};
Median median_with_interval(std::vector<double> values);

// A line of the table. What needs a point that is not there is none.
struct Row {
  const Point* point = nullptr;
  Median seconds;
  double tokens_per_second = 0;
  double waited = 0;                               // seconds, median
  std::optional<double> unshaped_seconds;          // T_inf: the same scheme and seed without a link
  std::optional<double> exposed_share;             // 1 - T_inf / T
  std::optional<Median> speedup;                   // over dense; the interval from the ends of both
  std::optional<double> speedup_limit;             // 1 / (1 - exposed share of dense)
  std::optional<double> bytes_ratio;               // dense's over this one's
  std::optional<double> speedup_at_equal_compute;  // where T_inf differs from dense's by more than 10 %
  std::optional<double> final_loss, loss_gap;
  bool took_turns = true;  // with dense, at this link
};
// In the order of `links`, then of `schemes`; where `links` has others, those without a link are no rows.
std::vector<Row> rows_of(const std::vector<Point>& points, const std::vector<std::string>& schemes,
                         const std::vector<std::string>& links);
nlohmann::ordered_json to_json(const Row& row);

// For each of `schemes` the variant that is fastest at `link`, by the median, there and without a link, under
// the scheme's name alone.
std::vector<Point> fastest_variants(const std::vector<Point>& points, const std::vector<std::string>& schemes,
                                    const std::string& link);

}  // namespace weft::cli
