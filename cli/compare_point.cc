#include "compare_point.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <sstream>

#include "sizes.h"

namespace weft::cli {

namespace {

using Json = nlohmann::ordered_json;

constexpr double kAgree = 0.10;  // of T_inf between schemes

Json number(const std::optional<double>& value) {
  return value && std::isfinite(*value) ? Json(*value) : Json(nullptr);
}

const Point* find(const std::vector<Point>& points, const std::string& scheme, const std::string& link) {
  const auto at = std::find_if(points.begin(), points.end(),
                               [&](const Point& p) { return p.scheme == scheme && p.link == link; });
  return at == points.end() ? nullptr : &*at;
}

std::optional<double> ratio(double a, double b) {
  return b > 0 ? std::optional<double>(a / b) : std::nullopt;
}

void beside_dense(Row& row, const Point& dense, const Point* dense_unshaped) {
  const Point& point = *row.point;
  row.took_turns = point.session == dense.session;
  const Median base = median_with_interval(dense.step_seconds);
  row.speedup = Median{.value = base.value / row.seconds.value,
                       .low = base.low / row.seconds.high,
                       .high = base.high / row.seconds.low};
  if (&point == &dense) row.speedup = Median{.value = 1, .low = 1, .high = 1};
  row.bytes_ratio = ratio(dense.wire_bytes, point.wire_bytes);
  if (!point.losses.empty() && !dense.losses.empty())
    row.loss_gap = point.losses.back() - dense.losses.back();
  if (dense_unshaped == nullptr) return;
  const double base_unshaped = median_with_interval(dense_unshaped->step_seconds).value;
  row.speedup_limit = base.value / base_unshaped;
  if (!row.unshaped_seconds) return;
  const double more = *row.unshaped_seconds - base_unshaped;
  if (std::abs(more) > kAgree * base_unshaped)
    row.speedup_at_equal_compute = ratio(base.value, row.seconds.value - more);
}

}  // namespace

std::string name_of(const Variant& variant) {
  if (!variant.bucket_mib) return variant.scheme;
  std::ostringstream text;
  text << variant.scheme << "@" << *variant.bucket_mib;
  return text.str();
}

Variant variant_of(const std::string& name) {
  const std::size_t at = name.find('@');
  if (at == std::string::npos) return {.scheme = name, .bucket_mib = std::nullopt};
  return {.scheme = name.substr(0, at), .bucket_mib = std::strtod(name.c_str() + at + 1, nullptr)};
}

std::vector<Point> fastest_variants(const std::vector<Point>& points, const std::vector<std::string>& schemes,
                                    const std::string& link) {
  const auto seconds = [](const Point* p) { return median_with_interval(p->step_seconds).value; };
  std::vector<Point> out;
  for (const std::string& scheme : schemes) {
    const Point* best = nullptr;
    for (const Point& p : points) {
      const Variant variant = variant_of(p.scheme);
      if (p.link != link || variant.scheme != scheme || !variant.bucket_mib) continue;
      if (best == nullptr || seconds(&p) < seconds(best)) best = &p;
    }
    if (best == nullptr) continue;
    for (const Point* p : {best, link == kNoLink ? nullptr : find(points, best->scheme, kNoLink)}) {
      if (p == nullptr) continue;
      out.push_back(*p);
      out.back().scheme = scheme;
      out.back().bucket_mib = variant_of(best->scheme).bucket_mib;
    }
  }
  return out;
}

Point point_of(const Recorded& recorded, const std::vector<bool>& measured) {
  Point point;
  std::vector<double> bytes;
  double wall = 0;
  for (std::size_t i = 0; i < recorded.seconds.size(); ++i) {
    wall += recorded.all_seconds[i];
    point.wall_seconds.push_back(wall);
    if (i >= measured.size() || !measured[i]) continue;
    point.step_seconds.push_back(recorded.seconds[i]);
    point.waited_seconds.push_back(recorded.waited_seconds[i]);
    bytes.push_back(recorded.wire_bytes[i]);
  }
  point.losses = recorded.losses;
  point.steps = static_cast<std::int64_t>(recorded.seconds.size());
  point.tokens = recorded.tokens;
  point.wire_bytes = bytes.empty() ? 0 : median_of(bytes);
  point.formula_bytes = recorded.formula_bytes;
  point.parameters = recorded.parameters;
  return point;
}

Json to_json(const Point& p) {
  return {{"scheme", p.scheme},
          {"link", p.link},
          {"compute", p.compute},
          {"transport", p.transport},
          {"ranks", p.ranks},
          {"oversubscribed", p.oversubscribed},
          {"occupies_cores", p.occupies_cores},
          {"session", p.session},
          {"parameters", p.parameters},
          {"steps", p.steps},
          {"tokens", p.tokens},
          {"wire_bytes", p.wire_bytes},
          {"formula_bytes", p.formula_bytes},
          {"step_seconds", p.step_seconds},
          {"waited_seconds", p.waited_seconds},
          {"losses", p.losses},
          {"wall_seconds", p.wall_seconds}};
}

std::optional<Point> point_from(const std::string& line) {
  const Json json = Json::parse(line, nullptr, false);
  try {
    Point p;
    json.at("scheme").get_to(p.scheme);
    json.at("link").get_to(p.link);
    json.at("compute").get_to(p.compute);
    json.at("transport").get_to(p.transport);
    json.at("ranks").get_to(p.ranks);
    json.at("oversubscribed").get_to(p.oversubscribed);
    p.occupies_cores = json.value("occupies_cores", false);
    json.at("session").get_to(p.session);
    json.at("parameters").get_to(p.parameters);
    json.at("steps").get_to(p.steps);
    json.at("tokens").get_to(p.tokens);
    json.at("wire_bytes").get_to(p.wire_bytes);
    json.at("formula_bytes").get_to(p.formula_bytes);
    json.at("step_seconds").get_to(p.step_seconds);
    json.at("waited_seconds").get_to(p.waited_seconds);
    json.at("losses").get_to(p.losses);
    json.at("wall_seconds").get_to(p.wall_seconds);
    const auto steps = static_cast<std::size_t>(std::max<std::int64_t>(p.steps, 0));
    const bool whole = !p.step_seconds.empty() && p.step_seconds.size() == p.waited_seconds.size() &&
                       p.wall_seconds.size() == steps && (p.losses.empty() || p.losses.size() == steps);
    return whole ? std::optional(p) : std::nullopt;
  } catch (const Json::exception&) {
    return std::nullopt;
  }
}

Median median_with_interval(std::vector<double> values) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  const std::size_t n = values.size();
  const double value = n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
  // The number of values below the true median is binomial(n, 1/2): `cut` values are left out at each end
  // where the tails of cut or fewer together stay within 5 %.
  double term = std::pow(0.5, static_cast<double>(n)), tail = term;
  std::size_t cut = 0;
  for (std::size_t next = 1; next < (n + 1) / 2; ++next) {
    term *= static_cast<double>(n - next + 1) / static_cast<double>(next);
    tail += term;
    if (2 * tail > 0.05) break;
    cut = next;
  }
  return {.value = value, .low = values[cut], .high = values[n - 1 - cut]};
}

