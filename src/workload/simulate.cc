// The simulated driver: every rank is a coroutine that sleeps in virtual time where emulate.cc sleeps on the
// wall clock, and awaits tickets where that one blocks.
//
// Selection and coding take no virtual time inside of a collective. So a bucket whose gradients are all there
// first waits for its seconds of a worker (first come, first served), and is handed over then: one bucket
// takes as long as if its work were spread over the hops. Where a rank computes on the cores on which that
// work is done (SimulatedCosts::occupies), its computation stands still meanwhile.
#include <algorithm>
#include <array>
#include <memory>

#include "data_parallel/formula.h"
#include "weft/collective.h"
#include "weft/error.h"
#include "workload/emulate.h"
#include "workload/step_parts.h"
#include "world/sim_ranks.h"

namespace weft {

namespace {

// Threads that do the buckets' work, in virtual time.
class Workers {
 public:
  explicit Workers(int count) : free_at_(static_cast<std::size_t>(count)) {}
  // When work that comes now will be done. REQUIRES: calls come in order of time.
  Time done(Time now, double seconds) {
    Time& first = *std::ranges::min_element(free_at_);
    first = std::max(first, now) + from_seconds(seconds);
    return first;
  }

 private:
  std::vector<Time> free_at_;
};

// What all ranks of a run share.
struct SimulatedJob {
  SimulatedJob(const Outline& model, const EmulationOptions& emulation, const SimulationOptions& run)
      : outline(model), options(emulation), costs(run.costs), windows(model, emulation) {
    backward = backward_of(model);
    const int pools = costs.workers > 0 ? 1 : run.ranks;
    workers.assign(static_cast<std::size_t>(pools), Workers(std::max(1, costs.workers)));
  }
  Workers& workers_of(int rank) { return workers[static_cast<std::size_t>(rank) % workers.size()]; }

  const Outline& outline;
  const EmulationOptions& options;
  const SimulatedCosts& costs;
  const GradientWindows windows;
  std::vector<BlockBackward> backward;
  std::vector<Workers> workers;
};

class SimulatedRank {
 public:
  SimulatedRank(Engine& engine, SimulatedJob& job)
      : engine_(engine),
        job_(job),
        parallel_(engine, engine.world(), parameters_of(job.outline), parallel_options(job.options)),
        arrived_(static_cast<std::size_t>(parallel_.plan().num_buckets())) {
    const std::size_t buckets = arrived_.size();
    if (!job.costs.bucket_seconds.empty() && job.costs.bucket_seconds.size() != buckets) {
      throw UsageError("costs of " + std::to_string(job.costs.bucket_seconds.size()) +
                       " buckets for a plan of " + std::to_string(buckets));
    }
    for (int p = 0; p < parallel_.plan().num_parameters(); ++p) {
      if (is_copied(p)) copied_ += static_cast<double>(parallel_.plan().parameter(p).count);
    }
  }

  // REQUIRES: lives until the task is done.
  static Task<void> run(Comm comm, SimulatedRank* me);
  EmulatedSteps take() {
    EmulatedSteps out = account_.take(job_.options.warmup);
    for (std::vector<double>* real : {&out.compute_seconds, &out.bucket_seconds})
      std::ranges::fill(*real, 0.0);  // seconds of this process
    out.formula_bytes = formula_bytes(parallel_, engine_.world().size(), engine_.endpoint().cost(),
                                      engine_.endpoint().micro_op_bytes());
    return out;
  }

 private:
  static Task<void> one_step(Comm comm, SimulatedRank* me, std::int64_t step);
  static Task<void> settle(Comm comm, SimulatedRank* me);
  static Task<void> agree_on_tokens(Comm comm, SimulatedRank* me);
  static Task<void> end_backward(Comm comm, SimulatedRank* me);
  static Task<void> before_block(Comm comm, SimulatedRank* me, std::size_t block);
  static Task<void> backward(Comm comm, SimulatedRank* me, std::int64_t step);
  static Task<void> pass(Comm comm, SimulatedRank* me, double seconds);
  static Task<void> wait_for(Comm comm, SimulatedRank* me, Ticket ticket);
  static Task<void> work_on(Comm comm, SimulatedRank* me, int bucket, std::int64_t step);
  void arrived(int tensor, std::int64_t step);
  void hand_over(int bucket, std::int64_t step);
  bool is_copied(int tensor) const {
    return parallel_.plan().bucket(parallel_.plan().bucket_of(tensor)).pieces.size() > 1;
  }
  double copy_seconds(int tensor) const {
    if (!is_copied(tensor)) return 0;
    return job_.costs.hand_over_seconds * static_cast<double>(parallel_.plan().parameter(tensor).count) /
           copied_;
  }

