#include "measure/predicted.h"

#include <algorithm>

#include "experts/packing.h"
#include "measure/emulated.h"
#include "measure/memory.h"
#include "workload/elements.h"

namespace weft {

namespace {

// Elements of all ranks together that are walked one by one: some seconds.
constexpr WalkSize kWalked{.exact = 1 << 27, .walked = 1 << 27};

std::string why_not(const Outline& outline, const EmulationOptions& emulation,
                    const SimulationOptions& simulation) {
  if (simulation.ranks == 1) return "one rank exchanges nothing";
  if (emulation.experts.ranks > 1 && outline.experts.empty())
    return "what its experts take apart from their blocks was not measured";
  const RankElements elements = elements_of_ranks(outline, emulation, simulation.ranks);
  const MemoryNeed need{.ranks = simulation.ranks,
                        .parameters = elements.dense / simulation.byte_scale,
                        .held = 0,  // a walk has no memory for their rows
                        .copies = kCopiesOfEmulation};
  return need.bytes() > available_memory() ? "a walk of all ranks does not fit into this machine's memory"
                                           : "";
}

}  // namespace

void add_prediction(const Outline& outline, const EmulationOptions& given, SimulationOptions simulation,
                    TrainSummary& summary) {
  EmulationOptions emulation = given;
  if (is_auto_packing(emulation.experts.packing) && !summary.packings.empty()) {  // that of its last steps
    emulation.experts.packing = std::to_string(summary.packings.back().packing);
    emulation.experts.ranks /= summary.packings.back().packing;
  }
  simulation.traces = nullptr;
  simulation.byte_scale =
      std::max(simulation.byte_scale, walk_scale(outline, emulation, simulation.ranks, kWalked));
  summary.not_predicted = why_not(outline, emulation, simulation);
  if (!summary.not_predicted.empty()) return;
  const Prediction predicted = predict(outline, emulation, simulation);
  summary.predicted_step_seconds = predicted.step_seconds;
  summary.predicted_exposed_seconds = predicted.exposed_seconds;
  const double unlimited = predicted.step_seconds - predicted.exposed_seconds;
  summary.exposed_seconds = std::max(0.0, summary.step_seconds_median - unlimited);
}

void predict_run(const TrainOptions& options, int ranks, const std::optional<EmulatedLink>& link,
                 bool one_process, TrainSummary& summary) {
  if (!options.sizes.stage.is_whole()) {
    summary.not_predicted = "a rank of a pipeline has measured its own stage only";
    return;
  }
  if (!summary.outline) {
    summary.not_predicted = "the run has too few steps behind its first ones to know what its blocks take";
    return;
  }
  if (2 * options.warmup_steps > summary.first_step + summary.steps) {
    summary.not_predicted = "the density changed in most of its steps";
    return;
  }
  EmulatedLink over = link.value_or(EmulatedLink{});
  if (!link) {
    over.bytes_per_second = 1 / summary.link.seconds_per_byte;
    over.latency_seconds = summary.link.hop_seconds;
    if (summary.link.node_ranks > 1) {
      over.nodes = ranks / summary.link.node_ranks;
      over.scale_up_bytes_per_second = 1 / summary.link.inside().seconds_per_byte;
    }
  }
  EmulationOptions emulation = emulation_of(options, ranks, *summary.outline);
  SimulatedCosts costs = measured_costs(options, ranks, *summary.outline);
  emulation.occupies = costs.occupies = false;
  if (!one_process) costs.workers = 0;
  add_prediction(*summary.outline, emulation, simulation_of(ranks, over, costs), summary);
}

}  // namespace weft
