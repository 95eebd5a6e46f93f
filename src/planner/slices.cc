#include "planner/slices.h"

#include <algorithm>

#include "experts/policies.h"
#include "planner/text.h"
#include "weft/error.h"

namespace weft {

namespace {

std::string slices_text(int slices) { return std::to_string(slices) + (slices == 1 ? " slice" : " slices"); }

}  // namespace

SlicesChoice choose_slices(const Outline& outline, EmulationOptions emulation,
                           const SimulationOptions& simulation) {
  SlicesChoice out;
  if (emulation.experts.ranks == 1) {
    out.why = "1 slice, because no expert is on another rank";
    return out;
  }
  if (!find_expert_policy(emulation.experts.policy).slices) {
    out.why = "1 slice, because policy " + emulation.experts.policy + " does not cut rows";
    return out;
  }
  if (outline.experts.empty())
    throw UsageError(
        "expert-slices auto: the outline of " + outline.model +
        " does not tell experts apart from their blocks, so no number of slices can be predicted");
  emulation.windows = windows_of(outline, emulation);
  for (const int slices : kSlices) {
    emulation.experts.slices = slices;
    out.candidates.push_back({slices, predict_step(outline, emulation, simulation)});
  }
  const auto best = std::ranges::min_element(out.candidates, {}, &SlicesChoice::Candidate::step_seconds);
  out.slices = best->slices;
  out.why = slices_text(best->slices) + ", because a step takes " + milliseconds(best->step_seconds);
  for (const SlicesChoice::Candidate& other : out.candidates) {
    if (&other != &*best)
      out.why += ", with " + std::to_string(other.slices) + " " + milliseconds(other.step_seconds);
  }
  return out;
}

void explain(Plan& plan, const SlicesChoice& choice) {
  for (PlanRow& row : plan.rows) {
    if (row.strategy == "experts") row.why += "; auto: " + choice.why;
  }
}

}  // namespace weft
