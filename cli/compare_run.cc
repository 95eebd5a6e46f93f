#include "compare_run.h"

#include <algorithm>
#include <exception>
#include <mutex>
#include <thread>

#include "emulated.h"
#include "weft/error.h"
#include "weft_torch/train/trainer.h"
#include "workload/job_steps.h"

namespace weft::cli {

namespace {

class Errors {
 public:
  void set(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    if (!first_) first_ = std::move(error);
  }
  void rethrow() {
    const std::lock_guard lock(mutex_);
    if (first_) std::rethrow_exception(first_);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr first_;
};

// One scheme's world, on a thread of its own.
struct Runner {
  Runner(int ranks, const std::string& name, const Work& work, Errors& errors)
      : lane(ranks), scheme(name), thread([this, &work, &errors] {
          try {
            recorded = work(scheme, lane);
          } catch (...) {
            errors.set(std::current_exception());
          }
          lane.close();
        }) {}
  ~Runner() {
    lane.close();
    if (thread.joinable()) thread.join();
  }
  Runner(const Runner&) = delete;
  Runner& operator=(const Runner&) = delete;

  Lane lane;
  const std::string scheme;
  Recorded recorded;
  std::thread thread;  // last: it uses the others
};

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
  void step(const StepRecord& record) override { records.push_back(record); }

  std::vector<StepRecord> records;
  std::int64_t parameters = 0;
  std::function<void()> ready = [] {};

 private:
  Lane& lane_;
  const Turns& turns_;
};

Recorded combined(const std::vector<std::unique_ptr<Recorder>>& ranks, const TrainSummary& summary,
                  const Turns& turns) {
  Recorded out;
  const std::size_t steps = ranks.front()->records.size();
  std::vector<std::vector<double>> seconds, all;
  for (const auto& rank : ranks) {
    seconds.emplace_back();
    all.emplace_back();
    for (const StepRecord& record : rank->records) {
      seconds.back().push_back(record.seconds - record.settle_seconds);
      all.back().push_back(record.seconds);
    }
  }
  out.seconds = job_steps(seconds, turns.ends);
  out.all_seconds = job_steps(all, turns.ends);
  for (std::size_t i = 0; i < steps; ++i) {
    double waited = 0, bytes = 0;
    for (const auto& rank : ranks) {
      const StepRecord& record = rank->records[i];
      waited += (record.waited_seconds - record.settle_waited_seconds) / static_cast<double>(ranks.size());
      bytes = std::max(bytes, static_cast<double>(record.sent_bytes));
    }
    out.waited_seconds.push_back(waited);
    out.wire_bytes.push_back(bytes);
    out.losses.push_back(ranks.front()->records[i].loss);
  }
  out.tokens = static_cast<double>(ranks.front()->records.back().tokens);
  out.formula_bytes = summary.formula_bytes_per_step;
  out.parameters = ranks.front()->parameters;
  return out;
}

}  // namespace

void take_turns(const std::vector<std::string>& schemes, int ranks, const Turns& turns, const Work& work,
                const Listener& listener) {
  Errors errors;
  std::vector<std::unique_ptr<Runner>> runners;
  for (const std::string& scheme : schemes) {  // one after another: making a model is work, too
    runners.push_back(std::make_unique<Runner>(ranks, scheme, work, errors));
    runners.back()->lane.run_until(0);
    errors.rethrow();
    if (runners.size() == 1) listener.first_opened();
  }
  for (std::size_t r = 0; r < turns.ends.size(); ++r) {
    for (std::size_t i = 0; i < runners.size(); ++i) {
      Runner& runner = *runners[(i + r) % runners.size()];
      listener.turn({.number = r, .rounds = turns.ends.size(), .scheme = runner.scheme});
      runner.lane.run_until(turns.ends[r]);
      const bool last = r + 1 == turns.ends.size();
      if (last) runner.thread.join();
      errors.rethrow();
      if (last) listener.done(runner.scheme, runner.recorded);
    }
  }
}

TrainOptions options_of(const CompareCommand& command, const std::string& scheme, const Turns& turns) {
  TrainOptions options = command.options;
  const Variant variant = variant_of(scheme);
  options.scheme.name = variant.scheme;
  if (variant.bucket_mib)
    find_scheme_knob("bucket-mib").set(options.scheme, std::to_string(*variant.bucket_mib));
  options.steps = turns.steps();
  return options;
}

Work train_work(const CompareCommand& command, const NamedLink& link, const Turns& turns,
                std::shared_ptr<const DataSource> source, std::int64_t& parameters) {
  return [&, source = std::move(source)](const std::string& scheme, Lane& lane) {
    const TrainOptions options = options_of(command, scheme, turns);
    TrainRun run;
    run.source = source;
    std::vector<std::unique_ptr<Recorder>> recorders;
    recorders.reserve(static_cast<std::size_t>(command.ranks));
    for (int r = 0; r < command.ranks; ++r) recorders.push_back(std::make_unique<Recorder>(lane, turns));
    Recorder& first = *recorders.front();
    first.ready = [&parameters, &first] { parameters = first.parameters; };
    TrainSummary summary;
    run_ranks(command.ranks, run_options(link.spec), [&](World& world) {
      try {
        const TrainSummary mine =
            train_rank(world, options, run, *recorders[static_cast<std::size_t>(world.rank())]);
        if (world.rank() == 0) summary = mine;
      } catch (...) {
        lane.close();  // whoever waits for the turn must not wait for this rank
        throw;
      }
    });
    return combined(recorders, summary, turns);
  };
}

}  // namespace weft::cli
