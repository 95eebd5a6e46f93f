#include "workload/emulate.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <exception>
#include <thread>
#include <utility>

#include "base/thread_time.h"
#include "data_parallel/formula.h"
#include "weft/collective.h"
#include "weft/error.h"
#include "workload/step_parts.h"

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
  Figures out;
  const auto set = [](Comm comm, const std::optional<LinkCost>& link, Figures& figures) -> Task<void> {
    if (link) comm.endpoint().set_cost(*link);
    figures = {comm.cost(), comm.micro_op_bytes()};
    co_return;
  };
  world.run({.name = "link figures", .slot = 0}, [&](Comm comm) { return set(comm, planned, out); });
  return out;
}

// A rank whose computation is a clock: `computed_until_` is where an accelerator would be. The thread sleeps
// until then; if it wakes up late, the next timer is shorter by that. What the thread itself does (copies)
// and what it waits for moves the clock on. With `occupies` the thread computes instead of sleeping, and the
// clock stands where it is when it has had its processor time.
class EmulatedRank {
 public:
  EmulatedRank(World& world, const Outline& outline, const EmulationOptions& options)
      : world_(world),
        outline_(outline),
        options_(options),
        figures_(agree_on_figures(world, options.planned_link)),
        windows_(outline, options),
        backward_(backward_of(outline)),
        parallel_(world.engine(), world.comm(), parameters_of(outline), parallel_options(options)) {}

  EmulatedSteps run() {
    try {
      const std::int64_t steps = options_.warmup + options_.steps;
      world_.barrier();
      stopped_ = true;
      for (std::int64_t step = 0; step < steps; ++step) {
        one_step(step);
        const bool last = step + 1 == steps;
        if (last || (options_.settles_after && options_.settles_after(step))) settle();
      }
    } catch (...) {
      abandon(std::current_exception());
      throw;
    }
    EmulatedSteps out = account_.take(options_.warmup);
    out.formula_bytes = formula_bytes(parallel_, world_.size(), figures_.cost, figures_.micro_op_bytes);
    return out;
  }

 private:
  void one_step(std::int64_t step);
  void settle();
  void agree_on_tokens();
  void before_block(int block);
  void finish();
  void backward(std::int64_t step);
  void wait(const Ticket& ticket);
  void compute(double seconds);
  void abandon(std::exception_ptr cause) noexcept;

  World& world_;
  const Outline& outline_;
  const EmulationOptions& options_;
  const Figures figures_;
  const GradientWindows windows_;
  const std::vector<BlockBackward> backward_;
  DataParallel parallel_;
  StepAccount account_;
  StepAccount::Step current_;
  Clock::time_point computed_until_;
  Clock::time_point began_;  // the step that runs
  bool stopped_ = true;      // nothing runs: the next step's time begins with it
  bool under_way_ = false;   // a step has ended and is not settled
  std::uint32_t exchanges_ = 0;
};

void EmulatedRank::compute(double seconds) {
  if (options_.occupies) {
    const double until = thread_seconds() + seconds;
    while (thread_seconds() < until) continue;
    computed_until_ = std::max(computed_until_, Clock::now());
    return;
  }
  computed_until_ += std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  std::this_thread::sleep_until(computed_until_);
}

void EmulatedRank::wait(const Ticket& ticket) {
  const bool late = !ticket.done();  // else the clock need not move
  const Clock::time_point start = Clock::now();
  ticket.wait();
  const Clock::time_point end = Clock::now();
  current_.waited += seconds_between(start, end);
  if (late) computed_until_ = std::max(computed_until_, end);
}

void EmulatedRank::agree_on_tokens() {
  std::array<double, 2> sums{static_cast<double>(outline_.tokens_per_rank), 0.0};
  const SubmitOptions submit{.name = "tokens of the step",
                             .traffic = TrafficClass::blocking,
                             .slot = kTokensSlot,
                             .step = exchanges_++};
  const Dense data(std::span<double>{sums});
  wait(world_.engine().submit(world_.comm(), submit, [data](Comm comm) { return all_reduce(comm, data); }));
}

void EmulatedRank::one_step(std::int64_t step) {
  const Clock::time_point before = Clock::now();
  if (options_.before_step) options_.before_step(step);
  const Clock::time_point start = Clock::now();
  if (std::exchange(stopped_, false)) {
    began_ = computed_until_ = start;
  } else {
    began_ += start - before;
    computed_until_ += start - before;
  }
  current_ = {};
  agree_on_tokens();
  compute(outline_.other_seconds);
  for (std::size_t b = 0; b < outline_.blocks.size(); ++b) {
    before_block(static_cast<int>(b));
    compute(outline_.blocks[b].forward_seconds);
  }
  backward(step);
  parallel_.step_end();
  under_way_ = true;
  const Clock::time_point end = Clock::now();
  current_.seconds = seconds_between(began_, end);
  began_ = end;
  account_.ended(current_);
}

void EmulatedRank::backward(std::int64_t step) {
  for (std::size_t b = backward_.size(); b-- > 0;) {
    for (const ReadyGradient& gradient : backward_[b].gradients) {
      compute(gradient.seconds);
      const Clock::time_point start = Clock::now();
      parallel_.gradient_ready(gradient.tensor, windows_.of(world_.rank(), step, gradient.tensor));
      const Clock::duration took = Clock::now() - start;
      current_.handed_over += std::chrono::duration<double>(took).count();
      computed_until_ += took;
    }
    compute(backward_[b].rest_seconds);
  }
}

void EmulatedRank::before_block(int block) {
  if (under_way_) {
    if (!options_.clip) {
      for (const Ticket& ticket : parallel_.tickets_for(block)) wait(ticket);
    } else if (block == 0) {
      for (const Ticket& ticket : parallel_.tickets()) wait(ticket);
    }
    compute(outline_.blocks[static_cast<std::size_t>(block)].update_seconds);
    if (static_cast<std::size_t>(block) + 1 == outline_.blocks.size()) finish();
  }
}

void EmulatedRank::finish() {
  for (const Ticket& ticket : parallel_.tickets()) wait(ticket);
  const StepResult result = parallel_.finish();
  if (!result.committed) throw Error(result.text);
  account_.complete(parallel_);
  under_way_ = false;
}

void EmulatedRank::settle() {
  current_ = {};
  agree_on_tokens();
  for (std::size_t b = 0; b < outline_.blocks.size(); ++b) before_block(static_cast<int>(b));
  const Clock::time_point end = Clock::now();
  account_.settled(seconds_between(began_, end), current_.waited);
  stopped_ = true;
}

// Until nothing uses the buckets' memory.
void EmulatedRank::abandon(std::exception_ptr cause) noexcept {
  world_.engine().abandon(std::move(cause));
  for (const Ticket& ticket : parallel_.tickets()) {
    try {
      ticket.wait();
    } catch (...) {
      continue;  // the cause, or what came before it
    }
  }
}

}  // namespace

EmulatedSteps emulate_rank(World& world, const Outline& outline, const EmulationOptions& options) {
  check(outline);
  check(options);
  return EmulatedRank(world, outline, options).run();
}

int pool_workers(const Config& config, int ranks) {
  const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  return config.workers > 0 ? config.workers : std::min(ranks, cores);
}

}  // namespace weft
