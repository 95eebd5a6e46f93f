#include "emulated.h"

#include <cstdio>
#include <thread>

#include "memory.h"
#include "outline_file.h"
#include "text.h"
#include "train_flags.h"
#include "weft/error.h"
#include "weft_torch/outline/measure.h"
#include "workload/measure_kernels.h"

namespace weft::cli {

namespace fs = std::filesystem;

namespace {


}  // namespace

Outline outline_for(const fs::path& folder, const std::string& file, const TrainOptions& options, int ranks) {
  const fs::path kept = folder / "outline.json";
  std::error_code error;
  const bool there = fs::exists(kept, error);
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
  OutlineOptions measuring;
  measuring.train = options;
  measuring.sequences = (options.global_batch + ranks - 1) / ranks;
  Outline outline = measure_outline(measuring);
  write_outline(kept, outline);
  std::fprintf(
      stderr,
      "weft: note: the outline of %s was measured with one rank alone: %s of computation a step (%s)\n",
      outline.model.c_str(), seconds_text(compute_seconds(outline)).c_str(), kept.c_str());
  return outline;
}

void check_named_outline(const std::string& file, const std::vector<std::string>& arguments,
                         const std::string& model, int ranks) {
  if (file.empty()) return;
  const Outline outline = read_outline(file);
  if (names_flag(arguments, "--model") && outline.model != model)
    throw UsageError("--model " + model + ", but the outline is of " + outline.model + ": leave one out");
  check_memory(1, ranks, outline.parameters, kCopiesOfEmulation, available_memory());
}

bool occupies_cores(const Outline& outline, int ranks) {
  const auto cores = static_cast<int>(std::thread::hardware_concurrency());
  return ranks > 1 && outline.side_by_side == ranks && ranks <= cores;
}

EmulationOptions emulation_of(const TrainOptions& options, int ranks, const Outline& outline) {
  EmulationOptions out;
  out.occupies = occupies_cores(outline, ranks);
  out.parallel = data_parallel_options(options);
  out.warmup = 0;
  out.steps = options.steps;
  out.seed = options.seed;
  out.clip = !why_updates_wait(options).empty();
  out.planned_link = options.planned_link;
  return out;
}

RunOptions run_options(const std::optional<LinkSpec>& link) {
  RunOptions options;
  options.config = Config::from_environment();
  if (link) {
    options.link =
        EmulatedLink{.bytes_per_second = link->bytes_per_second, .latency_seconds = link->latency_seconds};
  }
  return options;
}

std::vector<EmulatedSteps> emulate_ranks(int ranks, const std::optional<LinkSpec>& link,
                                         const Outline& outline, const EmulationOptions& options,
                                         const std::function<void()>& failed) {
  std::vector<EmulatedSteps> out(static_cast<std::size_t>(ranks));
  run_ranks(ranks, run_options(link), [&](World& world) {
    try {
      out[static_cast<std::size_t>(world.rank())] = emulate_rank(world, outline, options);
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
  // Ranks that emulated runs would have as threads of this machine share its cores, as there.
  out.workers = pool_workers(Config::from_environment(), ranks);
  out.occupies = emulation_of(options, ranks, outline).occupies;
  return out;
}

std::vector<EmulatedSteps> simulate(const TrainOptions& options, int ranks,
                                    const std::optional<LinkSpec>& link, const Outline& outline,
                                    const SimulatedCosts& costs) {
  SimulationOptions simulation;
  simulation.ranks = ranks;
  simulation.config = Config::from_environment();
  simulation.costs = costs;
  if (link) {
    simulation.link.bytes_per_second = link->bytes_per_second;
    simulation.link.latency_seconds = link->latency_seconds;
  }
  return simulate_ranks(outline, emulation_of(options, ranks, outline), simulation);
}

}  // namespace weft::cli
