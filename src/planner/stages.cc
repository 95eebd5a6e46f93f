#include "planner/stages.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "patterns/blocks.h"
#include "pipeline/stage_codec.h"
#include "planner/text.h"
#include "weft/error.h"
#include "workload/token_cuts.h"

namespace weft {

namespace {

constexpr double kWorthwhile = 0.005;    // share of a step below which being faster does not pay for a loss
constexpr double kWorthAHalving = 0.05;  // the same, of half as many columns
constexpr std::array kRanks{32, 16, 8, 4, 2, 1};

using Candidate = StagesChoice::Candidate;

StagesChoice choose_number(const Outline& outline, EmulationOptions emulation,
                           const SimulationOptions& simulation) {
  StagesChoice out;
  emulation.windows = windows_of(outline, emulation);
  for (int k = 0; k <= emulation.mesh.pp; ++k) {
    emulation.stage.compressed = k;
    out.candidates.push_back({k, 0, predict_step(outline, emulation, simulation)});
  }
  const double least = std::ranges::min_element(out.candidates, {}, &Candidate::step_seconds)->step_seconds;
  const auto best = std::ranges::find_if(
      out.candidates, [&](const Candidate& c) { return c.step_seconds <= least * (1 + kWorthwhile); });
  out.compressed = best->compressed;
  out.why = std::to_string(best->compressed) + " of " + std::to_string(emulation.mesh.pp) +
            " stages compressed, because a step takes " + milliseconds(best->step_seconds);
  for (const Candidate& other : out.candidates) {
    if (&other != &*best)
      out.why += ", with " + std::to_string(other.compressed) + " " + milliseconds(other.step_seconds);
  }
  return out;
}

StagesChoice choose_both(const Outline& outline, const EmulationOptions& emulation,
                         const SimulationOptions& simulation) {
  StagesChoice out;
  const std::int64_t tokens = Blocks(emulation.mesh.tp, TokenCuts(outline, emulation).most()).count(0);
  for (const int columns : kRanks) {
    EmulationOptions with = emulation;
    with.parallel.scheme.columns = columns;
    if (with.backward.columns > 0) with.backward.columns = columns;
    const MessageForm form{outline.width, with.backward, with.stage.bf16};
    if (with.backward.columns > 0 && !form.shortens(tokens)) continue;  // they would be none
    const StagesChoice of_rank = choose_number(outline, with, simulation);
    const auto chosen = static_cast<std::size_t>(of_rank.compressed);
    out.candidates.push_back({of_rank.compressed, columns, of_rank.candidates[chosen].step_seconds});
  }
  if (out.candidates.empty())
    throw UsageError(
        "factors of any number of columns would be no shorter than what goes back between stages");
  const auto is_worth_its_loss = [&](const Candidate& larger) {
    return std::ranges::none_of(out.candidates, [&](const Candidate& smaller) {
      const double halvings = std::log2(static_cast<double>(larger.columns) / smaller.columns);
      return halvings > 0 && smaller.step_seconds < larger.step_seconds * (1 - kWorthAHalving * halvings);
    });
  };
  const Candidate best = *std::ranges::find_if(out.candidates, is_worth_its_loss);  // the last one is
  out.compressed = best.compressed;
  out.columns = best.columns;
  out.why = "factors of " + std::to_string(best.columns) + " columns and " + std::to_string(best.compressed) +
            " of " + std::to_string(emulation.mesh.pp) + " stages compressed, because a step takes " +
            milliseconds(best.step_seconds) + " and half as many columns must save a twentieth";
  for (const Candidate& other : out.candidates) {
    if (other.columns != best.columns)
      out.why += ", with " + std::to_string(other.columns) + " " + milliseconds(other.step_seconds);
  }
  return out;
}

}  // namespace

void StagesChoice::apply(SchemeOptions& scheme, StageOptions& stage, BackwardOptions& backward) const {
  stage.compressed = compressed;
  if (columns == 0) return;
  scheme.columns = columns;
  if (backward.columns > 0) backward.columns = columns;
}

StagesChoice choose_compressed_stages(const Outline& outline, const EmulationOptions& emulation,
                                      const SimulationOptions& simulation, bool and_rank) {
  return and_rank ? choose_both(outline, emulation, simulation)
                  : choose_number(outline, emulation, simulation);
}

}  // namespace weft
