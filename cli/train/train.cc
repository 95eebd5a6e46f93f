// weft train with a model that computes: finds or starts the ranks, gives the run its folder, and trains.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <thread>

#include "data/open.h"
#include "experts/policies.h"
#include "measure/emulated.h"
#include "measure/memory.h"
#include "measure/predicted.h"
#include "measure/run_report.h"
#include "outline/measured.h"
#include "torch_verbs.h"
#include "train/auto_scheme.h"
#include "train/emulated.h"
#include "train/options.h"
#include "train/run_folder.h"
#include "verbs.h"
#include "weft/error.h"
#include "weft/trace.h"
#include "weft/world.h"
#include "weft_torch/train/agree.h"
#include "weft_torch/train/trainer.h"
#include "workload/elements.h"
#include "workload/job_strategies.h"
#include "workload/model_shapes.h"

namespace weft::cli {

namespace {

namespace fs = std::filesystem;

TrainRun run_in(const TrainCommand& command, const std::string& folder) {
  TrainRun run = command.run;
  run.checkpoints = (fs::path(folder) / "checkpoints").string();
  return run;
}

// What was "auto", or "critical", from here on what was chosen.
void settle_choice(TrainCommand& command, const std::string& lines) {
  take_lines(lines, command.options);
  command.config = command.run.config = with_choice(command.config, command.options);
  command.asked = {};
}

// The choice is one rank's.
std::string chosen_lines(const TrainCommand& command, bool launched) {
  TrainOptions options = command.options;
  const Outline outline = measured_outline(options, command.ranks);
  choose(command.asked, options, command.ranks, command.link, outline, launched);
  return lines_of(command.asked, options);
}

ReportOptions report_of(const TrainCommand& command, const std::string& folder, std::string transport) {
  const auto cores = static_cast<int>(std::thread::hardware_concurrency());
  const int busy = command.ranks * command.options.threads;
  return {.folder = folder,
          .config = command.config,
          .transport = std::move(transport),
          .ranks = command.ranks,
          .oversubscribed = cores > 0 && busy > cores};
}

// Before the folder is made: a run that cannot be leaves nothing behind. `ranks_here`: in this memory, all of them or rank 0.
OpenedData checked_data(const TrainCommand& command, int ranks_here) {
  OpenedData opened = open_data(data_options(command.options));
  const Batches enough(opened.source, batch_options(command.options, 0, command.ranks));
  const ModelOptions sizes = model_sizes(command.options, *opened.source);
  const TablesOptions& tables = command.options.tables;
  const int data_ranks = mesh_of(sizes, command.ranks).dp;
  const RankElements elements =
      ranks_here == command.ranks
          ? elements_of_ranks(command.options.model, sizes, tables, command.ranks)
          : elements_of_rank(rank_shape(command.options.model, with_rank(sizes, 0, command.ranks)), tables,
                             data_ranks);
  check_memory({.ranks = ranks_here, .parameters = elements.dense, .held = elements.held},
               available_memory());
  return opened;
}

void on_threads(TrainCommand command) {
  if (command.asked.tables) settle_choice(command, chosen_lines(command, false));
  const OpenedData opened = checked_data(command, command.ranks);
  if (!opened.note.empty()) std::fprintf(stderr, "weft: note: %s\n", opened.note.c_str());
  if (command.asked.any()) settle_choice(command, chosen_lines(command, false));
  const std::string folder = claim_folder(command.place, command.options).string();
  TrainRun run = run_in(command, folder);
  run.source = opened.source;

  std::vector<Trace> traces = make_traces(command.ranks, command.trace);
  RunOptions ranks = run_options(command.link, command.options.sizes.experts);
  ranks.traces = &traces;
  RunReport report(command.options, report_of(command, folder, "threads"));
  TrainSummary summary;
  run_ranks(command.ranks, ranks, [&](World& world) {
    Observer quiet;
    Observer& observer = world.rank() == 0 ? static_cast<Observer&>(report) : quiet;
    const TrainSummary mine = train_rank(world, command.options, run, observer);
    if (world.rank() == 0) summary = mine;
  });
  write_traces(fs::path(folder) / "trace.json", traces);
  predict_run(command.options, command.ranks, command.link, true, summary);
  report.finish(summary);
}

void as_launched(TrainCommand command) {
  std::vector<Trace> traces = make_traces(1, command.trace);
  JoinOptions join;
  join.config = with_policy(Config::from_environment(), command.options.sizes.experts);
  join.priority = find_expert_policy(command.options.sizes.experts.policy).first;
  join.trace = &traces.front();
  std::unique_ptr<RunReport> report;
  TrainSummary summary;
  std::string folder;
  int rank = 0;
  {
    const std::unique_ptr<World> world = join_world(join);
    rank = world->rank();
    try {
      if (command.asked.any())
        settle_choice(command, from_rank_0(*world, [&] { return chosen_lines(command, true); }));
      folder = from_rank_0(*world, [&] {
        checked_data(command, 1);  // (how many ranks share a host is not known)
        return claim_folder(command.place, command.options).string();
      });
      if (rank == 0) {
        report = std::make_unique<RunReport>(command.options,
                                             report_of(command, folder, std::string(world->transport())));
      }
      Observer quiet;
      summary = train_rank(*world, command.options, run_in(command, folder),
                           report != nullptr ? static_cast<Observer&>(*report) : quiet);
      world->barrier();  // nobody leaves while others still work
    } catch (...) {
      world->engine().abandon(std::current_exception());
      throw;
    }
  }
  write_traces(fs::path(folder) / ("trace.rank" + std::to_string(rank) + ".json"), traces, rank);
  if (report == nullptr) return;
  predict_run(command.options, command.ranks, std::nullopt, false, summary);
  report->finish(summary);
}

}  // namespace

int train(const std::vector<std::string>& arguments) {
  keep_freed_memory();
  const Placement place = detect_placement();
  const TrainCommand command = read_train(arguments, place);
  set_torch_threads(command.options.threads);
  if (command.computation.emulated())
    emulate_training(command, measured_outline);
  else if (place.launcher == Placement::Launcher::none)
    on_threads(command);
  else
    as_launched(command);
  return kOk;
}

}  // namespace weft::cli
