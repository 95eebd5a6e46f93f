// The simulated driver: every rank is a coroutine that sleeps in virtual time where emulate.cc sleeps on the
// wall clock, and awaits tickets where that one blocks.
#include <algorithm>
#include <memory>
#include <optional>

#include "experts/policies.h"
#include "transports/decorator.h"
#include "transports/endpoint.h"
#include "transports/sim_workers.h"
#include "weft/error.h"
#include "workload/emulate.h"
#include "workload/step_parts.h"
#include "workload/step_waits.h"
#include "workload/token_cuts.h"
#include "world/sim_ranks.h"

namespace weft {

namespace {

// Counts what a rank's gradients and tables send to other nodes, gradients by step.
class PortCount final : public Decorator {
 public:
  PortCount(Transport& inner, const LinkOptions& link) : Decorator(inner), link_(link) {}

  using Decorator::post;
  void post(SendRecord& send) noexcept override {
    const bool leaves = node_of(link_, send.peer) != node_of(link_, rank());
    const bool of_table = std::ranges::any_of(tables_, [&](const Slots& s) {
      return send.id.group == s.group && send.id.slot - s.first < s.count;
    });
    // (What blocks are tokens on their way to experts and back.)
    if (leaves && (of_table || send.operation.traffic == TrafficClass::blocking)) {
      table_bytes_ += static_cast<double>(send.payload.size());
    } else if (leaves && send.operation.traffic == TrafficClass::gradient) {
      bytes_.resize(std::max<std::size_t>(bytes_.size(), send.id.step + std::size_t{1}));
      bytes_[send.id.step] += link_.byte_scale * static_cast<double>(send.payload.size());
    }
    inner_.post(send);
  }
  // Tables have these slots: what they send, and what blocks, counts apart.
  void count(std::uint64_t group, std::uint32_t first_slot, std::uint32_t num_slots) {
    tables_.push_back({group, first_slot, num_slots});
  }
  double take_table_bytes() { return std::exchange(table_bytes_, 0); }  // since the last call
  // Of so many steps from `first` on. (Operations count from 1: 0 is the comparison of plans.)
  std::vector<double> bytes(std::int64_t first, std::size_t count) const {
    std::vector<double> out(count);
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t step = static_cast<std::size_t>(first) + i + 1;
      if (step < bytes_.size()) out[i] = bytes_[step];
    }
    return out;
  }

 private:
  const LinkOptions link_;
  std::vector<double> bytes_;
  struct Slots {
    std::uint64_t group = 0;
    std::uint32_t first = 0, count = 0;
  };
  std::vector<Slots> tables_;
  double table_bytes_ = 0;
};

// Of each rank.
std::vector<int> stages_of(const EmulationOptions& options, int ranks) {
  std::vector<int> out;
  out.reserve(static_cast<std::size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) out.push_back(stage_of(options, rank).stage);
  return out;
}

// What all ranks of a run share.
struct SimulatedJob {
  SimulatedJob(const Outline& model, const EmulationOptions& emulation, const SimulationOptions& run)
      : outline(of_one_micro_batch(model, emulation)),
        options(emulation),
        costs(run.costs),
        late(run.late),
        byte_scale(run.byte_scale),
        waits(run.waits != nullptr),
        windows(windows_of(model, emulation)),
        starts(stages_of(emulation, run.ranks)),
        first(rank_model(outline, emulation, expert_layout(emulation, 0), 0)) {}

  const Outline outline;
  const EmulationOptions& options;
  const SimulatedCosts& costs;
  const std::function<double(int, std::int64_t, const Piece&)>& late;
  const int byte_scale;
  const bool waits;  // are wanted
  const std::shared_ptr<const GradientWindows> windows;
  Starts starts;
  const RankModel first;  // of rank 0, whose times all ranks of its stage have
};

class SimulatedRank final : public Driver {
 public:
  SimulatedRank(Engine& engine, const SimWorkers& workers, PortCount& port, SimulatedJob& job)
      : engine_(engine),
        workers_(workers),
        port_(port),
        job_(job),
        strategies_(engine, engine.world(), model_of(engine.world().rank()).shape,
                    options_of(job, engine.world().rank())),
        experts_(job.outline, job.options, strategies_),
        passed_(job.outline, job.options, strategies_),
        cuts_(job.outline, job.options),
        values_(strategies_, job.options.optimizer),
        packing_(packing_of(strategies_, job.outline, job.options)) {
    if (!strategies_.all().options().stage.is_whole())
      own_ = std::make_unique<RankModel>(model_of(engine.world().rank()));
    if (job.waits) waits_.emplace(job.starts, engine.world().rank());
    for (const HybridEmbedding* tables : strategies_.hybrids()) {
      const std::uint64_t group = tables->group().group_id();
      port.count(group, tables->options().first_slot, tables->num_slots());
      engine.world().endpoint().add_whole_slots(group, tables->options().first_slot, tables->num_slots());
    }
  }

