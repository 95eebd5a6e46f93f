#include "workload/expert_packing.h"

#include <utility>

#include "data_parallel/schemes.h"
#include "weft/collective.h"

namespace weft {

namespace {

std::vector<PackingChoice> choices_of(const JobStrategies& job, const ExpertOptions& options,
                                      const PackingSetting& setting) {
  const Experts& experts = *job.experts();
  const RouteOptions& route = experts.options().route;
  const auto value = static_cast<double>(size_of(experts.options().dtype));
  const bool capped = route.capacity_factor > 0;
  const std::int64_t copies =
      capped ? route.experts * capacity_of(route, setting.tokens) : setting.tokens * route.choices;
  const double slice =
      static_cast<double>(copies * experts.layer(0).width) * value / static_cast<double>(route.slices);
  const int world = job.all().world().size();
  std::vector<PackingChoice> out;
  for (int packing = 1; packing <= options.ranks && options.ranks % packing == 0; packing *= 2) {
    const int ranks = options.ranks / packing, replicas = world / ranks;
    const auto elements = static_cast<double>(job.expert_elements(ranks));
    PackingChoice& choice = out.emplace_back();
    choice.packing = packing;
    choice.all_to_all = all_to_all_seconds(setting.network, ranks, slice);
    choice.sums = job.predicted_expert_sums(ranks, cost_of_group(setting.network, replicas, ranks));
    // At most all that a rank has there is new to it.
    choice.move = all_to_all_seconds(setting.network, world, elements * value * (1 + setting.moments));
    choice.bytes = static_cast<std::int64_t>(elements * value * (2 + setting.moments));  // and its gradient
  }
  return out;
}

PackingController controller_of(const JobStrategies& job, const ExpertOptions& options,
                                const PackingSetting& setting) {
  PackingOptions how = setting.options;
  how.memory = options.packing_memory;
  const double all_to_alls = 4.0 * static_cast<double>(job.all().shape().experts.size()) *
                             job.experts()->options().route.slices * setting.micro_batches;
  return {how, choices_of(job, options, setting), all_to_alls, options.ranks / job.expert_ranks()};
}

// Of a packing that stays, the ranks of now are all there is.
ExpertOptions as_dealt(ExpertOptions options, const JobStrategies& job) {
  if (!is_auto_packing(options.packing)) options.ranks = job.expert_ranks();
  return options;
}

}  // namespace

PackingNetwork packing_network(const LinkCost& figures, const std::optional<EmulatedLink>& link, int ranks) {
  PackingNetwork out{.link = figures, .scale_up = figures.inside(), .ranks_per_node = figures.node_ranks};
  if (!link) return out;
  if (link->bytes_per_second > 0) out.link.seconds_per_byte = 1 / link->bytes_per_second;
  out.link.hop_seconds = std::max(figures.hop_seconds, link->latency_seconds);
  out.scale_up = out.link;
  if (figures.scale_up_hop_seconds > 0) out.scale_up.hop_seconds = figures.scale_up_hop_seconds;
  out.ranks_per_node = link->nodes > 0 ? std::max(1, ranks / link->nodes) : 1;
  if (link->scale_up_bytes_per_second > 0)
    out.scale_up.seconds_per_byte = 1 / link->scale_up_bytes_per_second;
  return out;
}

ExpertPacking::ExpertPacking(JobStrategies& job, const ExpertOptions& options, const PackingSetting& setting)
    : job_(job),
      ranks_(options.ranks),
      auto_(is_auto_packing(options.packing)),
      controller_(controller_of(job, as_dealt(options, job), setting)) {
  if (!auto_) ranks_ = packing_number(options.packing) * job.expert_ranks();
  changes_.push_back({.steps = 0, .packing = packing(), .bytes = 0, .seconds = 0, .why = "as it was given"});
}

void ExpertPacking::step_ended() {
  if (!auto_) return;
  sums_[0] += job_.all().times().expert_slice;
  sums_[1] += job_.experts()->forward_seconds();
  ++steps_;
}

bool ExpertPacking::due(std::int64_t steps) const { return auto_ && controller_.due(steps); }

Ticket ExpertPacking::agree() {
  values_ = sums_;
  for (double& value : values_) value /= static_cast<double>(std::max<std::int64_t>(steps_, 1));
  sums_ = {0, 0};
  steps_ = 0;
  Strategies& all = job_.all();
  const SubmitOptions submit{.name = "times of experts",
                             .traffic = TrafficClass::prior,
                             .slot = all.next_slot(all.world()) + 2,  // behind evaluations and moves
                             .step = agreements_++};
  const Dense data(std::span<double>{values_});
  return all.engine().submit(all.world(), submit, [data](Comm comm) {
    return all_reduce(comm, data, {.reduction = Reduction::max});
  });
}

void ExpertPacking::decide(std::int64_t steps) {
  PackingController::Decision decision =
      controller_.decide({.experts = values_[0], .all_to_all = values_[1]});
  if (!decision.tells) return;
  next_ = {.steps = steps, .packing = decision.packing, .bytes = 0, .seconds = 0, .why = decision.why};
  if (next_->packing == packing()) changes_.push_back(*next_);  // it was refused
}

std::optional<int> ExpertPacking::wanted() const {
  if (!next_ || next_->packing == packing()) return std::nullopt;
  return ranks_ / next_->packing;
}

void ExpertPacking::changed(std::int64_t bytes, double seconds) {
  next_->bytes = static_cast<std::uint64_t>(bytes);
  next_->seconds = seconds;
  changes_.push_back(*next_);
}

std::optional<PackingChange> ExpertPacking::take_line() { return std::exchange(next_, std::nullopt); }

}  // namespace weft
