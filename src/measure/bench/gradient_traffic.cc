#include "measure/bench/gradient_traffic.h"

#include <optional>
#include <utility>

#include "measure/bench/run.h"
#include "weft/collective.h"

namespace weft {

namespace {
constexpr std::uint32_t kGradientSlot = 100;
}  // namespace

GradientTraffic::GradientTraffic(Engine& engine) : state_(std::make_shared<State>(engine)) {
  for (std::size_t g = 0; g < kGradients; ++g) submit(state_, g, state_->lanes[g].submitted++);
}

void GradientTraffic::stop(World& world) {
  std::vector<double> steps;
  {
    const Lock lock(state_->mutex);
    state_->paused = true;
    for (const Lane& lane : state_->lanes) steps.push_back(lane.submitted);
  }
  largest_of_ranks(world, steps);
  std::vector<std::pair<std::size_t, std::uint32_t>> next;
  {
    const Lock lock(state_->mutex);
    state_->paused = false;
    for (std::size_t g = 0; g < kGradients; ++g) {
      Lane& lane = state_->lanes[g];
      lane.last = static_cast<std::uint32_t>(steps[g]);
      if (lane.submitted == lane.finished && lane.submitted < lane.last)
        next.emplace_back(g, lane.submitted++);
    }
  }
  for (const auto& [g, step] : next) submit(state_, g, step);
  const Lock lock(state_->mutex);
  while (!state_->over()) lock.wait(state_->changed);
  if (state_->error) std::rethrow_exception(state_->error);
}

void GradientTraffic::submit(const std::shared_ptr<State>& state, std::size_t g, std::uint32_t step) {
  SubmitOptions options;
  options.name = "gradient";
  options.slot = kGradientSlot + static_cast<std::uint32_t>(g);
  options.step = step;
  const Dense data{std::span(state->lanes[g].data)};
  AllReduceOptions ring;
  ring.algorithm = "ring";
  const Ticket ticket = state->engine.submit(
      state->comm, options, [data, ring](Comm comm) { return all_reduce(comm, data, ring); });
  ticket.then([state, g, ticket] { ended(state, g, ticket); });
}

void GradientTraffic::ended(const std::shared_ptr<State>& state, std::size_t g, const Ticket& ticket) {
  std::optional<std::uint32_t> next;
  {
    const Lock lock(state->mutex);
    Lane& lane = state->lanes[g];
    ++lane.finished;
    if (const std::exception_ptr error = ticket.error()) state->error = error;
    if (!state->error && !state->paused && lane.submitted < lane.last) next = lane.submitted++;
    state->changed.notify_all();
  }
  if (next) submit(state, g, *next);
}

}  // namespace weft