  // REQUIRES: lives until the task is done.
  static Task<void> run(Comm comm, SimulatedRank* me);
  Strategies& strategies() { return strategies_.all(); }
  EmulatedSteps take() {
    EmulatedSteps out = account_.take(job_.options.warmup, strategies_);
    out.formula_bytes = strategies_.formula_bytes(engine_.world().cost(), engine_.world().micro_op_bytes());
    if (packing_ != nullptr) out.packings = packing_->changes();
    out.scale_out_bytes = port_.bytes(job_.options.warmup, out.payload_bytes.size());
    for (std::size_t i = 0; i < out.scale_out_bytes.size(); ++i)
      out.scale_out_bytes[i] += table_bytes_[i + static_cast<std::size_t>(job_.options.warmup)];
    return out;
  }

  // Of its measured steps. REQUIRES: all ranks' have ended.
  std::vector<StepWaits> take_waits() const {
    std::vector<StepWaits> out = waits_->take();
    out.erase(out.begin(), out.begin() + job_.options.warmup);
    return out;
  }

  Task<void> compute(Piece piece) override {
    const PartTimes& part =
        model().times[static_cast<std::size_t>(piece.block)][static_cast<std::size_t>(piece.part)];
    const ModelShape& shape = strategies_.all().shape();
    const double rows = part.has_rows() ? static_cast<double>(experts_.rows(piece)) : 0;
    const double weight = cuts_.weight(piece.micro_batch);
    const double late = job_.late ? job_.late(comm_.rank(), step_, piece) : 0;
    co_await pass(late);
    if (waits_ && piece.work != Work::update) waits_->gives(comm_.now());
    switch (piece.work) {
      case Work::update:
        co_await pass(
            job_.outline.blocks[static_cast<std::size_t>(shape.origin_of(piece.block))].update_seconds);
        break;
      case Work::forward:
        co_await pass(weight * part.forward_seconds + rows * part.row_forward_seconds);
        if (shape.is_last(piece) && in_last_micro_batch(piece)) batch_known(step_ + 1);
        break;
      case Work::backward:
      case Work::input_gradient:
      case Work::weight_gradient: {
        const double share = PartTimes::share_of(piece.work);
        co_await pass(share * rows * part.row_backward_seconds);
        if (adds_gradients(piece.work) && in_last_micro_batch(piece))
          co_await backward(&part, share * weight);
        else
          co_await pass(share * weight * part.backward_seconds);
        break;
      }
    }
  }
  Dense tensor(const TensorName& name) override {
    return passed_.has(name.name) ? passed_.tensor(name) : experts_.tensor(name);
  }
  Task<void> wait(Ticket ticket) override {
    const Time start = comm_.now();
    co_await ticket;
    current_.waited += seconds(comm_.now() - start);
  }
  void waited(const Move& move, const Ticket& ticket, Time since) override {
    if (!waits_) return;
    const Strategies& all = strategies_.all();
    const Exchange& exchange = all.exchange(move.exchange);
    if (exchange.at_installation) return;
    const Occasion what{exchange.group, exchange.slot, static_cast<std::int64_t>(all.step()) - move.offset,
                        move.micro_batch};
    waits_->waited(all.strategy_of(move.exchange), what, ticket.submitted(), since, comm_.now());
  }