  Engine& engine_;
  SimulatedJob& job_;
  DataParallel parallel_;
  double copied_ = 0;                      // elements that are copied into buckets
  std::vector<std::vector<int>> arrived_;  // of each bucket: gradients that are there, in order
  std::vector<Ticket> working_;            // buckets that workers have
  StepAccount account_;
  StepAccount::Step current_;
  Time began_{};
  Time core_taken_{}, core_taken_until_{};  // by work on buckets, in all; where computation needs the core
  bool stopped_ = true;
  bool ended_ = false;      // backward is over, step_end() has not been called
  bool under_way_ = false;  // a step has ended and is not settled
  std::uint32_t exchanges_ = 0;
};

Task<void> SimulatedRank::pass(Comm comm, SimulatedRank* me, double seconds) {
  if (seconds <= 0) co_return;
  Time until = std::max(comm.now(), me->core_taken_until_) + from_seconds(seconds);
  while (comm.now() < until) {
    const Time taken = me->core_taken_;
    co_await comm.sleep_until(until);
    until = comm.now() + (me->core_taken_ - taken);
  }
}

Task<void> SimulatedRank::wait_for(Comm comm, SimulatedRank* me, Ticket ticket) {
  const Time start = comm.now();
  co_await ticket;
  me->current_.waited += seconds(comm.now() - start);
}

Task<void> SimulatedRank::agree_on_tokens(Comm comm, SimulatedRank* me) {
  std::array<double, 2> sums{static_cast<double>(me->job_.outline.tokens_per_rank), 0.0};
  const SubmitOptions submit{.name = "tokens of the step",
                             .traffic = TrafficClass::blocking,
                             .slot = kTokensSlot,
                             .step = me->exchanges_++};
  const Dense data(std::span<double>{sums});
  const Ticket ticket =
      me->engine_.submit(me->engine_.world(), submit, [data](Comm inner) { return all_reduce(inner, data); });
  co_await wait_for(comm, me, ticket);
}

void SimulatedRank::hand_over(int bucket, std::int64_t step) {
  std::vector<int>& tensors = arrived_[static_cast<std::size_t>(bucket)];
  const int rank = engine_.world().rank();
  for (const int tensor : tensors) parallel_.gradient_ready(tensor, job_.windows.of(rank, step, tensor));
  tensors.clear();
}

Task<void> SimulatedRank::work_on(Comm comm, SimulatedRank* me, int bucket, std::int64_t step) {
  const double cost = me->job_.costs.bucket_seconds[static_cast<std::size_t>(bucket)];
  if (me->job_.costs.occupies) {
    me->core_taken_ += from_seconds(cost);
    me->core_taken_until_ = std::max(comm.now(), me->core_taken_until_) + from_seconds(cost);
  }
  co_await comm.sleep_until(me->job_.workers_of(comm.rank()).done(comm.now(), cost));
  me->hand_over(bucket, step);
}

void SimulatedRank::arrived(int tensor, std::int64_t step) {
  const int bucket = parallel_.plan().bucket_of(tensor);
  std::vector<int>& tensors = arrived_[static_cast<std::size_t>(bucket)];
  tensors.push_back(tensor);
  if (tensors.size() < parallel_.plan().bucket(bucket).pieces.size()) return;
  if (job_.costs.bucket_seconds.empty()) return hand_over(bucket, step);
  const SubmitOptions submit{.name = "work on a bucket", .slot = kTokensSlot};  // it sends nothing
  working_.push_back(engine_.submit(engine_.world(), submit, [this, bucket, step](Comm comm) {
    return work_on(comm, this, bucket, step);
  }));
}

Task<void> SimulatedRank::backward(Comm comm, SimulatedRank* me, std::int64_t step) {
  for (std::size_t b = me->job_.backward.size(); b-- > 0;) {
    const BlockBackward& block = me->job_.backward[b];
    for (const ReadyGradient& gradient : block.gradients) {
      const double copy = me->copy_seconds(gradient.tensor);
      co_await pass(comm, me, gradient.seconds + copy);
      me->current_.handed_over += copy;
      me->arrived(gradient.tensor, step);
    }
    co_await pass(comm, me, block.rest_seconds);
  }
}

// The strategy is told of the end when all gradients have been handed over: until then somebody waits for
// one of them, or nobody needs to know.
Task<void> SimulatedRank::end_backward(Comm comm, SimulatedRank* me) {
  if (!me->ended_) co_return;
  me->ended_ = false;
  for (std::size_t i = 0; i < me->working_.size(); ++i) co_await wait_for(comm, me, me->working_[i]);
  me->working_.clear();
  me->parallel_.step_end();
  me->under_way_ = true;
}

Task<void> SimulatedRank::before_block(Comm comm, SimulatedRank* me, std::size_t block) {
  if (!me->under_way_) co_return;
  const bool last = block + 1 == me->job_.outline.blocks.size();
  std::vector<Ticket> tickets = me->parallel_.tickets_for(static_cast<int>(block));
  if (me->job_.options.clip) {
    const std::span<const Ticket> all = me->parallel_.tickets();
    tickets.assign(all.begin(), all.end());
  }
  for (std::size_t i = 0; i < tickets.size(); ++i) co_await wait_for(comm, me, tickets[i]);
  co_await pass(comm, me, me->job_.outline.blocks[block].update_seconds);
  if (!last) co_return;
  for (std::size_t i = 0; i < me->parallel_.tickets().size(); ++i)
    co_await wait_for(comm, me, me->parallel_.tickets()[i]);
  const StepResult result = me->parallel_.finish();
  if (!result.committed) throw Error(result.text);
  me->account_.complete(me->parallel_);
  me->under_way_ = false;
}

Task<void> SimulatedRank::one_step(Comm comm, SimulatedRank* me, std::int64_t step) {
  const SimulatedJob& job = me->job_;
  if (job.options.before_step) job.options.before_step(step);
  if (me->stopped_) me->began_ = comm.now();
  me->stopped_ = false;
  me->current_ = {};
  co_await agree_on_tokens(comm, me);
  co_await pass(comm, me, job.outline.other_seconds);
  co_await end_backward(comm, me);
  for (std::size_t b = 0; b < job.outline.blocks.size(); ++b) {
    co_await before_block(comm, me, b);
    co_await pass(comm, me, job.outline.blocks[b].forward_seconds);
  }
  co_await backward(comm, me, step);
  me->ended_ = true;
  me->current_.seconds = seconds(comm.now() - me->began_);
  me->began_ = comm.now();
  me->account_.ended(me->current_);
}

Task<void> SimulatedRank::settle(Comm comm, SimulatedRank* me) {
  me->current_ = {};
  co_await agree_on_tokens(comm, me);
  co_await end_backward(comm, me);
  for (std::size_t b = 0; b < me->job_.outline.blocks.size(); ++b) co_await before_block(comm, me, b);
  me->account_.settled(seconds(comm.now() - me->began_), me->current_.waited);
  me->stopped_ = true;
}

Task<void> SimulatedRank::run(Comm comm, SimulatedRank* me) {
  const EmulationOptions& options = me->job_.options;
  const std::int64_t steps = options.warmup + options.steps;
  for (std::int64_t step = 0; step < steps; ++step) {
    co_await one_step(comm, me, step);
    const bool settles = step + 1 == steps || (options.settles_after && options.settles_after(step));
    if (settles) co_await settle(comm, me);
  }
}

SimRanksOptions sim_options(const SimulationOptions& simulation) {
  if (simulation.ranks < 1) throw UsageError("a simulated run has at least one rank");
  if (!(simulation.link.bytes_per_second >= 0) || !(simulation.link.scale_up_bytes_per_second >= 0))
    throw UsageError("a simulated link has a rate of bytes per second, or 0 for none");
  SimRanksOptions out;
  LinkOptions& link = out.sim.link;
  link.ranks = simulation.ranks;
  link.latency_seconds = simulation.link.latency_seconds;
  link.nodes = simulation.link.nodes;
  if (simulation.link.bytes_per_second > 0) link.bytes_per_second = simulation.link.bytes_per_second;
  if (simulation.link.scale_up_bytes_per_second > 0)
    link.scale_up_bytes_per_second = simulation.link.scale_up_bytes_per_second;
  out.config = simulation.config;
  return out;
}

void check(const SimulatedCosts& costs) {
  const auto sound = [](double s) { return s >= 0 && s < 1e6; };
  if (!sound(costs.hand_over_seconds) || !std::ranges::all_of(costs.bucket_seconds, sound) ||
      costs.workers < 0)
    throw UsageError("simulated costs are seconds and a number of workers, none of them negative");
}

}  // namespace

std::vector<EmulatedSteps> simulate_ranks(const Outline& outline, const EmulationOptions& options,
                                          const SimulationOptions& simulation) {
  check(outline);
  check(options);
  check(simulation.costs);
  SimRanks ranks(sim_options(simulation));
  SimulatedJob job(outline, options, simulation);
  std::vector<std::unique_ptr<SimulatedRank>> all;
  for (int r = 0; r < simulation.ranks; ++r) {
    if (options.planned_link) ranks.engine(r).endpoint().set_cost(*options.planned_link);
    all.push_back(std::make_unique<SimulatedRank>(ranks.engine(r), job));
  }
  std::vector<EmulatedSteps> out;
  try {
    ranks.run({.name = "training steps", .slot = kTokensSlot}, [&all](Comm comm, int r) {
      return SimulatedRank::run(comm, all[static_cast<std::size_t>(r)].get());
    });
    for (const std::unique_ptr<SimulatedRank>& rank : all) out.push_back(rank->take());
  } catch (...) {
    // Operations end before the memory that they use does.
    for (int r = 0; r < simulation.ranks; ++r) ranks.engine(r).shut_down(std::current_exception());
    throw;
  }
  return out;
}

}  // namespace weft
