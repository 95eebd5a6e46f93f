#include "workload/drawn_router.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>
#include <string>

#include "base/identity.h"
#include "weft/error.h"
#include "weft/random.h"

namespace weft {

namespace {

constexpr std::uint32_t kRatios = 1, kFactors = 2, kTokens = 3;  // what is drawn
constexpr int kScalings = 200;                                   // of a table, at most
constexpr double kExact = 1e-12;
constexpr double kMostPaths = 1 << 20;

[[noreturn]] void refuse(const std::string& what) { throw UsageError("router: " + what); }

double normal(Random& random) {
  const double radius = std::sqrt(-2 * std::log(random.uniform()));
  return radius * std::cos(2 * std::numbers::pi * random.uniform());
}

void to_shares(std::span<double> values) {
  const double all = std::accumulate(values.begin(), values.end(), 0.0);
  for (double& value : values) value /= all;
}

std::int32_t drawn_from(std::span<const double> shares, double at) {
  std::size_t e = 0;
  while (e + 1 < shares.size() && at >= shares[e]) at -= shares[e++];
  return static_cast<std::int32_t>(e);
}

}  // namespace

void check(const DrawnRouterOptions& o) {
  if (o.layers < 1 || o.layers > 4096) refuse("there are 1 to 4096 layers, not " + std::to_string(o.layers));
  if (o.experts < 2) refuse("there are at least two experts, not " + std::to_string(o.experts));
  if (o.order < 0 || std::pow(o.experts, o.order) > kMostPaths)
    refuse("paths of " + std::to_string(o.order) + " of " + std::to_string(o.experts) +
           " experts are too many for a table");
  if (o.topics < 1 || o.topics > o.experts)
    refuse("there are 1 to " + std::to_string(o.experts) + " topics, not " + std::to_string(o.topics));
  if (!(o.least_ratio >= 1 && o.most_ratio >= o.least_ratio && o.most_ratio <= 1e6))
    refuse("the hottest expert is at least as popular as the coldest");
  if (!(std::abs(o.persistence) <= 20 && o.scatter >= 0 && o.scatter <= 10 && std::abs(o.swing) <= 20))
    refuse("persistence, scatter or swing is out of range");
  if (o.period < 1) refuse("topics come again after at least one batch");
}

DrawnRouter::DrawnRouter(const DrawnRouterOptions& options) : options_(options) {
  check(options_);
  make_popularity();
  // Shares of the paths that lead to a layer.
  std::vector<double> paths{1.0};
  tables_.resize(popularity_.size());
  for (int l = 0; l < options_.layers; ++l) {
    make_table(l, paths);
    const std::vector<double>& table = tables_[static_cast<std::size_t>(l)];
    std::vector<double> next(paths_of(l + 1));
    for (std::size_t path = 0; path < paths.size(); ++path) {
      for (std::size_t e = 0; e < experts(); ++e)
        next[(path * experts() + e) % next.size()] += paths[path] * table[path * experts() + e];
    }
    paths = std::move(next);
  }
}

std::size_t DrawnRouter::paths_of(int layer) const {
  std::size_t out = 1;
  for (int i = 0; i < std::min(layer, options_.order); ++i) out *= experts();
  return out;
}

void DrawnRouter::make_popularity() {
  for (int l = 0; l < options_.layers; ++l) {
    Random random(options_.seed, kRatios, static_cast<std::uint32_t>(l));
    const double ratio =
        options_.least_ratio + random.uniform() * (options_.most_ratio - options_.least_ratio);
    const double exponent = std::log(ratio) / std::log(options_.experts);
    std::vector<std::size_t> expert_of_place(experts());
    std::iota(expert_of_place.begin(), expert_of_place.end(), std::size_t{0});
    for (std::size_t i = experts(); i > 1; --i)
      std::swap(expert_of_place[i - 1], expert_of_place[random.below(static_cast<std::uint32_t>(i))]);
    std::vector<double>& shares = popularity_.emplace_back(experts());
    std::vector<int>& topics = topics_.emplace_back(experts());
    for (std::size_t place = 0; place < experts(); ++place) {
      shares[expert_of_place[place]] = std::pow(static_cast<double>(place + 1), -exponent);
      // There and back, so that a topic with a hot expert has a cold one too.
      const int round = static_cast<int>(place) / options_.topics,
                at = static_cast<int>(place) % options_.topics;
      topics[expert_of_place[place]] = round % 2 == 0 ? at : options_.topics - 1 - at;
    }
    to_shares(shares);
  }
}

void DrawnRouter::make_table(int layer, const std::vector<double>& paths) {
  const auto l = static_cast<std::size_t>(layer);
  const std::vector<double>& wanted = popularity_[l];
  std::vector<double>& table = tables_[l];
  table.resize(paths.size() * experts());
  Random random(options_.seed, kFactors, static_cast<std::uint32_t>(layer));
  const int looks_back = std::min(layer, options_.order);
  for (std::size_t path = 0; path < paths.size(); ++path) {
    std::vector<int> votes(static_cast<std::size_t>(options_.topics));
    std::size_t rest = path;
    for (int back = 1; back <= looks_back && options_.topics > 1; ++back, rest /= experts())
      ++votes[static_cast<std::size_t>(topics_[l - static_cast<std::size_t>(back)][rest % experts()])];
    for (std::size_t e = 0; e < experts(); ++e) {
      const double persists = options_.persistence * votes[static_cast<std::size_t>(topics_[l][e])];
      const double factor = looks_back > 0 ? options_.scatter * normal(random) : 0;
      table[path * experts() + e] = wanted[e] * std::exp(persists + factor);
    }
    to_shares(std::span(table).subspan(path * experts(), experts()));
  }
  for (int i = 0; i < kScalings; ++i) {
    std::vector<double> got(experts());
    for (std::size_t at = 0; at < table.size(); ++at)
      got[at % experts()] += paths[at / experts()] * table[at];
    double off = 0;
    for (std::size_t e = 0; e < experts(); ++e) off = std::max(off, std::abs(got[e] - wanted[e]));
    if (off < kExact) break;
    for (std::size_t at = 0; at < table.size(); ++at)
      table[at] *= wanted[at % experts()] / got[at % experts()];
    for (std::size_t path = 0; path < paths.size(); ++path)
      to_shares(std::span(table).subspan(path * experts(), experts()));
  }
}

std::span<const double> DrawnRouter::shares(int layer, std::span<const std::int32_t> path) const {
  const std::vector<double>& table = tables_[static_cast<std::size_t>(layer)];
  std::size_t at = 0;
  for (const std::int32_t expert : path.last(static_cast<std::size_t>(std::min(layer, options_.order))))
    at = at * experts() + static_cast<std::size_t>(expert);
  return std::span(table).subspan(at * experts(), experts());
}

std::vector<double> DrawnRouter::first_shares(std::int64_t batch) const {
  std::vector<double> out = popularity_.front();
  if (!options_.drifts) return out;
  for (std::size_t e = 0; e < experts(); ++e) {
    const double turns = static_cast<double>(batch % options_.period) / options_.period -
                         static_cast<double>(topics_.front()[e]) / options_.topics;
    out[e] *= std::exp(options_.swing * std::cos(2 * std::numbers::pi * turns));
  }
  to_shares(out);
  return out;
}

std::vector<std::int32_t> DrawnRouter::draw(std::uint64_t seed, std::int64_t batch, int rank,
                                            std::int64_t tokens) const {
  const std::vector<double> first = first_shares(batch);
  Random random(mix(seed) ^ static_cast<std::uint64_t>(batch), kTokens, static_cast<std::uint32_t>(rank));
  const auto layers = static_cast<std::size_t>(options_.layers);
  std::vector<std::int32_t> out(static_cast<std::size_t>(tokens) * layers);
  for (std::size_t t = 0; t < static_cast<std::size_t>(tokens); ++t) {
    std::int32_t* const mine = out.data() + t * layers;
    mine[0] = drawn_from(first, random.uniform());
    for (std::size_t l = 1; l < layers; ++l)
      mine[l] = drawn_from(shares(static_cast<int>(l), std::span(mine, l)), random.uniform());
  }
  return out;
}

}  // namespace weft