 private:
  static JobOptions options_of(const SimulatedJob& job, int rank) {
    JobOptions out = job_options(job.options, job.outline, rank);
    out.table_memory_rows = kWalkedRows;
    out.byte_scale = job.byte_scale;
    return out;
  }
  // Seconds since the last call in which some exchange was under way.
  double exchanged() {
    const Time now = engine_.world().endpoint().communication().until(engine_.now());
    return seconds(now - std::exchange(communicated_, now));
  }
  Task<void> one_step(std::int64_t step);
  Task<void> settle(int expert_ranks);
  Task<void> pack(std::int64_t steps);
  Task<void> deal_experts(int ranks);
  Task<void> backward(const PartTimes* part, double share);
  Task<void> pass(double of_model, double copied = 0);
  bool in_last_micro_batch(const Piece& piece) const {
    return piece.micro_batch + 1 == job_.options.micro_batches;
  }
  void take_result() {
    if (!strategies_.all().result()) return;
    account_.complete(strategies_, engine_.world().cost());
    table_bytes_.push_back(port_.take_table_bytes());
  }
  void batch_known(std::int64_t step) {
    const GradientWindows::Asked asked = job_.windows->asked(engine_.world().rank(), step);
    const std::int64_t tokens = strategies_.counts_tokens() ? job_.outline.tokens_per_rank : 0;
    strategies_.all().batch_known({.tokens = tokens, .lookups = asked.lookups});
  }
  RankModel model_of(int rank) const {
    return rank_model(job_.outline, job_.options, expert_layout(job_.options, rank), rank);
  }
  const RankModel& model() const { return own_ == nullptr ? job_.first : *own_; }

  // Of a gradient into its bucket.
  double copy_seconds(int tensor) const {
    const JobStrategies::Place& place = strategies_.place(tensor);
    if (place.table != nullptr) return 0;
    const BucketPlan& plan = place.parallel->plan();
    if (plan.bucket(plan.bucket_of(place.local)).pieces.size() == 1) return 0;
    return engine_.world().kernels().copy_byte * sizeof(float) *
           static_cast<double>(plan.parameter(place.local).count);
  }

