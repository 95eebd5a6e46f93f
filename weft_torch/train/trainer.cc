#include "weft_torch/train/trainer.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <limits>
#include <map>
#include <numeric>
#include <utility>

#include "base/statistics.h"
#include "data/open.h"
#include "data/prefetch.h"
#include "embedding/ways.h"
#include "measure/summary.h"
#include "patterns/blocks.h"
#include "state/checkpoint.h"
#include "state/optimizer.h"
#include "state/registry.h"
#include "step/strategies.h"
#include "transports/endpoint.h"
#include "weft/error.h"
#include "weft_torch/models/model.h"
#include "weft_torch/train/agree.h"
#include "weft_torch/train/replica.h"
#include "weft_torch/train/snapshot.h"
#include "workload/expert_packing.h"
#include "workload/job_strategies.h"
#include "workload/model_shapes.h"
#include "workload/outline.h"
#include "workload/table_draws.h"
#include "workload/train_options.h"
#include "world/calibrate.h"

namespace weft {

namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// As the ranks agreed when they connected.
struct Figures {
  LinkCost cost;
  std::size_t micro_op_bytes = 0;
};

// The endpoint belongs to the engine's thread.
Figures figures_of(World& world) {
  Figures out;
  const auto read = [](Comm comm, Figures& into) -> Task<void> {
    into = {comm.cost(), comm.micro_op_bytes()};
    co_return;
  };
  world.run({.name = "link figures", .local = true}, [&](Comm comm) { return read(comm, out); });
  return out;
}

constexpr const char* kExpertRanks = "expert_ranks";  // that the experts of a layer were dealt to
constexpr std::int64_t kFirstSteps = 3;               // of a process: memory is touched for the first time
constexpr std::size_t kMostTimedSteps = 64;           // the last ones

class Trainer {
 public:
  Trainer(World& world, const TrainOptions& options, const TrainRun& run, Observer& observer)
      : world_(world), options_(options), run_(run), observer_(observer) {}

  TrainSummary train() {
    try {
      open();
      world_.barrier();  // steps of all ranks count from here, and bytes: measuring the link took some
      bytes_before_ = world_.traffic().wire_bytes_sent;
      for (std::int64_t step = first_step_; step < options_.steps; ++step) {
        observer_.before_step(step);
        one_step(step);
        const bool last = step + 1 == options_.steps;
        if (packing_ != nullptr && !last) pack(step + 1);
        const bool due = run_.checkpoint_every > 0 && ((step + 1) % run_.checkpoint_every == 0 || last);
        if (due || last || observer_.settle_behind(step)) settle();
        if (due) save(step + 1);
      }
      return summary();
    } catch (...) {
      if (replica_ != nullptr) replica_->abandon(std::current_exception());
      throw;
    }
  }

 private:
  void open();
  void resume(TrainStart& start);
  void load(std::int64_t step);
  void one_step(std::int64_t step);
  std::vector<Batch> micro_batches();
  void settle(std::optional<int> expert_ranks = std::nullopt);
  void watch_packing();
  void pack(std::int64_t steps);
  double exchanged();
  void complete(const StepOutcome& outcome);
  void save(std::int64_t steps_done);
  void keep_times(const StepTimes& times);
  void keep_lookups(const Batch& batch, const StepContext& context);
  std::shared_ptr<const Outline> own_outline();
  TrainSummary summary();

  World& world_;
  const TrainOptions& options_;
  const TrainRun& run_;
  Observer& observer_;

  std::unique_ptr<Model> model_;
  std::unique_ptr<Replica> replica_;
  std::unique_ptr<ExpertPacking> packing_;  // null: it stays as it is, and has no limit
  std::unique_ptr<Prefetch> batches_;
  std::int64_t first_step_ = 0;
  int expert_ranks_ = 0;                   // of the checkpoint, where they were chosen on the way
  std::optional<StepRecord> open_record_;  // its loss is not known yet
  double began_ = 0;                       // the step that runs
  Time communicated_{};                    // of the engine, when that was
  std::int64_t skipped_in_a_row_ = 0;

