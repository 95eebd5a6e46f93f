// weft compare with models that compute. (weft-torch only.)
#include <memory>

#include "base/statistics.h"
#include "compare/compare.h"
#include "data/open.h"
#include "measure/memory.h"
#include "outline/measured.h"
#include "torch_verbs.h"
#include "weft_torch/train/trainer.h"
#include "workload/train_options.h"

namespace weft::cli {

namespace {

// What one rank tells of its steps; it waits for its turn here.
class Recorder final : public Observer {
 public:
  Recorder(Lane& lane, const Turns& turns) : lane_(lane), turns_(turns) {}
  void started(const TrainStart& start) override { parameters = start.parameters; }
  void before_step(std::int64_t step) override {
    if (step == 0) ready();
    lane_.before_step(step);
  }
  bool settle_behind(std::int64_t step) override { return turns_.ends_behind(step); }
  void step(const StepRecord& record) override {
    add(steps, record);
    losses.push_back(record.loss);
    tokens = static_cast<double>(record.tokens);
  }

  RankSteps steps;
  std::vector<double> losses;
  double tokens = 0;
  std::int64_t parameters = 0;
  std::function<void()> ready = [] {};

 private:
  Lane& lane_;
  const Turns& turns_;
};

Recorded combined(const std::vector<std::unique_ptr<Recorder>>& ranks, const TrainSummary& summary,
                  const Turns& turns) {
  std::vector<RankSteps> steps;
  for (const auto& rank : ranks) steps.push_back(rank->steps);
  const Recorder& first = *ranks.front();
  Recorded out;
  out.steps = job_of(steps, turns.ends);
  out.losses = first.losses;
  out.tokens = first.tokens;
  out.formula_bytes = summary.formula_bytes_per_step - median(out.steps.table_formula_bytes);
  out.parameters = first.parameters;
  if (!summary.packings.empty()) out.packing = summary.packings.back().packing;
  return out;
}

Recorded train_variant(const Training& training, std::shared_ptr<const DataSource> source, Lane& lane) {
  TrainRun run;
  run.source = std::move(source);
  std::vector<std::unique_ptr<Recorder>> recorders;
  for (int r = 0; r < training.ranks; ++r)
    recorders.push_back(std::make_unique<Recorder>(lane, *training.turns));
  Recorder& first = *recorders.front();
  first.ready = [&] { training.known(first.parameters); };
  TrainSummary summary;
  run_ranks(training.ranks, training.run, [&](World& world) {
    try {
      const TrainSummary mine =
          train_rank(world, training.options, run, *recorders[static_cast<std::size_t>(world.rank())]);
      if (world.rank() == 0) summary = mine;
    } catch (...) {
      lane.close();  // whoever waits for the turn must not wait for this rank
      throw;
    }
  });
  return combined(recorders, summary, *training.turns);
}

}  // namespace

int compare(const std::vector<std::string>& arguments) {
  keep_freed_memory();
  const CompareCommand command = read_compare(arguments, detect_placement());
  const TrainOptions& options = command.options.variants.front().options;
  set_torch_threads(options.threads);
  std::shared_ptr<const DataSource> source;
  if (!command.options.computation.emulated()) {
    OpenedData opened = open_data(data_options(options));
    if (!opened.note.empty()) std::fprintf(stderr, "weft: note: %s\n", opened.note.c_str());
    source = std::move(opened.source);
  }
  Models models;
  models.measure_outline = measured_outline;
  models.train = [source](const Training& training, Lane& lane) {
    return train_variant(training, source, lane);
  };
  return run_comparison(command, std::move(models));
}

}  // namespace weft::cli