  Engine& engine_;
  const SimWorkers& workers_;
  PortCount& port_;
  SimulatedJob& job_;
  JobStrategies strategies_;
  DrawnExperts experts_;
  PassedValues passed_;
  const TokenCuts cuts_;
  ExpertValues values_;
  const std::unique_ptr<ExpertPacking> packing_;
  std::unique_ptr<RankModel> own_;  // of its stage, or of the experts that it has now; null: the first rank's
  Comm comm_;                       // of the operation that the rank's training is
  StepAccount account_;
  std::optional<WaitAccount> waits_;
  std::vector<double> table_bytes_;  // of each step that is complete
  StepAccount::Step current_;
  std::int64_t step_ = 0;
  Time began_{};
  Time communicated_{};  // of the engine, when that was
  bool stopped_ = true;
};

// Seconds of the model, and of copies among them. Where the rank computes on the core on which its gradients are worked
// on, it stands still meanwhile.
Task<void> SimulatedRank::pass(double of_model, double copied) {
  const double seconds = of_model + copied;
  if (seconds <= 0) co_return;
  if (waits_) waits_->computed(of_model);
  if (!job_.costs.occupies) {
    co_await comm_.sleep_until(comm_.now() + from_seconds(seconds));
    co_return;
  }
  Time until = std::max(comm_.now(), workers_.taken_until()) + from_seconds(seconds);
  while (comm_.now() < until) {
    const Time taken = workers_.taken();
    co_await comm_.sleep_until(until);
    until = comm_.now() + (workers_.taken() - taken);
  }
}

Task<void> SimulatedRank::backward(const PartTimes* part, double share) {
  for (const ReadyGradient& gradient : part->gradients) {
    const double copy = copy_seconds(gradient.tensor);
    co_await pass(share * gradient.seconds, copy);
    current_.handed_over += copy;
    const int tensor = model().tensors[static_cast<std::size_t>(gradient.tensor)];
    strategies_.all().gradient_ready(
        gradient.tensor, job_.windows->of(comm_.rank(), step_, tensor, strategies_.place(gradient.tensor)));
  }
  co_await pass(share * part->rest_seconds);
}

Task<void> SimulatedRank::one_step(std::int64_t step) {
  if (job_.options.before_step) job_.options.before_step(step);
  if (std::exchange(stopped_, false)) {
    began_ = comm_.now();
    exchanged();
  }
  current_ = {};
  step_ = step;
  if (waits_) waits_->begin_step();
  Strategies& all = strategies_.all();
  all.number_step(step);
  if (!all.under_way()) batch_known(step);
  experts_.begin(step);
  passed_.begin();
  co_await pass(job_.outline.other_seconds);
  co_await run_step(this, &all, &all.next_table(job_.options.micro_batches));
  take_result();
  current_.seconds = seconds(comm_.now() - began_);
  began_ = comm_.now();
  current_.exchanged = exchanged();
  account_.ended(current_, all.times());
}

// And deals experts to so many ranks; 0: they stay.
Task<void> SimulatedRank::settle(int expert_ranks) {
  Strategies& all = strategies_.all();
  if (!all.under_way()) co_return;
  current_ = {};
  co_await run_step(this, &all, &all.tables(job_.options.micro_batches).settle);
  take_result();
  if (expert_ranks > 0) co_await deal_experts(expert_ranks);
  current_.seconds = seconds(comm_.now() - began_);
  current_.exchanged = exchanged();
  account_.settled(current_);
  stopped_ = true;
}

Task<void> SimulatedRank::pack(std::int64_t steps) {
  packing_->step_ended();
  if (!packing_->due(steps)) co_return;
  const Ticket agreed = packing_->agree();
  co_await wait(agreed);
  packing_->decide(steps);
  const int ranks = packing_->wanted().value_or(0);
  if (ranks > 0) co_await settle(ranks);
  packing_->take_line();
}

Task<void> SimulatedRank::deal_experts(int ranks) {
  const Time began = comm_.now();
  const std::unique_ptr<Relayout> move = strategies_.plan_move(ranks);
  const Ticket moved = strategies_.start_move(*move);
  co_await wait(moved);
  const ExpertLayout layout{
      .slices = job_.options.experts.slices, .ranks = ranks, .rank = comm_.rank() % ranks};
  own_ = std::make_unique<RankModel>(rank_model(job_.outline, job_.options, layout, comm_.rank()));
  strategies_.lay_out(own_->shape, ranks);
  strategies_.finish_move(*move);
  packing_->changed(move->most_bytes(), seconds(comm_.now() - began));
}

Task<void> SimulatedRank::run(Comm comm, SimulatedRank* me) {
  me->comm_ = comm;
  const EmulationOptions& options = me->job_.options;
  const std::int64_t steps = options.warmup + options.steps;
  for (std::int64_t step = 0; step < steps; ++step) {
    co_await me->one_step(step);
    const bool last = step + 1 == steps;
    if (me->packing_ != nullptr && !last) co_await me->pack(step + 1);
    const bool settles = last || (options.settles_after && options.settles_after(step));
    if (settles) co_await me->settle(0);
  }
}

// The outline with every tensor shrunk, but for tables whose rows travel; matrices lose rows.
Outline shrunk(Outline outline, const TablesOptions& tables, int scale) {
  if (scale == 1) return outline;
  const std::vector<bool> held = held_tables(shape_of(outline), tables);
  outline.parameters = 0;
  for (std::size_t i = 0; i < outline.tensors.size(); ++i) {
    OutlineTensor& tensor = outline.tensors[i];
    if (held[i]) {
      outline.parameters += tensor.length;
      continue;
    }
    if (tensor.rows > 0) {
      tensor.rows = std::max<std::int64_t>(1, tensor.rows / scale);
      tensor.length = tensor.rows * tensor.columns;
    } else {
      tensor.length = std::max<std::int64_t>(1, tensor.length / scale);
    }
    outline.parameters += tensor.length;
    const auto table = std::ranges::find(outline.tables, tensor.name, &OutlineTable::name);
    if (table == outline.tables.end()) continue;
    table->rows = tensor.rows;
    table->rows_per_step = std::min(table->rows_per_step, static_cast<double>(tensor.rows));
  }
  return outline;
}

EmulationOptions shrunk(EmulationOptions options, int scale) {
  if (scale == 1) return options;
  if (find_scheme(options.parallel.scheme.name).low_rank)
    throw UsageError("a byte scale is for schemes whose bytes follow the number of elements, not for '" +
                     options.parallel.scheme.name + "'");
  if (options.experts.ranks > 1)
    throw UsageError("a byte scale is for gradients, not for tokens that travel to experts");
  BucketOptions& buckets = options.parallel.scheme.buckets;
  buckets.bucket_bytes =
      std::max<std::size_t>(sizeof(float), buckets.bucket_bytes / static_cast<std::size_t>(scale));
  buckets.dense_below /= scale;
  options.windows = nullptr;
  return options;
}

SimRanksOptions sim_options(const SimulationOptions& simulation, const ExpertOptions& experts) {
  if (simulation.byte_scale < 1) throw UsageError("a byte scale is at least 1");
  if (simulation.ranks < 1) throw UsageError("a simulated run has at least one rank");
  if (!(simulation.link.bytes_per_second >= 0) || !(simulation.link.scale_up_bytes_per_second >= 0))
    throw UsageError("a simulated link has a rate of bytes per second, or 0 for none");
  SimRanksOptions out;
  LinkOptions& link = out.sim.link;
  link.ranks = simulation.ranks;
  link.latency_seconds = simulation.link.latency_seconds;
  link.nodes = simulation.link.nodes;
  link.byte_scale = simulation.byte_scale;
  if (simulation.link.bytes_per_second > 0) link.bytes_per_second = simulation.link.bytes_per_second;
  if (simulation.link.scale_up_bytes_per_second > 0)
    link.scale_up_bytes_per_second = simulation.link.scale_up_bytes_per_second;
  out.sim.jitter_seconds = simulation.jitter_seconds;
  out.sim.eager_limit = simulation.eager_limit;
  out.sim.seed = simulation.seed;
  out.config = with_policy(simulation.config, experts);
  out.priority = find_expert_policy(experts.policy).first;
  out.traces = simulation.traces;
  out.kernels = simulation.costs.kernels;
  out.sim.workers = simulation.costs.workers;
  return out;
}

void check(const SimulatedCosts& costs) {
  if (costs.workers < 0) throw UsageError("a simulated job has a number of workers that is not negative");
  for_each_cost(costs.kernels, [](const char* name, double seconds) {
    if (!(seconds >= 0 && seconds < 1))
      throw UsageError(std::string("the cost ") + name + " must be seconds of one byte, element or entry");
  });
}

}  // namespace

