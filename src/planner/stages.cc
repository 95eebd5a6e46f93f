#include "planner/stages.h"

#include <algorithm>

#include "planner/text.h"

namespace weft {

namespace {

constexpr double kWorthwhile = 0.005;  // share of a step below which being faster does not pay for a loss

}  // namespace

StagesChoice choose_compressed_stages(const Outline& outline, EmulationOptions emulation,
                                      const SimulationOptions& simulation) {
  StagesChoice out;
  emulation.windows = windows_of(outline, emulation);
  for (int k = 0; k <= emulation.mesh.pp; ++k) {
    emulation.stage.compressed = k;
    out.candidates.push_back({k, predict(outline, emulation, simulation).step_seconds});
  }
  const double least =
      std::ranges::min_element(out.candidates, {}, &StagesChoice::Candidate::step_seconds)->step_seconds;
  const auto best = std::ranges::find_if(out.candidates, [&](const StagesChoice::Candidate& c) {
    return c.step_seconds <= least * (1 + kWorthwhile);
  });
  out.compressed = best->compressed;
  out.why = std::to_string(best->compressed) + " of " + std::to_string(emulation.mesh.pp) +
            " stages compressed, because a step takes " + milliseconds(best->step_seconds);
  for (const StagesChoice::Candidate& other : out.candidates) {
    if (&other != &*best)
      out.why += ", with " + std::to_string(other.compressed) + " " + milliseconds(other.step_seconds);
  }
  return out;
}

}  // namespace weft
