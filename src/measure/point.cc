#include "measure/point.h"

#include <algorithm>
#include <cmath>
#include <sstream>

namespace weft {

namespace {

using Json = nlohmann::ordered_json;

constexpr double kAgree = 0.10;  // of T_inf between variants

Json number(const std::optional<double>& value) {
  return value && std::isfinite(*value) ? Json(*value) : Json(nullptr);
}

const Point* find(const std::vector<Point>& points, const std::string& variant, const std::string& link) {
  const auto at = std::find_if(points.begin(), points.end(),
                               [&](const Point& p) { return p.variant == variant && p.link == link; });
  return at == points.end() ? nullptr : &*at;
}

std::optional<double> ratio(double a, double b) {
  return b > 0 ? std::optional<double>(a / b) : std::nullopt;
}

void beside(Row& row, const Point& baseline, const Point* baseline_unshaped) {
  const Point& point = *row.point;
  row.took_turns = point.session == baseline.session && point.side_by_side && baseline.side_by_side;
  const Median base = median_with_interval(baseline.step_seconds);
  row.speedup = Median{.value = base.value / row.seconds.value,
                       .low = base.low / row.seconds.high,
                       .high = base.high / row.seconds.low};
  if (&point == &baseline) row.speedup = Median{.value = 1, .low = 1, .high = 1};
  row.bytes_ratio = ratio(baseline.payload_bytes, point.payload_bytes);
  if (!point.losses.empty() && !baseline.losses.empty())
    row.loss_gap = point.losses.back() - baseline.losses.back();
  if (baseline_unshaped == nullptr) return;
  const double base_unshaped = median_with_interval(baseline_unshaped->step_seconds).value;
  row.speedup_limit = base.value / base_unshaped;
  if (!row.unshaped_seconds) return;
  const double more = *row.unshaped_seconds - base_unshaped;
  if (std::abs(more) > kAgree * base_unshaped)
    row.speedup_at_equal_compute = ratio(base.value, row.seconds.value - more);
}

}  // namespace

std::string with_buckets(const std::string& variant, double bucket_mib) {
  std::ostringstream text;
  text << variant << "+bucket-mib=" << bucket_mib;
  return text.str();
}

std::vector<Point> fastest_buckets(const std::vector<Point>& points, const std::vector<std::string>& variants,
                                   const std::vector<double>& bucket_mibs, const std::string& link) {
  const auto seconds = [](const Point* p) { return median_with_interval(p->step_seconds).value; };
  std::vector<Point> out;
  for (const std::string& variant : variants) {
    const Point* best = nullptr;
    double best_mib = 0;
    for (const double mib : bucket_mibs) {
      const Point* const p = find(points, with_buckets(variant, mib), link);
      if (p == nullptr || (best != nullptr && seconds(p) >= seconds(best))) continue;
      best = p;
      best_mib = mib;
    }
    if (best == nullptr) continue;
    for (const Point* p : {best, link == kNoLink ? nullptr : find(points, best->variant, kNoLink)}) {
      if (p == nullptr) continue;
      out.push_back(*p);
      out.back().variant = variant;
      out.back().bucket_mib = best_mib;
    }
  }
  return out;
}

Point point_of(const Recorded& recorded, const std::vector<bool>& measured) {
  Point point;
  const JobSteps& steps = recorded.steps;
  std::vector<double> bytes, formula, rows_forward, rows_backward;
  double wall = 0;
  for (std::size_t i = 0; i < steps.seconds.size(); ++i) {
    wall += steps.settled_seconds[i];
    point.wall_seconds.push_back(wall);
    if (i >= measured.size() || !measured[i]) continue;
    point.step_seconds.push_back(steps.seconds[i]);
    point.waited_seconds.push_back(steps.waited_seconds[i]);
    point.exchange_seconds.push_back(steps.exchange_seconds[i]);
    bytes.push_back(steps.payload_bytes[i]);
    formula.push_back(steps.table_formula_bytes[i]);
    if (recorded.rows_forward_seconds.empty()) continue;
    rows_forward.push_back(recorded.rows_forward_seconds[i]);
    rows_backward.push_back(recorded.rows_backward_seconds[i]);
  }
  if (!rows_forward.empty()) {
    point.rows_forward_seconds = median(rows_forward);
    point.rows_backward_seconds = median(rows_backward);
  }
  point.losses = recorded.losses;
  point.steps = static_cast<std::int64_t>(steps.seconds.size());
  point.tokens = recorded.tokens;
  point.payload_bytes = median(bytes);
  point.formula_bytes = recorded.formula_bytes + median(formula);
  point.parameters = recorded.parameters;
  point.packing = recorded.packing;
  return point;
}

Json to_json(const Point& p) {
  return {{"variant", p.variant},
          {"scheme", p.scheme},
          {"tables", p.tables},
          {"tables_why", p.tables_why},
          {"stages_why", p.stages_why},
          {"policy", p.policy},
          {"packing", p.packing},
          {"density", number(p.density)},
          {"link", p.link},
          {"compute", p.compute},
          {"transport", p.transport},
          {"ranks", p.ranks},
          {"oversubscribed", p.oversubscribed},
          {"occupies_cores", p.occupies_cores},
          {"session", p.session},
          {"side_by_side", p.side_by_side},
          {"parameters", p.parameters},
          {"steps", p.steps},
          {"tokens", p.tokens},
          {"payload_bytes", p.payload_bytes},
          {"formula_bytes", p.formula_bytes},
          {"step_seconds", p.step_seconds},
          {"waited_seconds", p.waited_seconds},
          {"exchange_seconds", p.exchange_seconds},
          {"rows_forward_seconds", number(p.rows_forward_seconds)},
          {"rows_backward_seconds", number(p.rows_backward_seconds)},
          {"losses", p.losses},
          {"wall_seconds", p.wall_seconds}};
}

std::optional<Point> point_from(const std::string& line) {
  const Json json = Json::parse(line, nullptr, false);
  try {
    Point p;
    json.at("variant").get_to(p.variant);
    json.at("scheme").get_to(p.scheme);
    json.at("tables").get_to(p.tables);
    json.at("tables_why").get_to(p.tables_why);
    p.stages_why = json.value("stages_why", "");
    json.at("policy").get_to(p.policy);
    p.packing = json.value("packing", 0);
    if (!json.at("density").is_null()) p.density = json.at("density").get<double>();
    json.at("link").get_to(p.link);
    json.at("compute").get_to(p.compute);
    json.at("transport").get_to(p.transport);
    json.at("ranks").get_to(p.ranks);
    json.at("oversubscribed").get_to(p.oversubscribed);
    json.at("occupies_cores").get_to(p.occupies_cores);
    json.at("session").get_to(p.session);
    json.at("side_by_side").get_to(p.side_by_side);
    json.at("parameters").get_to(p.parameters);
    json.at("steps").get_to(p.steps);
    json.at("tokens").get_to(p.tokens);
    json.at("payload_bytes").get_to(p.payload_bytes);
    json.at("formula_bytes").get_to(p.formula_bytes);
    json.at("step_seconds").get_to(p.step_seconds);
    json.at("waited_seconds").get_to(p.waited_seconds);
    json.at("exchange_seconds").get_to(p.exchange_seconds);
    const auto if_there = [&json](const char* key, std::optional<double>& out) {
      if (json.contains(key) && !json.at(key).is_null()) out = json.at(key).get<double>();
    };
    if_there("rows_forward_seconds", p.rows_forward_seconds);
    if_there("rows_backward_seconds", p.rows_backward_seconds);
    json.at("losses").get_to(p.losses);
    json.at("wall_seconds").get_to(p.wall_seconds);
    const auto steps = static_cast<std::size_t>(std::max<std::int64_t>(p.steps, 0));
    const bool whole = !p.step_seconds.empty() && p.step_seconds.size() == p.waited_seconds.size() &&
                       p.step_seconds.size() == p.exchange_seconds.size() && p.wall_seconds.size() == steps &&
                       (p.losses.empty() || p.losses.size() == steps);
    return whole ? std::optional(p) : std::nullopt;
  } catch (const Json::exception&) {
    return std::nullopt;
  }
}

std::vector<Row> rows_of(const std::vector<Point>& points, const RowSelection& selection) {
  std::vector<Row> rows;
  for (const std::string& link : selection.links) {
    if (link == kNoLink && selection.links.size() > 1) continue;
    for (const std::string& variant : selection.variants) {
      const Point* const point = find(points, variant, link);
      if (point == nullptr) continue;
      Row row;
      row.point = point;
      row.baseline = selection.baseline;
      row.seconds = median_with_interval(point->step_seconds);
      row.tokens_per_second = point->tokens / row.seconds.value;
      row.waited = median(point->waited_seconds);
      row.hidden_share = hidden_share(point->waited_seconds, point->exchange_seconds);
      if (const Point* const unshaped = find(points, variant, kNoLink)) {
        row.unshaped_seconds = median(unshaped->step_seconds);
        row.exposed_share = 1 - *row.unshaped_seconds / row.seconds.value;
      }
      if (point->rows_forward_seconds && point->rows_backward_seconds)
        row.rows_share = (*point->rows_forward_seconds + *point->rows_backward_seconds) / row.seconds.value;
      if (!point->losses.empty()) row.final_loss = point->losses.back();
      if (const Point* const baseline = find(points, selection.baseline, link))
        beside(row, *baseline, find(points, selection.baseline, kNoLink));
      rows.push_back(row);
    }
  }
  return rows;
}

Json to_json(const Row& row) {
  const Point& p = *row.point;
  const auto of = [](const std::optional<Median>& m, double Median::* field) {
    return m ? number((*m).*field) : Json(nullptr);
  };
  return {{"variant", p.variant},
          {"scheme", p.scheme},
          {"tables", p.tables},
          {"tables_why", p.tables_why},
          {"stages_why", p.stages_why},
          {"policy", p.policy},
          {"packing", p.packing == 0 ? Json(nullptr) : Json(p.packing)},
          {"density", number(p.density)},
          {"link", p.link},
          {"compute", p.compute},
          {"transport", p.transport},
          {"ranks", p.ranks},
          {"step_seconds_median", row.seconds.value},
          {"step_seconds_low", row.seconds.low},
          {"step_seconds_high", row.seconds.high},
          {"baseline", row.baseline},
          {"speedup_over_baseline", of(row.speedup, &Median::value)},
          {"tokens_per_second", row.tokens_per_second},
          {"payload_bytes_per_step", p.payload_bytes},
          {"formula_bytes_per_step", p.formula_bytes},
          {"exposed_share", number(row.exposed_share)},
          {"hidden_share", number(row.hidden_share)},
          {"rows_share", number(row.rows_share)},
          {"rows_forward_seconds", number(p.rows_forward_seconds)},
          {"rows_backward_seconds", number(p.rows_backward_seconds)},
          {"final_loss", number(row.final_loss)},
          {"loss_gap", number(row.loss_gap)},
          {"speedup_low", of(row.speedup, &Median::low)},
          {"speedup_high", of(row.speedup, &Median::high)},
          {"speedup_limit", number(row.speedup_limit)},
          {"bytes_ratio", number(row.bytes_ratio)},
          {"speedup_at_equal_compute", number(row.speedup_at_equal_compute)},
          {"unshaped_step_seconds_median", number(row.unshaped_seconds)},
          {"waited_seconds_median", row.waited},
          {"parameters", p.parameters},
          {"steps", p.steps},
          {"measured_steps", p.step_seconds.size()},
          {"bucket_mib", number(p.bucket_mib)},
          {"oversubscribed", p.oversubscribed},
          {"occupies_cores", p.occupies_cores},
          {"side_by_side", p.side_by_side},
          {"took_turns_with_baseline", row.took_turns}};
}

}  // namespace weft
