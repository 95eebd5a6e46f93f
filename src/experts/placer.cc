#include "experts/placer.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <utility>

#include "base/names.h"
#include "weft/error.h"

namespace weft {

namespace {

[[noreturn]] void refuse(const std::string& what) { throw UsageError("placement: " + what); }

// Of equal ones the first.
std::set<std::size_t> most_popular(std::span<const double> rows, std::size_t count) {
  std::vector<std::size_t> order(rows.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::sort(
      order, [&](std::size_t a, std::size_t b) { return rows[a] != rows[b] ? rows[a] > rows[b] : a < b; });
  return {order.begin(), order.begin() + static_cast<std::ptrdiff_t>(std::min(count, order.size()))};
}

}  // namespace

std::vector<std::string_view> placement_names() {
  std::vector<std::string_view> out;
  out.reserve(kPlacements.size());
  for (const PlacementKind& kind : kPlacements) out.push_back(kind.name);
  return out;
}

const PlacementKind& find_placement(std::string_view name) {
  for (const PlacementKind& kind : kPlacements) {
    if (kind.name == name) return kind;
  }
  throw UsageError(unknown_name("placement", name, placement_names()));
}

void check(const PlacerOptions& o) {
  find_placement(o.placement);
  check(o.place);
  if (o.layers < 1) refuse("there is at least one layer of experts, not " + std::to_string(o.layers));
  if (o.choices < 1 || o.choices > o.place.experts)
    refuse("a token has 1 to " + std::to_string(o.place.experts) + " choices, not " +
           std::to_string(o.choices));
  if (o.check != "load" && o.check != "sets")
    refuse("a plan is checked by load or sets, not '" + o.check + "'");
  if (!(o.tolerance >= 0 && std::isfinite(o.tolerance))) refuse("a tolerance is not negative");
  if (o.window < 1 || o.every < 1) refuse("history has a window and an interval of at least one batch");
}

bool keeps(const ExpertPlacement& plan, std::span<const double> expected, std::span<const double> real,
           const PlacerOptions& o) {
  if (o.check == "sets") {
    const auto count = 2 * static_cast<std::size_t>(o.choices);
    return most_popular(expected, count) == most_popular(real, count);
  }
  const double all = std::accumulate(real.begin(), real.end(), 0.0);
  const double known = std::accumulate(expected.begin(), expected.end(), 0.0);
  if (known <= 0) return all <= 0;
  // (An estimate that is cut to a token's first experts has fewer rows: what counts is how they are shared.)
  std::vector<double> scaled(expected.begin(), expected.end());
  for (double& rows : scaled) rows *= all / known;
  const double promised = std::max(max_load(plan, scaled, o.place), all / o.place.ranks);
  return max_load(plan, real, o.place) <= (1 + o.tolerance) * promised;
}

Placer::Placer(const PlacerOptions& options) : options_(options) {
  check(options_);
  kind_ = &find_placement(options_.placement);
  layers_.resize(static_cast<std::size_t>(options_.layers));
  for (Layer& layer : layers_) layer.placement = static_placement(options_.place);
}

void Placer::plan(int layer, std::span<const double> expected) {
  Layer& mine = of(layer);
  mine.expected.assign(expected.begin(), expected.end());
  mine.placement = plan_placement(expected, options_.place);
}

const ExpertPlacement& Placer::settle(int layer, std::span<const std::int64_t> chosen) {
  Layer& mine = of(layer);
  const std::vector<double> real(chosen.begin(), chosen.end());
  mine.replanned = false;
  if (kind_->estimates) {
    ++checks_;
    mine.replanned = mine.expected.empty() || !keeps(mine.placement, mine.expected, real, options_);
    if (mine.replanned) {
      ++replans_;
      mine.placement = plan_placement(real, options_.place);
    }
    mine.expected.clear();
  }
  if (kind_->balanced && !std::exchange(mine.placed, true))
    mine.placement = plan_placement(real, options_.place);
  if (kind_->remembers) {
    mine.window.push_back(real);
    if (mine.window.size() > static_cast<std::size_t>(options_.window)) mine.window.pop_front();
  }
  return mine.placement;
}

void Placer::batch_end() {
  ++batches_;
  if (!kind_->remembers || batches_ % options_.every != 0) return;
  for (Layer& layer : layers_) {
    std::vector<double> sum(static_cast<std::size_t>(options_.place.experts));
    for (const std::vector<double>& rows : layer.window) {
      for (std::size_t e = 0; e < rows.size(); ++e) sum[e] += rows[e];
    }
    // Of a mean batch: what an expert costs beside its rows is of one.
    for (double& rows : sum) rows /= static_cast<double>(std::max<std::size_t>(1, layer.window.size()));
    layer.placement = plan_placement(sum, options_.place);
  }
}

}  // namespace weft