  TrainSummary summary_;
  std::uint64_t bytes_before_ = 0;  // that this rank sent before its first step
  std::vector<double> seconds_, waited_, exchanged_, bytes_, table_formula_;  // of each step
  double tokens_ = 0;
  Figures figures_;
  std::int64_t walked_ = 0;                  // steps, in this process
  std::deque<StepTimes> times_;              // of the last steady ones; as many on all ranks
  std::map<std::string, TableIds> lookups_;  // of this rank's first step, by table
};

void Trainer::open() {
  check_train(options_, world_.size());
  if (run_.checkpoint_every > 0) TableWays(options_.tables.way).check_saved();
  TrainStart start;
  std::shared_ptr<const DataSource> source = run_.source;
  if (source == nullptr) {
    OpenedData opened = open_data(data_options(options_));
    source = std::move(opened.source);
    if (!opened.note.empty()) start.notes.push_back(opened.note);
  }
  Batches batches(source, batch_options(options_, world_.rank(), world_.size()));
  ModelOptions sizes = model_sizes(options_, *source);
  sizes.tables_elsewhere = TableWays(options_.tables.way).any(TableWay::Kind::hybrid);
  model_ = make_model(options_.model, with_rank(sizes, world_.rank(), world_.size()));
  figures_ = figures_of(world_);
  world_.plan_by(on_nodes_of(options_.planned_link, figures_.cost));
  ReplicaOptions replica = replica_options(options_);
  replica.lookahead = true;
  const Mesh mesh = mesh_of(model_->options(), world_.size());
  const Blocks shares(mesh.dp, options_.global_batch);
  const Blocks cuts(options_.accumulate, shares.count(mesh.coordinates(world_.rank()).dp));
  replica.tokens = cuts.count(0) * sequence_length(options_);
  replica_ = std::make_unique<Replica>(world_.engine(), world_.comm(), *model_, replica);
  resume(start);
  watch_packing();
  batches_ = std::make_unique<Prefetch>(std::move(batches), first_step_);
  start.first_step = first_step_;
  sizes.experts.ranks = 1;  // of the whole model
  start.parameters = model_shape(options_.model, sizes).num_elements();
  start.data = source->description();
  observer_.started(start);
}

void Trainer::resume(TrainStart& start) {
  if (run_.resume == TrainRun::Resume::no || run_.checkpoints.empty()) return;
  const std::string found = from_rank_0(world_, [&]() -> std::string {
    std::vector<std::string> passed_over;
    const std::optional<std::int64_t> step = latest_checkpoint(run_.checkpoints, &passed_over);
    start.notes.insert(start.notes.end(), passed_over.begin(), passed_over.end());
    if (step) return std::to_string(*step);
    if (run_.resume == TrainRun::Resume::if_there && passed_over.empty()) return "";
    throw UsageError("there is no sound checkpoint in '" + run_.checkpoints + "'" +
                     (passed_over.empty() ? "" : ": " + passed_over.front()));
  });
  if (found.empty()) return;
  on_all_ranks(world_, [&] { load(std::stoll(found)); });
}

void Trainer::load(std::int64_t step) {
  const Checkpoint checkpoint(run_.checkpoints, step);
  const std::map<std::string, std::string>& metadata = checkpoint.info().metadata;
  const auto model = metadata.find("model");
  if (model == metadata.end() || model->second != options_.model) {
    throw UsageError(checkpoint.where() + ": the checkpoint is of " +
                     (model == metadata.end() ? "no model that is known" : "model '" + model->second + "'") +
                     ", not '" + options_.model + "'");
  }
  check_model(*model_, checkpoint);
  LoadOptions load{.owners = {std::string(kModelOwner)}, .elsewhere = {}};
  if (!model_->options().stage.is_whole()) {  // what other stages have
    load.elsewhere = [this](const StateKey& key) {
      const std::vector<Parameter>& mine = model_->parameters();
      return std::ranges::find(mine, key.name, &Parameter::name) == mine.end();
    };
  }
  if (!run_.forget_optimizer) load.owners.emplace_back(kOptimizerOwner);
  if (!run_.forget_residuals) {
    const std::vector<std::string> owners = replica_->job().owners();
    load.owners.insert(load.owners.end(), owners.begin(), owners.end());
    load.owners.emplace_back(StateRegistry::kOwner);
    load.kin = JobStrategies::has_residuals;
  }
  replica_->registry().load(checkpoint, load);
  const std::string left_out = replica_->job().left_out(checkpoint);
  if (world_.rank() == 0 && !run_.forget_residuals && !left_out.empty()) world_.engine().log_line(left_out);
  first_step_ = checkpoint.info().step;
  // Packing that was chosen on the way is that of the checkpoint.
  const auto dealt = metadata.find(kExpertRanks);
  if (dealt == metadata.end() || !is_auto_packing(options_.sizes.experts.packing)) return;
  expert_ranks_ = std::atoi(dealt->second.c_str());
}

void Trainer::watch_packing() {
  const ExpertOptions& experts = options_.sizes.experts;
  if (replica_->job().experts() == nullptr || (experts.packing == "1" && experts.packing_memory == 0)) return;
  // (Packing doubles and halves: another one is not gone on with on other ranks.)
  const bool fits = expert_ranks_ >= 1 && experts.ranks % expert_ranks_ == 0 &&
                    std::has_single_bit(static_cast<unsigned>(experts.ranks / expert_ranks_));
  if (fits) replica_->lay_out_experts(expert_ranks_);
  const std::int64_t batches = std::int64_t{options_.accumulate} * replica_->job().mesh().dp;
  const PackingSetting setting{
      .micro_batches = options_.accumulate,
      .tokens = (options_.global_batch + batches - 1) / batches * sequence_length(options_),
      .moments = static_cast<int>(moments_of(optimizer_options(options_)).size()),
      .network = packing_network(figures_.cost, std::nullopt, world_.size())};
  packing_ = std::make_unique<ExpertPacking>(replica_->job(), experts, setting);
}

// Behind so many steps: what they took decides about the next ones.
void Trainer::pack(std::int64_t steps) {
  packing_->step_ended();
  if (!packing_->due(steps)) return;
  packing_->agree().wait();
  packing_->decide(steps);
  if (const std::optional<int> ranks = packing_->wanted()) settle(ranks);
  if (const std::optional<PackingChange> line = packing_->take_line()) observer_.packing(*line);
}

std::vector<Batch> Trainer::micro_batches() {
  return micro_batches_of(to_batch(batches_->current()), options_.accumulate);
}

void Trainer::one_step(std::int64_t step) {
  if (!open_record_) {  // else it began when the last one ended
    began_ = now();
    exchanged();
  }
  replica_->set_density(density_at(options_, step));
  replica_->set_lr(lr_at(options_, step));
  const StepContext context{.seed = options_.seed, .step = step};
  const std::vector<Batch> batches = micro_batches();
  const bool last = step + 1 == options_.steps;
  const Batch next = last ? Batch{} : to_batch(batches_->next());
  if (step == first_step_) keep_lookups(to_batch(batches_->current()), context);
  const StepOutcome outcome = replica_->step(batches, context, last ? nullptr : &next);
  keep_times(replica_->strategies().times());
  if (open_record_) complete(outcome);
  StepRecord record;
  record.step = step;
  record.epoch = batches_->current().epoch;
  record.lr = lr_at(options_, step);
  record.density = density_at(options_, step);
  record.tokens = outcome.tokens;
  record.waited_seconds = outcome.waited_seconds;
  if (const RouterSums* const router = replica_->job().router(); router != nullptr) {
    for (int layer = 0; layer < static_cast<int>(model_->shape().experts.size()); ++layer)
      record.expert_load.push_back(router->load(layer));
  }
  if (packing_ != nullptr) record.packing = packing_->packing();
  record.exchange_seconds = exchanged();
  const double ended = now();
  record.seconds = ended - began_;
  began_ = ended;
  open_record_ = record;
  batches_->advance();
}

// Seconds since the last call in which some exchange was under way.
double Trainer::exchanged() {
  const Time now = world_.comm().endpoint().communication().until(world_.engine().now());
  return seconds(now - std::exchange(communicated_, now));
}

// The open record's step is over.
void Trainer::complete(const StepOutcome& outcome) {
  StepRecord record = *std::exchange(open_record_, std::nullopt);
  record.loss = outcome.last_loss.value_or(0);
  record.payload_bytes = outcome.sent_bytes;
  record.table_formula_bytes =
      static_cast<std::uint64_t>(replica_->job().table_formula_bytes(options_.planned_link));
  record.gradient_norm = outcome.gradient_norm;
  record.skipped = outcome.skipped;
  if (summary_.steps++ == 0) summary_.first_step = record.step;
  skipped_in_a_row_ = record.skipped.empty() ? 0 : skipped_in_a_row_ + 1;
  if (record.skipped.empty()) {
    if (summary_.steps - summary_.skipped == 1) summary_.first_loss = record.loss;
    summary_.last_loss = record.loss;
  } else {
    ++summary_.skipped;
  }
  seconds_.push_back(record.seconds);
  bytes_.push_back(static_cast<double>(record.payload_bytes));
  waited_.push_back(record.waited_seconds);
  exchanged_.push_back(record.exchange_seconds);
  table_formula_.push_back(static_cast<double>(record.table_formula_bytes));
  tokens_ += static_cast<double>(record.tokens);
  observer_.step(record);
  if (skipped_in_a_row_ == kMostSkipped) {
    throw Error(std::to_string(kMostSkipped) + " steps in a row were skipped, at last: " + record.skipped);
  }
}

// And deals experts to so many ranks: that time is the last step's as well.
void Trainer::settle(std::optional<int> expert_ranks) {
  const StepOutcome outcome = replica_->settle();
  if (expert_ranks) {
    const double began = now();
    const Replica::Moved moved = replica_->lay_out_experts(*expert_ranks);
    packing_->changed(moved.most_bytes, now() - began);
    times_.clear();  // of blocks with fewer experts, or more
  }
  if (!open_record_) return;
  open_record_->settle_seconds = now() - began_;
  open_record_->seconds += open_record_->settle_seconds;
  open_record_->settle_waited_seconds = outcome.waited_seconds;
  open_record_->waited_seconds += outcome.waited_seconds;
  open_record_->settle_exchange_seconds = exchanged();
  open_record_->exchange_seconds += open_record_->settle_exchange_seconds;
  complete(outcome);
}

void Trainer::save(std::int64_t steps_done) {
  const auto& dir = run_.checkpoints;
  const CheckpointInfo info{.step = steps_done,
                            .seed = options_.seed,
                            .metadata = {{"model", options_.model},
                                         {"scheme", options_.scheme.name},
                                         {"ranks", std::to_string(world_.size())},
                                         {kExpertRanks, std::to_string(replica_->job().expert_ranks())},
                                         {"config", run_.config}},
                            .extra = {}};
  from_rank_0(world_, [&] {
    begin_checkpoint(dir, steps_done);
    return std::string();
  });
  on_all_ranks(world_, [&] { write_shards(dir, info, replica_->registry(), world_.rank(), world_.size()); });
  from_rank_0(world_, [&] {
    commit_checkpoint(dir, info, world_.size());
    keep_last(dir, run_.keep_last);
    return std::string();
  });
  summary_.checkpoint_step = steps_done;
  observer_.checkpoint(steps_done);
}

void Trainer::keep_times(const StepTimes& times) {
  if (walked_++ < kFirstSteps || !times.steady) return;
  if (times_.size() == kMostTimedSteps) times_.pop_front();
  times_.push_back(times);
}

// What a step looks up in tables, for the outline.
void Trainer::keep_lookups(const Batch& batch, const StepContext& context) {
  if (!model_->options().tables_elsewhere || sequences(batch) == 0) return;
  for (TableIds& lookup : model_->lookups(batch, context)) {
    lookup.ids = lookup.ids.contiguous();
    lookups_[model_->parameters()[static_cast<std::size_t>(lookup.parameter)].name] = lookup;
  }
}

// What the blocks of this run took, on the mean of the ranks.
std::shared_ptr<const Outline> Trainer::own_outline() {
  if (times_.empty() || replica_->job().mesh().dp != world_.size()) return nullptr;
  std::vector<double> mean = numbers_of(median_of(std::vector(times_.begin(), times_.end())));
  world_.all_reduce(Dense(std::span(mean)));
  for (double& value : mean) value /= world_.size();
  const std::int64_t tokens = options_.global_batch * sequence_length(options_) / world_.size();
  Outline out = outline_of(replica_->strategies().shape(), std::max<std::int64_t>(1, tokens));
  out.side_by_side = world_.size();
  for (const auto& [name, lookup] : lookups_) {
    const auto table = std::ranges::find(out.tables, name, &OutlineTable::name);
    if (table != out.tables.end())
      describe_lookups(*table,
                       {lookup.ids.data_ptr<std::int64_t>(), static_cast<std::size_t>(lookup.ids.numel())},
                       lookup.shared);
  }
  set_seconds(out, with_numbers(times_.front(), mean));
  return std::make_shared<const Outline>(std::move(out));
}

TrainSummary Trainer::summary() {
  const std::uint64_t wire_bytes = world_.traffic().wire_bytes_sent - bytes_before_;
  std::vector<double> largest = bytes_;
  largest.push_back(static_cast<double>(wire_bytes));
  world_.all_reduce(Dense(std::span(largest)), {.reduction = Reduction::max});
  summary_.wire_bytes = static_cast<std::uint64_t>(largest.back());
  largest.pop_back();
  std::vector<double> table_formula = table_formula_;
  if (!table_formula.empty())
    world_.all_reduce(Dense(std::span(table_formula)), {.reduction = Reduction::max});
  const auto mean = [&](std::vector<double> values) {
    if (!values.empty()) world_.all_reduce(Dense(std::span(values)));
    for (double& value : values) value /= world_.size();
    return values;
  };
  std::vector<double> ends(seconds_.size());
  std::partial_sum(seconds_.begin(), seconds_.end(), ends.begin());
  if (!ends.empty()) world_.all_reduce(Dense(std::span(ends)), {.reduction = Reduction::max});
  std::adjacent_difference(ends.begin(), ends.end(), ends.begin());
  JobSteps job;
  job.settled_seconds = std::move(ends);
  job.rank_seconds = mean(seconds_);
  job.rank_waited_seconds = mean(waited_);
  job.rank_exchange_seconds = mean(exchanged_);
  job.payload_bytes = std::move(largest);
  summarize(job, tokens_, summary_);
  summary_.outline = own_outline();
  summary_.link = figures_.cost;
  if (packing_ != nullptr) summary_.packings = packing_->changes();
  if (summary_.steps > 0) {
    const JobStrategies& strategies = replica_->job();
    const std::int64_t last_tables = strategies.table_formula_bytes(options_.planned_link);
    std::vector<double> gradients{static_cast<double>(
        strategies.formula_bytes(options_.planned_link, figures_.micro_op_bytes) - last_tables)};
    // (Stages send different amounts.)
    world_.all_reduce(Dense(std::span(gradients)), {.reduction = Reduction::max});
    summary_.formula_bytes_per_step = gradients.front() + median(table_formula);
    summary_.notes = strategies.notes();
  } else {
    summary_.first_step = first_step_;
  }
  return summary_;
}

}  // namespace

void set_torch_threads(int threads) { at::set_num_threads(threads); }

TrainSummary train_rank(World& world, const TrainOptions& options, const TrainRun& run, Observer& observer) {
  set_torch_threads(options.threads);
  Trainer trainer(world, options, run, observer);
  return trainer.train();
}

}  // namespace weft
