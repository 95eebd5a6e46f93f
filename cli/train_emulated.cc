#include "train_emulated.h"

#include <algorithm>
#include <thread>

#include "emulated.h"
#include "sizes.h"
#include "train_report.h"
#include "workload/job_steps.h"

namespace weft::cli {

namespace {

// What TrainReport is told: records of rank 0, and a summary over the ranks as that of a trained run.
StepRecord record_of(const std::vector<EmulatedSteps>& ranks, std::size_t step, const TrainOptions& options,
                     double tokens) {
  const EmulatedSteps& first = ranks.front();
  StepRecord record;
  record.step = static_cast<std::int64_t>(step);
  record.lr = lr_at(options, record.step);
  record.density = density_at(options, record.step);
  record.tokens = static_cast<std::int64_t>(tokens);
  record.seconds = first.step_seconds[step];
  record.waited_seconds = first.waited_seconds[step];
  record.sent_bytes = static_cast<std::uint64_t>(first.wire_bytes[step]);
  return record;
}

TrainSummary summary_of(const std::vector<EmulatedSteps>& ranks, double tokens) {
  TrainSummary summary;
  const std::size_t steps = ranks.front().step_seconds.size();
  std::vector<double> busiest(steps);
  double seconds = 0, waited = 0;
  for (const EmulatedSteps& rank : ranks) {
    for (std::size_t i = 0; i < steps; ++i) {
      busiest[i] = std::max(busiest[i], rank.wire_bytes[i]);
      seconds += rank.step_seconds[i];
      waited += rank.waited_seconds[i];
    }
  }
  summary.steps = static_cast<std::int64_t>(steps);
  summary.seconds = seconds / static_cast<double>(ranks.size());
  summary.tokens_per_second = summary.seconds > 0 ? tokens * static_cast<double>(steps) / summary.seconds : 0;
  summary.step_seconds = job_steps(seconds_of(ranks));
  summary.step_seconds_median = median_of(summary.step_seconds);
  summary.waiting_share = seconds > 0 ? waited / seconds : 0;
  summary.wire_bytes_per_step = median_of(busiest);
  summary.formula_bytes_per_step = static_cast<double>(ranks.front().formula_bytes);
  for (const double bytes : busiest) summary.wire_bytes += static_cast<std::uint64_t>(bytes);
  return summary;
}

}  // namespace

void emulate_training(const TrainCommand& command, const std::filesystem::path& folder) {
  const Outline outline = outline_for(folder, command.computation.outline, command.options, command.ranks);
  TrainOptions options = command.options;
  options.model = outline.model;
  TrainReport report(options, {.folder = folder,
                               .config = command.config,
                               .transport = command.computation.transport,
                               .ranks = command.ranks,
                               .compute = command.computation.compute});
  TrainStart start;
  start.parameters = outline.parameters;
  start.data = "computation by an outline (" + outline.source + "), gradients that were drawn";
  report.started(start);
  std::vector<EmulatedSteps> ranks;
  if (command.computation.simulated()) {
    const SimulatedCosts costs = measured_costs(options, command.ranks, outline);
    ranks = simulate(options, command.ranks, command.link, outline, costs);
  } else {
    ranks =
        emulate_ranks(command.ranks, command.link, outline, emulation_of(options, command.ranks, outline));
  }
  const double tokens = static_cast<double>(outline.tokens_per_rank) * command.ranks;
  for (std::size_t i = 0; i < ranks.front().step_seconds.size(); ++i)
    report.step(record_of(ranks, i, options, tokens));
  report.finish(summary_of(ranks, tokens));
}

}  // namespace weft::cli
