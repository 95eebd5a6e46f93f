#include "planner/choose.h"

#include <algorithm>
#include <cstdio>

#include "data_parallel/formula.h"

namespace weft {

namespace {

constexpr double kWorth = 0.97;  // what is gained less is not worth losing bits for

std::string seconds_in_words(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, seconds < 1 ? "%.3g ms" : "%.3g s", seconds < 1 ? seconds * 1e3 : seconds);
  return text;
}

std::string percent(double share) {
  char text[16];
  std::snprintf(text, sizeof text, "%.0f %%", share * 100);
  return text;
}

// What a selection from so many elements takes a rank: its passes over them, and its entries on the way.
double selection_seconds(const KernelCosts& k, std::int64_t elements, std::int64_t entries) {
  const auto n = static_cast<double>(elements), e = static_cast<double>(entries);
  return n * (k.scan_element + k.check_element) +
         e * (k.encode_entry[1] + k.decode_entry[1] + k.scatter_entry + k.settle_place + k.cut_candidate);
}

// Parameters of the buckets that are faster dense. What a bucket costs is what its exchange takes alone.
std::vector<std::string> not_worth_it(const Outline& outline, const EmulationOptions& emulation,
                                      const SimulationOptions& simulation, const LinkCost& link) {
  const SchemeOptions& options = emulation.parallel.scheme;
  const std::vector<ParameterInfo> parameters = parameters_of(outline);
  const BucketPlan plan(parameters, bucket_options(options));
  const Scheme& sparse = find_scheme(options.name);
  std::vector<std::string> out;
  for (const Bucket& bucket : plan.buckets()) {
    if (bucket.dense) continue;
    std::vector<ParameterInfo> parts;
    parts.reserve(bucket.pieces.size());
    for (const BucketPiece& piece : bucket.pieces) parts.push_back(plan.parameter(piece.parameter));
    SchemeShape shape{.size = simulation.ranks, .parts = parts, .link = link};
    shape.quota = bucket.count;
    const double dense = cost_of(lossless_scheme(), options, shape).seconds +
                         simulation.costs.kernels.fold_byte * 4 * static_cast<double>(bucket.count);
    shape.quota = std::max<std::int64_t>(
        1, static_cast<std::int64_t>(options.density * static_cast<double>(bucket.count)));
    const double compressed = cost_of(sparse, options, shape).seconds +
                              selection_seconds(simulation.costs.kernels, bucket.count, shape.quota);
    if (compressed < dense) continue;
    for (const ParameterInfo& part : parts) out.push_back(part.name);
  }
  return out;
}

LinkCost cost_of_link(const EmulationOptions& emulation, const SimulationOptions& simulation) {
  if (emulation.planned_link) return *emulation.planned_link;
  LinkCost out;
  out.hop_seconds = std::max(simulation.link.latency_seconds, 1e-9);
  if (simulation.link.bytes_per_second > 0) out.seconds_per_byte = 1 / simulation.link.bytes_per_second;
  return out;
}

}  // namespace

Choice choose_scheme(const Outline& outline, EmulationOptions emulation, const SimulationOptions& simulation,
                     const std::string& sparse) {
  Choice out;
  const auto candidate = [&](const std::string& name) -> const Prediction& {
    out.candidates.push_back({name, predict(outline, emulation, simulation)});
    return out.candidates.back().prediction;
  };
  SchemeOptions& scheme = emulation.parallel.scheme;
  scheme.buckets.stay_dense.clear();
  // Step 1
  scheme.name = lossless_scheme().name;
  const SchemeOptions dense_scheme = scheme;
  const Prediction dense = candidate(scheme.name);
  const auto stay_dense = [&](const std::string& why) {
    out.scheme = dense_scheme;
    out.why = "stay dense, because " + why;
    return out;
  };
  if (dense.exposed_seconds < (1 - kWorth) * dense.step_seconds)
    return stay_dense("its exchange hides behind computation: " + seconds_in_words(dense.exposed_seconds) +
                      " of a step of " + seconds_in_words(dense.step_seconds) + " are exposed");
  // Step 2
  scheme.name = sparse;
  const Prediction all = candidate(sparse);
  if (all.step_seconds > kWorth * dense.step_seconds)
    return stay_dense(sparse + " would take " + seconds_in_words(all.step_seconds) +
                      " a step, and dense takes " + seconds_in_words(dense.step_seconds));
  out.scheme = scheme;
  out.why = sparse + ", because a dense step would take " + seconds_in_words(dense.step_seconds) +
            ", of which " + percent(dense.exposed_seconds / dense.step_seconds) +
            " are exposed, and this one " + seconds_in_words(all.step_seconds);
  // Step 3
  scheme.buckets.stay_dense =
      not_worth_it(outline, emulation, simulation, cost_of_link(emulation, simulation));
  const std::size_t some = scheme.buckets.stay_dense.size();
  if (some == 0) return out;
  const std::string name = sparse + " with " + std::to_string(some) + " parameters dense";
  const Prediction mixed = candidate(name);
  if (mixed.step_seconds < all.step_seconds) {
    out.scheme = scheme;
    out.why = name + ", because their exchange alone is faster so: " + seconds_in_words(mixed.step_seconds) +
              " a step against " + seconds_in_words(all.step_seconds) + " and, dense, " +
              seconds_in_words(dense.step_seconds);
  }
  return out;
}

}  // namespace weft
