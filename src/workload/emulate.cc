#include "workload/emulate.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <thread>
#include <utility>

#include "base/thread_time.h"
#include "experts/policies.h"
#include "transports/endpoint.h"
#include "workload/step_parts.h"
#include "workload/token_cuts.h"

namespace weft {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_between(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

struct Figures {
  LinkCost cost;
  std::size_t micro_op_bytes = 0;
};

// The endpoint belongs to the engine's thread.
Figures agree_on_figures(World& world, const std::optional<LinkCost>& planned) {
  if (planned) world.plan_by(*planned);
  Figures out;
  const auto read = [](Comm comm, Figures& figures) -> Task<void> {
    figures = {comm.cost(), comm.micro_op_bytes()};
    co_return;
  };
  world.run({.name = "link figures", .local = true}, [&](Comm comm) { return read(comm, out); });
  return out;
}

// A rank whose computation is a clock: `computed_until_` is where an accelerator would be. The thread sleeps
// until then; if it wakes up late, the next timer is shorter by that. What the thread itself does (copies)
// and what it waits for moves the clock on. With `occupies` the thread computes instead of sleeping, and the
// clock stands where it is when it has had its processor time.
class EmulatedRank final : public Driver {
 public:
  EmulatedRank(World& world, const Outline& outline, const EmulationOptions& options)
      : world_(world),
        outline_(of_one_micro_batch(with_dense_tables(outline, options.tables), options)),
        options_(options),
        figures_(agree_on_figures(world, options.planned_link)),
        windows_(windows_of(outline, options)),
        model_(rank_model(outline_, options, expert_layout(options, world.rank()), world.rank())),
        job_(world.engine(), world.comm(), model_.shape, job_options(options, outline, world.rank())),
        experts_(outline, options, job_),
        passed_(outline, options, job_),
        cuts_(outline, options),
        values_(job_, options.optimizer),
        packing_(packing_of(job_, outline_, options)),
        walker_(*this, job_.all()) {}

  EmulatedSteps run() {
    try {
      const std::int64_t steps = options_.warmup + options_.steps;
      world_.barrier();
      for (std::int64_t step = 0; step < steps; ++step) {
        one_step(step);
        const bool last = step + 1 == steps;
        if (packing_ != nullptr && !last) pack(step + 1);
        if (last || (options_.settles_after && options_.settles_after(step))) settle();
      }
    } catch (...) {
      abandon(job_.all(), std::current_exception());
      throw;
    }
    EmulatedSteps out = account_.take(options_.warmup, job_);
    out.formula_bytes = job_.formula_bytes(figures_.cost, figures_.micro_op_bytes);
    if (packing_ != nullptr) out.packings = packing_->changes();
    return out;
  }

  Task<void> compute(Piece piece) override {
    const PartTimes& part =
        model_.times[static_cast<std::size_t>(piece.block)][static_cast<std::size_t>(piece.part)];
    const double rows = part.has_rows() ? static_cast<double>(experts_.rows(piece)) : 0;
    const double weight = cuts_.weight(piece.micro_batch);
    switch (piece.work) {
      case Work::update:
        pass(outline_.blocks[static_cast<std::size_t>(model_.shape.origin_of(piece.block))].update_seconds);
        break;
      case Work::forward:
        pass(weight * part.forward_seconds + rows * part.row_forward_seconds);
        if (model_.shape.is_last(piece) && in_last_micro_batch(piece)) batch_known(step_ + 1);
        break;
      case Work::backward:
      case Work::input_gradient:
      case Work::weight_gradient: {
        const double share = PartTimes::share_of(piece.work);
        pass(share * rows * part.row_backward_seconds);
        if (adds_gradients(piece.work) && in_last_micro_batch(piece))
          backward(part, share * weight);
        else
          pass(share * weight * part.backward_seconds);
        break;
      }
    }
    co_return;
  }
  Dense tensor(const TensorName& name) override {
    return passed_.has(name.name) ? passed_.tensor(name) : experts_.tensor(name);
  }
  Task<void> wait(Ticket ticket) override {
    wait_for(ticket);
    co_return;
  }

 private:
  void wait_for(const Ticket& ticket) {
    const bool late = !ticket.done();  // else the clock need not move
    const Clock::time_point start = Clock::now();
    ticket.wait();
    const Clock::time_point end = Clock::now();
    current_.waited += seconds_between(start, end);
    if (late) computed_until_ = std::max(computed_until_, end);
  }
  void one_step(std::int64_t step);
  void settle(std::optional<int> expert_ranks = std::nullopt);
  void pack(std::int64_t steps);
  void deal_experts(int ranks);
  void backward(const PartTimes& part, double share);
  void batch_known(std::int64_t step) {
    const GradientWindows::Asked asked = windows_->asked(world_.rank(), step);
    const std::int64_t tokens = job_.counts_tokens() ? outline_.tokens_per_rank : 0;
    job_.all().batch_known({.tokens = tokens, .lookups = asked.lookups});
  }
  void pass(double seconds);
  void take_result();
  double exchanged();
  bool in_last_micro_batch(const Piece& piece) const {
    return piece.micro_batch + 1 == options_.micro_batches;
  }

  World& world_;
  const Outline outline_;
  const EmulationOptions& options_;
  const Figures figures_;
  const std::shared_ptr<const GradientWindows> windows_;
  RankModel model_;
  JobStrategies job_;
  DrawnExperts experts_;
  PassedValues passed_;
  const TokenCuts cuts_;
  ExpertValues values_;
  const std::unique_ptr<ExpertPacking> packing_;
  Walker walker_;
  StepAccount account_;
  StepAccount::Step current_;
  std::int64_t step_ = 0;
  Clock::time_point computed_until_;
  Clock::time_point began_;  // the step that runs
  Time communicated_{};      // of the engine, when that was
  bool stopped_ = true;      // nothing runs: the next step's time begins with it
};

void EmulatedRank::pass(double seconds) {
  if (options_.occupies) {
    const double until = thread_seconds() + seconds;
    while (thread_seconds() < until) continue;
    computed_until_ = std::max(computed_until_, Clock::now());
    return;
  }
  computed_until_ += std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  std::this_thread::sleep_until(computed_until_);
}

void EmulatedRank::one_step(std::int64_t step) {
  const Clock::time_point before = Clock::now();
  if (options_.before_step) options_.before_step(step);
  const Clock::time_point start = Clock::now();
  if (std::exchange(stopped_, false)) {
    began_ = computed_until_ = start;
    exchanged();
  } else {
    began_ += start - before;
    computed_until_ += start - before;
  }
  current_ = {};
  step_ = step;
  Strategies& all = job_.all();
  all.number_step(step);
  if (!all.under_way()) batch_known(step);
  experts_.begin(step);
  passed_.begin();
  pass(outline_.other_seconds);
  walker_.walk(all.next_table(options_.micro_batches));
  take_result();
  const Clock::time_point end = Clock::now();
  current_.seconds = seconds_between(began_, end);
  began_ = end;
  current_.exchanged = exchanged();
  account_.ended(current_, all.times());
}

// Seconds since the last call in which some exchange was under way.
double EmulatedRank::exchanged() {
  const Time now = world_.comm().endpoint().communication().until(world_.engine().now());
  return seconds(now - std::exchange(communicated_, now));
}

void EmulatedRank::backward(const PartTimes& part, double share) {
  for (const ReadyGradient& gradient : part.gradients) {
    pass(share * gradient.seconds);
    const Clock::time_point start = Clock::now();
    job_.all().gradient_ready(
        gradient.tensor,
        windows_->of(world_.rank(), step_, model_.tensors[static_cast<std::size_t>(gradient.tensor)],
                     job_.place(gradient.tensor)));
    const Clock::duration took = Clock::now() - start;
    current_.handed_over += std::chrono::duration<double>(took).count();
    computed_until_ += took;
  }
  pass(share * part.rest_seconds);
}

// Of the step before, in the middle of this one.
void EmulatedRank::take_result() {
  if (job_.all().result()) account_.complete(job_, figures_.cost);
}

// And deals experts to so many ranks: that time counts for the last step as well.
void EmulatedRank::settle(std::optional<int> expert_ranks) {
  if (!job_.all().under_way()) return;
  current_ = {};
  walker_.walk(job_.all().tables(options_.micro_batches).settle);
  take_result();
  if (expert_ranks) deal_experts(*expert_ranks);
  current_.seconds = seconds_between(began_, Clock::now());
  current_.exchanged = exchanged();
  account_.settled(current_);
  stopped_ = true;
}

void EmulatedRank::pack(std::int64_t steps) {
  packing_->step_ended();
  if (!packing_->due(steps)) return;
  wait_for(packing_->agree());
  packing_->decide(steps);
  if (const std::optional<int> ranks = packing_->wanted()) settle(ranks);
  packing_->take_line();
}

void EmulatedRank::deal_experts(int ranks) {
  const Clock::time_point began = Clock::now();
  const std::unique_ptr<Relayout> move = job_.plan_move(ranks);
  wait_for(job_.start_move(*move));
  const ExpertLayout layout{.slices = options_.experts.slices, .ranks = ranks, .rank = world_.rank() % ranks};
  model_ = rank_model(outline_, options_, layout, world_.rank());
  job_.lay_out(model_.shape, ranks);
  job_.finish_move(*move);
  packing_->changed(move->most_bytes(), seconds_between(began, Clock::now()));
}

}  // namespace

EmulatedSteps emulate_rank(World& world, const Outline& outline, const EmulationOptions& options) {
  check(outline);
  check(options);
  return EmulatedRank(world, outline, options).run();
}

Config with_policy(Config config, const ExpertOptions& experts) {
  constexpr std::size_t kWhole = std::size_t{1} << 30;
  if (find_expert_policy(experts.policy).whole) config.micro_op_bytes = kWhole;
  return config;
}

int pool_workers(const Config& config, int ranks) {
  const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  return config.workers > 0 ? config.workers : std::min(ranks, cores);
}

}  // namespace weft
