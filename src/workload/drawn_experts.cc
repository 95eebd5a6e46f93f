#include "workload/drawn_experts.h"

#include <algorithm>
#include <numeric>

#include "base/identity.h"
#include "weft/error.h"
#include "weft/random.h"
#include "workload/token_cuts.h"

namespace weft {

ExpertLayout expert_layout(const EmulationOptions& options, int rank) {
  const ExpertOptions& experts = options.experts;
  const int at = options.mesh.ranks() == 1 ? rank : options.mesh.coordinates(rank).dp;
  return {.slices = experts.slices, .ranks = experts.ranks, .rank = at % experts.ranks};
}

ExpertOptions expert_options(const Outline& outline, const EmulationOptions& options, int rank) {
  ExpertOptions out = options.experts;
  out.rank = expert_layout(options, rank).rank;
  if (outline.experts.empty()) {
    if (out.ranks > 1)
      throw UsageError("the outline of " + outline.model +
                       " does not tell experts apart from their blocks: make one from FLOPs");
    return out;
  }
  const OutlineExperts& layer = outline.experts.front();
  out.count = layer.experts;
  out.choices = layer.choices;
  out.capacity_factor = layer.capacity_factor;
  if (out.count % out.ranks != 0)
    throw UsageError(std::to_string(out.count) + " experts cannot be dealt to " + std::to_string(out.ranks) +
                     " ranks, as many to each");
  return out;
}

DrawnExperts::DrawnExperts(const Outline& outline, const EmulationOptions& options, JobStrategies& job)
    : job_(job),
      seed_(options.seed),
      tokens_(TokenCuts(outline, options).all()),
      rank_(job.all().world().rank()) {
  const std::vector<ExpertShape>& layers = job.all().shape().experts;
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const int layer = static_cast<int>(l);
    names_[layers[l].router()] = {layer, 0, Named::What::router};
    for (int s = 0; s < layers[l].slices; ++s) {
      names_[layers[l].dispatch(s)] = {layer, s, Named::What::dispatch};
      names_[layers[l].counts(s)] = {layer, s, Named::What::counts};
      names_[layers[l].combine(s)] = {layer, s, Named::What::combine};
    }
  }
  if (layers.empty()) return;
  // As many as could come to one rank, and stay where they are.
  const RouteOptions& route = job.experts()->options().route;
  const bool capped = route.capacity_factor > 0;
  const double copies =
      (capped ? route.capacity_factor : 1) * static_cast<double>(outline.tokens_per_rank) * route.choices;
  // (With a capacity an expert gets as many from each rank, and a rank has as many experts fewer as there are ranks.)
  const double rows =
      (copies + route.experts * options.micro_batches) * (capped ? 1 : job.experts()->group().size());
  std::int64_t width = 0;
  for (const ExpertShape& layer : layers) width = std::max(width, layer.width);
  values_.assign(static_cast<std::size_t>(rows * static_cast<double>(width)), 1);
}

// Of each token's each choice.
std::vector<std::int64_t> DrawnExperts::draw(std::int64_t step, int micro_batch, int layer,
                                             std::int64_t tokens) const {
  const RouteOptions& route = job_.experts()->options().route;
  std::vector<std::int64_t> out;
  if (route.capacity_factor > 0) {  // every place travels, whoever stands there
    for (std::int64_t i = 0; i < tokens * route.choices; ++i) out.push_back(i % route.experts);
    return out;
  }
  const std::uint64_t key =
      mix(mix(seed_ ^ static_cast<std::uint64_t>(rank_)) ^ static_cast<std::uint64_t>(step));
  Random random(key, static_cast<std::uint32_t>(layer) + 1, static_cast<std::uint32_t>(micro_batch));
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::size_t first = out.size();
    while (out.size() < first + static_cast<std::size_t>(route.choices)) {
      const std::int64_t expert = random.below(static_cast<std::uint32_t>(route.experts));
      const auto mine = out.begin() + static_cast<std::ptrdiff_t>(first);
      if (std::find(mine, out.end(), expert) == out.end()) out.push_back(expert);
    }
  }
  return out;
}

void DrawnExperts::begin(std::int64_t step) {
  if (job_.experts() == nullptr) return;
  job_.experts()->set_tokens(tokens_);
  job_.router()->set_micro_batches(static_cast<int>(tokens_.size()));
  const RouteOptions& route = job_.experts()->options().route;
  const auto experts = static_cast<std::size_t>(route.experts);
  counts_.assign(tokens_.size(), {});
  for (std::size_t m = 0; m < tokens_.size(); ++m) {
    for (int l = 0; l < job_.experts()->num_layers(); ++l) {
      const Route way = weft::route(draw(step, static_cast<int>(m), l, tokens_[m]), route);
      std::vector<std::vector<std::int64_t>>& slices = counts_[m].emplace_back();
      for (int s = 0; s < route.slices; ++s) {
        const auto first =
            way.counts.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(s) * experts);
        slices.emplace_back(first, first + route.experts);
      }
    }
  }
}

const std::vector<std::int64_t>& DrawnExperts::counts(int layer, int slice, int micro_batch) const {
  return counts_[static_cast<std::size_t>(micro_batch)][static_cast<std::size_t>(layer)]
                [static_cast<std::size_t>(slice)];
}

std::int64_t DrawnExperts::rows(const Piece& piece) const {
  const std::vector<ExpertShape>& layers = job_.all().shape().experts;
  const auto found = std::ranges::find(layers, piece.block, &ExpertShape::block);
  const int layer = static_cast<int>(found - layers.begin()), slice = piece.part - found->first_slice;
  if (job_.experts()->group().size() > 1)
    return job_.experts()->arrived(layer, RowExchange::dispatch, slice, piece.micro_batch).count;
  const std::vector<std::int64_t>& own = counts(layer, slice, piece.micro_batch);
  return std::accumulate(own.begin(), own.end(), std::int64_t{0});
}

// Of rows that leave: this rank's own, or those that came to its experts.
std::int64_t DrawnExperts::values_of(const Named& named, bool gradient, int micro_batch) const {
  const bool own = (named.what == Named::What::dispatch) != gradient;
  const std::int64_t width = job_.experts()->layer(named.layer).width;
  if (!own)
    return width *
           job_.experts()->arrived(named.layer, RowExchange::dispatch, named.slice, micro_batch).count;
  const std::vector<std::int64_t>& mine = counts(named.layer, named.slice, micro_batch);
  return width * std::accumulate(mine.begin(), mine.end(), std::int64_t{0});
}

Dense DrawnExperts::tensor(const TensorName& name) {
  const auto found = names_.find(name.name);
  if (found == names_.end()) return TensorSource::tensor(name);
  const Named& named = found->second;
  if (named.what == Named::What::router) return {};  // nothing is learned from it
  if (named.what == Named::What::counts) {
    const std::vector<std::int64_t>& mine = counts(named.layer, named.slice, name.micro_batch);
    return {reinterpret_cast<std::byte*>(const_cast<std::int64_t*>(mine.data())),
            static_cast<std::int64_t>(mine.size()), DType::int64};
  }
  const std::int64_t count = values_of(named, name.of == TensorName::Of::gradient, name.micro_batch);
  return Dense(std::span(values_).first(static_cast<std::size_t>(count)));
}

}  // namespace weft
