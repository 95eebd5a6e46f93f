#include "train/emulated.h"

#include <cstdio>

#include "base/statistics.h"
#include "measure/memory.h"
#include "measure/predicted.h"
#include "measure/run_report.h"
#include "measure/summary.h"
#include "torch_verbs.h"
#include "train/auto_scheme.h"
#include "train/run_folder.h"
#include "verbs.h"

namespace weft::cli {

namespace {

// What the report is told of rank 0.
StepRecord record_of(const RankSteps& rank, std::size_t step, const TrainOptions& options, double tokens) {
  StepRecord record;
  record.step = static_cast<std::int64_t>(step);
  record.lr = lr_at(options, record.step);
  record.density = density_at(options, record.step);
  record.tokens = static_cast<std::int64_t>(tokens);
  record.seconds = rank.seconds[step];
  record.waited_seconds = rank.waited_seconds[step];
  record.exchange_seconds = rank.exchange_seconds[step];
  record.payload_bytes = static_cast<std::uint64_t>(rank.payload_bytes[step]);
  record.table_formula_bytes = static_cast<std::uint64_t>(rank.table_formula_bytes[step]);
  return record;
}

EmulatedRun run(const TrainCommand& command, const TrainOptions& options, const Outline& outline,
                const SimulationOptions& simulation, std::vector<Trace>& traces) {
  if (command.computation.simulated()) return simulate(options, outline, simulation);
  return emulate_ranks(
      command.ranks, command.link, outline, emulation_of(options, command.ranks, outline), [] {}, &traces);
}

}  // namespace

void emulate_training(const TrainCommand& command, const MeasureOutline& measure) {
  if (!command.asked.tables)
    check_named_outline(command.computation, command.named_model, command.options, command.ranks);
  const std::filesystem::path folder = claim_folder(command.place, command.options);
  const Outline outline =
      outline_for(folder, command.computation.outline, command.options, command.ranks, measure);
  TrainOptions options = command.options;
  options.model = outline.model;
  std::string config = command.config;
  if (command.asked.any()) {
    choose(command.asked, options, command.ranks, command.link, outline);
    config = with_choice(config, options);
  }
  RunReport report(options, {.folder = folder,
                             .config = config,
                             .transport = command.computation.transport,
                             .ranks = command.ranks,
                             .compute = command.computation.compute});
  TrainStart start;
  start.parameters = outline.parameters;
  start.data = "computation by an outline (" + outline.source + "), gradients that were drawn";
  report.started(start);
  std::vector<Trace> traces = make_traces(command.ranks, command.trace);
  SimulationOptions simulation =
      simulation_of(command.ranks, command.link, measured_costs(options, command.ranks, outline));
  simulation.byte_scale = command.computation.byte_scale;
  simulation.traces = &traces;
  const EmulatedRun done = run(command, options, outline, simulation, traces);
  write_traces(folder / "trace.json", traces);
  const std::vector<RankSteps> ranks = rank_steps(done);
  const Mesh mesh = mesh_of(options.sizes, command.ranks);
  const double tokens = static_cast<double>(outline.tokens_per_rank) * mesh.dp;
  const std::size_t steps = ranks.front().seconds.size();
  TrainSummary summary;
  summary.packings = done.ranks.front().packings;
  for (std::size_t i = 0; i < steps; ++i) {
    StepRecord record = record_of(ranks.front(), i, options, tokens);
    for (const PackingChange& change : summary.packings) {
      if (change.steps <= record.step) record.packing = change.packing;
      if (change.steps == record.step && record.step > 0) report.packing(change);
    }
    report.step(record);
  }
  summary.steps = static_cast<std::int64_t>(steps);
  const JobSteps job = job_of(ranks);
  summarize(job, tokens * static_cast<double>(steps), summary);
  const EmulatedSteps& first = done.ranks.front();
  const auto gradients_of = [](const EmulatedSteps& rank) {
    return static_cast<double>(rank.formula_bytes) - rank.table_formula_bytes.back();
  };
  double busiest = gradients_of(first);
  for (const EmulatedSteps& rank : done.ranks) {
    if (mesh.pp > 1) busiest = std::max(busiest, gradients_of(rank));
  }
  summary.formula_bytes_per_step = busiest + median(job.table_formula_bytes);
  summary.notes = first.notes;
  summary.wire_bytes = done.wire_bytes;
  if (command.computation.simulated())
    summary.not_predicted = "the run is simulated itself";
  else
    add_prediction(outline, emulation_of(options, command.ranks, outline), simulation, summary);
  report.finish(summary);
}

std::optional<int> train_without_torch(const std::vector<std::string>& arguments) {
  const TrainCommand command = read_train(arguments, detect_placement());
  const Computation& computation = command.computation;
  if (!computation.emulated() || !has_outline(command.place.folder, computation.outline)) return std::nullopt;
  keep_freed_memory();
  emulate_training(command, {});
  return kOk;
}

}  // namespace weft::cli
