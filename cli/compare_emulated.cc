// The runs of a comparison that compute no model: timers in wall time, or all ranks in virtual time.
#include <algorithm>

#include "compare_run.h"
#include "emulated.h"
#include "workload/emulate.h"
#include "workload/job_steps.h"

namespace weft::cli {

namespace {

Recorded combined(const std::vector<EmulatedSteps>& ranks, const Outline& outline,
                  std::span<const std::int64_t> pauses) {
  Recorded out;
  out.seconds = job_steps(seconds_of(ranks), pauses);
  out.all_seconds = out.seconds;
  const std::size_t steps = ranks.front().step_seconds.size();
  const auto size = static_cast<double>(ranks.size());
  for (std::size_t i = 0; i < steps; ++i) {
    double waited = 0, bytes = 0;
    for (const EmulatedSteps& rank : ranks) {
      waited += rank.waited_seconds[i] / size;
      bytes = std::max(bytes, rank.wire_bytes[i]);
    }
    out.waited_seconds.push_back(waited);
    out.wire_bytes.push_back(bytes);
  }
  out.tokens = static_cast<double>(outline.tokens_per_rank) * size;
  out.formula_bytes = static_cast<double>(ranks.front().formula_bytes);
  out.parameters = outline.parameters;
  return out;
}

}  // namespace

Work emulate_work(const CompareCommand& command, const NamedLink& link, const Turns& turns,
                  const Outline& outline) {
  return [&](const std::string& scheme, Lane& lane) {
    EmulationOptions options = emulation_of(options_of(command, scheme, turns), command.ranks, outline);
    options.before_step = [&](std::int64_t step) { lane.before_step(step); };
    options.settles_after = [&](std::int64_t step) { return turns.ends_behind(step); };
    return combined(emulate_ranks(command.ranks, link.spec, outline, options, [&] { lane.close(); }), outline,
                    turns.ends);
  };
}

Recorded simulate_scheme(const TrainOptions& options, int ranks, const NamedLink& link,
                         const Outline& outline, const SimulatedCosts& costs) {
  return combined(simulate(options, ranks, link.spec, outline, costs), outline, {});
}

}  // namespace weft::cli
