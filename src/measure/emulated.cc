#include "measure/emulated.h"

#include <algorithm>
#include <cstdio>
#include <thread>

#include "base/mutex.h"
#include "experts/policies.h"
#include "measure/memory.h"
#include "measure/outline_file.h"
#include "measure/text.h"
#include "weft/error.h"
#include "workload/elements.h"
#include "workload/job_strategies.h"
#include "workload/measure_kernels.h"

namespace weft {

namespace fs = std::filesystem;

namespace {

fs::path kept_outline(const fs::path& folder) { return folder / "outline.json"; }

}  // namespace

bool has_outline(const fs::path& folder, const std::string& file) {
  std::error_code error;
  return !file.empty() || (!folder.empty() && fs::exists(kept_outline(folder), error));
}

Outline outline_for(const fs::path& folder, const std::string& file, const TrainOptions& options, int ranks,
                    const MeasureOutline& measure) {
  const fs::path kept = kept_outline(folder);
  const bool there = has_outline(folder, "");
  if (file.empty() && there) return read_outline(kept);
  if (!file.empty()) {
    Outline outline = read_outline(file);
    if (there && outline_json(read_outline(kept)) != outline_json(outline)) {
      throw UsageError("'" + folder.string() + "' has points by another outline than '" + file +
                       "': --out names another folder");
    }
    if (!there) write_outline(kept, outline);
    return outline;
  }
  if (!measure)
    throw UsageError("an outline is measured with LibTorch, which is not built in: --outline FILE");
  Outline outline = measure(options, ranks);
  write_outline(kept, outline);
  std::fprintf(
      stderr,
      "weft: note: the outline of %s was measured with one rank alone: %s of computation a step (%s)\n",
      outline.model.c_str(), seconds_text(compute_seconds(outline)).c_str(), kept.c_str());
  return outline;
}

Outline read_named_outline(const std::string& file, const std::string& model) {
  Outline outline = read_outline(file);
  if (!model.empty() && outline.model != model)
    throw UsageError("--model " + model + ", but the outline is of " + outline.model + ": leave one out");
  return outline;
}

void check_named_outline(const Computation& computation, const std::string& model,
                         const TrainOptions& options, int ranks) {
  if (computation.outline.empty()) return;
  const Outline outline = read_named_outline(computation.outline, model);
  const RankElements elements = elements_of_ranks(outline, emulation_of(options, ranks, outline), ranks);
  check_memory({.ranks = ranks,
                .parameters = elements.dense / computation.byte_scale,
                .held = computation.simulated() ? 0 : elements.held,  // a walk has no memory for their rows
                .copies = kCopiesOfEmulation},
               available_memory());
}

bool occupies_cores(const Outline& outline, int ranks) {
  const auto cores = static_cast<int>(std::thread::hardware_concurrency());
  return ranks > 1 && outline.side_by_side == ranks && ranks <= cores;
}

EmulationOptions emulation_of(const TrainOptions& options, int ranks, const Outline& outline) {
  EmulationOptions out;
  out.occupies = occupies_cores(outline, ranks);
  out.parallel = data_parallel_options(options);
  out.tables = options.tables;
  out.experts = options.sizes.experts;
  out.mesh = mesh_of(options.sizes, ranks);
  out.stage = options.sizes.stage;
  out.backward = options.backward;
  out.backward.seed = options.seed;
  out.tensor_bf16 = options.sizes.tensor.bf16;
  out.optimizer = optimizer_options(options);
  out.warmup = 0;
  out.steps = options.steps;
  out.seed = options.seed;
  out.micro_batches = options.accumulate;
  // (An outline that was named may be of other batches.)
  const std::int64_t sequences = sequences_of_rank(options, out.mesh.dp);
  if (sequences * sequence_length(options) == outline.tokens_per_rank) out.sequences = sequences;
  TrainOptions waits = options;
  waits.find_unused = false;  // that is data parallelism's: it says so itself
  out.updates_wait = why_updates_wait(waits);
  out.planned_link = options.planned_link;
  return out;
}

RunOptions run_options(const std::optional<EmulatedLink>& link, const ExpertOptions& experts) {
  RunOptions options;
  options.config = with_policy(Config::from_environment(), experts);
  options.priority = find_expert_policy(experts.policy).first;
  options.link = link;
  return options;
}

EmulatedRun emulate_ranks(int ranks, const std::optional<EmulatedLink>& link, const Outline& outline,
                          const EmulationOptions& given, const std::function<void()>& failed,
                          std::vector<Trace>* traces) {
  EmulationOptions options = given;
  options.packing_link = link;
  options.windows = windows_of(outline, options);  // once for all ranks
  EmulatedRun out;
  out.ranks.resize(static_cast<std::size_t>(ranks));
  Mutex mutex;
  RunOptions run = run_options(link, options.experts);
  run.traces = traces;
  run_ranks(ranks, run, [&](World& world) {
    try {
      const std::uint64_t before = world.traffic().wire_bytes_sent;
      out.ranks[static_cast<std::size_t>(world.rank())] = emulate_rank(world, outline, options);
      const Lock lock(mutex);
      out.wire_bytes = std::max(out.wire_bytes.value_or(0), world.traffic().wire_bytes_sent - before);
    } catch (...) {
      failed();
      throw;
    }
  });
  return out;
}

SimulatedCosts measured_costs(const TrainOptions& options, int ranks, const Outline& outline) {
  SimulatedCosts out;
  out.kernels = measure_kernels();
  if (ranks <= kMostOnOneMachine) out.workers = pool_workers(Config::from_environment(), ranks);
  out.occupies = emulation_of(options, ranks, outline).occupies;
  return out;
}

SimulationOptions simulation_of(int ranks, const std::optional<EmulatedLink>& link,
                                const SimulatedCosts& costs) {
  SimulationOptions simulation;
  simulation.ranks = ranks;
  simulation.config = Config::from_environment();
  simulation.costs = costs;
  simulation.link = link.value_or(EmulatedLink{});
  return simulation;
}

std::int64_t steps_to_pack(const ExpertOptions& experts) {
  const PackingOptions when;
  std::int64_t decisions = 1;
  for (int ranks = experts.ranks; ranks % 2 == 0; ranks /= 2) ++decisions;
  return when.first_step + when.every * decisions;
}

ChosenPacking choose_packing(const TrainOptions& options, const Outline& outline,
                             const SimulationOptions& simulation) {
  EmulationOptions emulation = emulation_of(options, simulation.ranks, outline);
  emulation.steps = steps_to_pack(options.sizes.experts) + 1;
  const std::vector<EmulatedSteps> ranks = simulate_ranks(outline, emulation, simulation);
  const std::vector<PackingChange>& changes = ranks.front().packings;
  ChosenPacking out;
  for (const PackingChange& change : changes) {
    out.packing = change.packing;
    if (change.steps == 0) continue;
    out.why += (out.why.empty() ? "" : "; ") + std::string("packing ") + std::to_string(change.packing) +
               " behind step " + std::to_string(change.steps) + ": " + change.why;
  }
  if (out.why.empty()) out.why = "no other would be faster";
  return out;
}

EmulatedRun simulate(const TrainOptions& options, const Outline& outline,
                     const SimulationOptions& simulation) {
  return {.ranks = simulate_ranks(outline, emulation_of(options, simulation.ranks, outline), simulation),
          .wire_bytes = std::nullopt};
}

std::vector<RankSteps> rank_steps(const EmulatedRun& run) {
  std::vector<RankSteps> out;
  out.reserve(run.ranks.size());
  for (const EmulatedSteps& rank : run.ranks) {
    out.push_back({.seconds = rank.step_seconds,
                   .waited_seconds = rank.waited_seconds,
                   .exchange_seconds = rank.exchange_seconds,
                   .payload_bytes = rank.payload_bytes,
                   .table_formula_bytes = rank.table_formula_bytes});
  }
  return out;
}

}  // namespace weft