std::vector<EmulatedSteps> simulate_ranks(const Outline& whole, const EmulationOptions& given,
                                          const SimulationOptions& simulation) {
  check(whole);
  check(given);
  check(simulation.costs);
  SimRanksOptions sim = sim_options(simulation, given.experts);
  std::vector<PortCount*> ports;  // of each rank, owned by `ranks`
  sim.decorate = [&](Transport& inner) {
    auto port = std::make_unique<PortCount>(inner, sim.sim.link);
    ports.push_back(port.get());
    return port;
  };
  SimRanks ranks(sim);
  const Outline outline = shrunk(with_dense_tables(whole, given.tables), given.tables, simulation.byte_scale);
  EmulationOptions options = shrunk(given, simulation.byte_scale);
  if (!options.packing_link) options.packing_link = simulation.link;
  SimulatedJob job(outline, options, simulation);
  std::vector<std::unique_ptr<SimulatedRank>> all;
  for (int r = 0; r < simulation.ranks; ++r) {
    if (options.planned_link) {
      LinkCost planned = *options.planned_link;
      planned.seconds_per_byte *= simulation.byte_scale;
      planned.scale_up_seconds_per_byte *= simulation.byte_scale;
      planned.fold_seconds_per_byte *= simulation.byte_scale;
      ranks.engine(r).world().endpoint().set_cost(planned);
    }
    all.push_back(std::make_unique<SimulatedRank>(ranks.engine(r), ranks.workers(r),
                                                  *ports[static_cast<std::size_t>(r)], job));
  }
  std::vector<EmulatedSteps> out;
  try {
    std::vector<Strategies*> strategies;
    strategies.reserve(all.size());
    for (const std::unique_ptr<SimulatedRank>& rank : all) strategies.push_back(&rank->strategies());
    const int distinct = verify_together(strategies, options.micro_batches);
    if (simulation.distinct_tables != nullptr) *simulation.distinct_tables = distinct;
    ranks.run({.name = "training steps", .local = true}, [&all](Comm comm, int r) {
      return SimulatedRank::run(comm, all[static_cast<std::size_t>(r)].get());
    });
    for (const std::unique_ptr<SimulatedRank>& rank : all) out.push_back(rank->take());
    if (simulation.waits != nullptr) simulation.waits->clear();
    for (const std::unique_ptr<SimulatedRank>& rank : all) {
      if (simulation.waits != nullptr) simulation.waits->push_back(rank->take_waits());
    }
  } catch (...) {
    // Operations end before the memory that they use does.
    for (int r = 0; r < simulation.ranks; ++r) ranks.engine(r).shut_down(std::current_exception());
    throw;
  }
  return out;
}

}  // namespace weft
