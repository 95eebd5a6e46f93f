// weft train with a model that computes: finds or starts the ranks, gives the run its folder, and trains.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <thread>

#include "measure/files.h"
#include "measure/memory.h"
#include "measure/run_report.h"
#include "outline/measured.h"
#include "torch_verbs.h"
#include "train/emulated.h"
#include "train/options.h"
#include "train/run_folder.h"
#include "verbs.h"
#include "weft/error.h"
#include "weft/trace.h"
#include "weft/world.h"
#include "weft_torch/train/agree.h"
#include "weft_torch/train/trainer.h"

namespace weft::cli {

namespace {

namespace fs = std::filesystem;

TrainRun run_in(const TrainCommand& command, const std::string& folder) {
  TrainRun run = command.run;
  run.checkpoints = (fs::path(folder) / "checkpoints").string();
  return run;
}

// Of a run that was not asked for all of it: its first steps.
constexpr std::size_t kFirstEvents = 4000;

Trace make_trace(const TrainCommand& command) { return command.trace ? Trace() : Trace(kFirstEvents); }

std::string trace_text(std::span<const Trace> traces, int first = 0) {
  std::vector<const Trace*> of_rank;
  for (const Trace& trace : traces) of_rank.push_back(&trace);
  return chrome_trace(of_rank, first);
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

void on_threads(const TrainCommand& command) {
  // Before the folder is made: what cannot be read leaves nothing behind.
  const OpenedData opened = open_data(data_options(command.options));
  if (!opened.note.empty()) std::fprintf(stderr, "weft: note: %s\n", opened.note.c_str());
  const std::string folder = claim_folder(command.place, command.options).string();
  TrainRun run = run_in(command, folder);
  run.source = opened.source;

  std::vector<Trace> traces(static_cast<std::size_t>(command.ranks), make_trace(command));
  RunOptions ranks;
  ranks.config = Config::from_environment();
  ranks.traces = &traces;
  ranks.link = command.link;
  RunReport report(command.options, report_of(command, folder, "threads"));
  TrainSummary summary;
  run_ranks(command.ranks, ranks, [&](World& world) {
    Observer quiet;
    Observer& observer = world.rank() == 0 ? static_cast<Observer&>(report) : quiet;
    const TrainSummary mine = train_rank(world, command.options, run, observer);
    if (world.rank() == 0) summary = mine;
  });
  write_file(fs::path(folder) / "trace.json", trace_text(traces));
  report.finish(summary);
}

void as_launched(const TrainCommand& command) {
  Trace trace = make_trace(command);
  JoinOptions join;
  join.config = Config::from_environment();
  join.trace = &trace;
  std::unique_ptr<RunReport> report;
  TrainSummary summary;
  std::string folder;
  int rank = 0;
  {
    const std::unique_ptr<World> world = join_world(join);
    rank = world->rank();
    try {
      folder = from_rank_0(*world, [&] { return claim_folder(command.place, command.options).string(); });
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
  write_file(fs::path(folder) / ("trace.rank" + std::to_string(rank) + ".json"),
             trace_text({&trace, 1}, rank));
  if (report != nullptr) report->finish(summary);
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
