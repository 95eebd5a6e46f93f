#include "planner/choose.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "data_parallel/formula.h"
#include "workload/job_strategies.h"

namespace weft {

namespace {

constexpr double kHidden = 0.03;  // a share of a step that may be exposed without anybody looking further
constexpr double kFewer = 0.6;    // of dense's bytes, that a scheme may send to be looked at

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

std::vector<ParameterInfo> parts_of(const BucketPlan& plan, const Bucket& bucket) {
  std::vector<ParameterInfo> parts;
  parts.reserve(bucket.pieces.size());
  for (const BucketPiece& piece : bucket.pieces) parts.push_back(plan.parameter(piece.parameter));
  return parts;
}

std::int64_t quota_of(const Bucket& bucket, const SchemeOptions& options) {
  return std::max<std::int64_t>(
      1, static_cast<std::int64_t>(options.density * static_cast<double>(bucket.count)));
}

// Parameters of the buckets that are faster dense. What a bucket costs is what its exchange takes alone.
std::vector<std::string> not_worth_it(const Outline& outline, const EmulationOptions& emulation,
                                      const SimulationOptions& simulation, const LinkCost& link) {
  const SchemeOptions& options = emulation.parallel.scheme;
  const std::vector<ParameterInfo> parameters = under_scheme(shape_of(outline), emulation.tables);
  const BucketPlan plan(parameters, bucket_options(options));
  const Scheme& sparse = find_scheme(options.name);
  std::vector<std::string> out;
  for (const Bucket& bucket : plan.buckets()) {
    if (bucket.dense) continue;
    const std::vector<ParameterInfo> parts = parts_of(plan, bucket);
    SchemeShape shape{.size = simulation.ranks, .parts = parts, .link = link};
    shape.node_size = link.node_size(simulation.ranks);
    shape.quota = bucket.count;
    const double dense = cost_of(lossless_scheme(), options, shape).seconds +
                         simulation.costs.kernels.fold_byte * 4 * static_cast<double>(bucket.count);
    shape.quota = quota_of(bucket, options);
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

// Bytes of a step by the formulas of its buckets' exchanges.
double formula_of(const std::vector<ParameterInfo>& parameters, const SchemeOptions& options, int ranks,
                  const LinkCost& link) {
  const BucketPlan plan(parameters, bucket_options(options));
  double sum = 0;
  for (const Bucket& bucket : plan.buckets()) {
    const std::vector<ParameterInfo> parts = parts_of(plan, bucket);
    const std::int64_t quota = quota_of(bucket, options);
    const Scheme& taken = scheme_of_bucket(find_scheme(options.name), bucket.dense, quota, bucket.count);
    const SchemeShape shape{.size = ranks,
                            .quota = taken.selects ? quota : bucket.count,
                            .parts = parts,
                            .link = link,
                            .node_size = link.node_size(ranks)};
    sum += static_cast<double>(payload_bytes(taken, options, shape));
  }
  return sum;
}

// The schemes that are predicted beside dense: those that only round come first.
std::vector<std::string> worth_a_look(const std::vector<ParameterInfo>& parameters, SchemeOptions options,
                                      const SimulationOptions& simulation, const LinkCost& link) {
  const auto bytes = [&](std::string_view name) {
    options.name = name;
    return formula_of(parameters, options, simulation.ranks, link);
  };
  const double dense = bytes(lossless_scheme().name);
  std::vector<std::string> out;
  for (const bool rounds : {true, false}) {
    for (const Scheme& scheme : schemes()) {
      if (!scheme.automatic || scheme.lossless || scheme.dense() != rounds) continue;
      if (scheme.low_rank && simulation.byte_scale > 1) continue;
      if (bytes(scheme.name) <= kFewer * dense) out.emplace_back(scheme.name);
    }
  }
  return out;
}

}  // namespace

Choice choose_scheme(const Outline& outline, EmulationOptions emulation, const SimulationOptions& given) {
  Choice out;
  SchemeOptions& scheme = emulation.parallel.scheme;
  scheme.name = lossless_scheme().name;
  SimulationOptions simulation = given;  // the same scale for all
  simulation.byte_scale = std::max(given.byte_scale, walk_scale(outline, emulation, given.ranks));
  const auto predicted = [&](const std::string& name) -> double {
    out.candidates.push_back({name, predict(outline, emulation, simulation)});
    return out.candidates.back().prediction.step_seconds;
  };
  const LinkCost link = cost_of_link(emulation, simulation);
  scheme.wire = wire_of(scheme, emulation.stage);
  scheme.buckets.stay_dense.clear();
  if (simulation.byte_scale == 1) emulation.windows = windows_of(outline, emulation);
  // Step 1
  const SchemeOptions dense_scheme = scheme;
  const double dense = predicted(scheme.name);
  const double exposed = out.candidates.front().prediction.exposed_seconds;
  const auto stay_dense = [&](const std::string& why) {
    out.scheme = dense_scheme;
    out.why_row = "auto: " + why;
    out.why = "stay dense, because " + why;
    return out;
  };
  if (exposed < kHidden * dense)
    return stay_dense("its exchange hides behind computation: " + seconds_in_words(exposed) +
                      " of a step of " + seconds_in_words(dense) + " are exposed");
  // Steps 2 and 3
  out.scheme = dense_scheme;
  double best = dense;        // of what was taken so far
  double loses_less = dense;  // of what the next one must beat by the margin
  std::string others;
  const std::vector<ParameterInfo> parameters = under_scheme(shape_of(outline), emulation.tables);
  for (const std::string& name : worth_a_look(parameters, scheme, simulation, link)) {
    if (!find_scheme(name).dense() && find_scheme(out.scheme.name).dense()) loses_less = best;
    scheme.name = name;
    const double seconds = predicted(name);
    others += (others.empty() ? "" : ", ") + name + " would take " + seconds_in_words(seconds);
    if (seconds > (1 - kWorthLosing) * loses_less || seconds >= best) continue;
    best = seconds;
    out.scheme = scheme;
  }
  const std::string name = out.scheme.name;
  if (others.empty()) return stay_dense("no scheme sends clearly fewer bytes");
  if (name == dense_scheme.name)
    return stay_dense("a step takes " + seconds_in_words(dense) + ", " + others +
                      ", and losing bits must save " + percent(kWorthLosing));
  out.why = name + ", because a dense step would take " + seconds_in_words(dense) + ", of which " +
            percent(exposed / dense) + " are exposed, and this one " + seconds_in_words(best);
  out.why_row = "auto: a step takes " + seconds_in_words(best) + ", and dense " + seconds_in_words(dense);
  // Step 4
  if (!find_scheme(name).selects) return out;
  scheme = out.scheme;
  scheme.buckets.stay_dense = not_worth_it(outline, emulation, simulation, link);
  const std::size_t some = scheme.buckets.stay_dense.size();
  if (some == 0) return out;
  const std::string mixed_name = name + " with " + std::to_string(some) + " parameters dense";
  const double mixed = predicted(mixed_name);
  if (mixed >= best) return out;
  out.scheme = scheme;
  out.why = mixed_name + ", because their exchange alone is faster so: " + seconds_in_words(mixed) +
            " a step against " + seconds_in_words(best) + " and, dense, " + seconds_in_words(dense);
  out.why_row = "auto: a step takes " + seconds_in_words(mixed) + ", and dense " + seconds_in_words(dense);
  return out;
}

void explain(Plan& plan, const Choice& choice) {
  for (PlanRow& row : plan.rows) {
    if (row.scheme == choice.scheme.name) row.why = choice.why_row;
  }
}

void explain(Plan& plan, const TablesChoice& choice) {
  for (PlanRow& row : plan.rows) {
    for (const TablesChoice::Of& table : choice.rows) {
      // Dense ones may share a bucket, which has the name of the first.
      if (row.tensor != table.table && !row.tensor.starts_with(table.table + " and ")) continue;
      row.why = "auto: " + table.why + (row.why.empty() ? "" : "; " + row.why);
    }
  }
}

}  // namespace weft