std::vector<Row> rows_of(const std::vector<Point>& points, const std::vector<std::string>& schemes,
                         const std::vector<std::string>& links) {
  std::vector<Row> rows;
  for (const std::string& link : links) {
    if (link == kNoLink && links.size() > 1) continue;
    for (const std::string& scheme : schemes) {
      const Point* const point = find(points, scheme, link);
      if (point == nullptr) continue;
      Row row;
      row.point = point;
      row.seconds = median_with_interval(point->step_seconds);
      row.tokens_per_second = point->tokens / row.seconds.value;
      row.waited = median_with_interval(point->waited_seconds).value;
      if (const Point* const unshaped = find(points, scheme, kNoLink)) {
        row.unshaped_seconds = median_with_interval(unshaped->step_seconds).value;
        row.exposed_share = 1 - *row.unshaped_seconds / row.seconds.value;
      }
      if (!point->losses.empty()) row.final_loss = point->losses.back();
      if (const Point* const dense = find(points, "dense", link))
        beside_dense(row, *dense, find(points, "dense", kNoLink));
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
  return {{"scheme", p.scheme},
          {"link", p.link},
          {"compute", p.compute},
          {"transport", p.transport},
          {"ranks", p.ranks},
          {"step_seconds_median", row.seconds.value},
          {"step_seconds_low", row.seconds.low},
          {"step_seconds_high", row.seconds.high},
          {"speedup_over_dense", of(row.speedup, &Median::value)},
          {"tokens_per_second", row.tokens_per_second},
          {"wire_bytes_per_step", p.wire_bytes},
          {"formula_bytes_per_step", p.formula_bytes},
          {"exposed_share", number(row.exposed_share)},
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
          {"took_turns_with_dense", row.took_turns}};
}

}  // namespace weft::cli
