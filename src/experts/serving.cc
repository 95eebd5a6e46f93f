#include "experts/serving.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "weft/collective.h"
#include "weft/error.h"

namespace weft {

namespace {

constexpr std::uint32_t kStepHops = 1 << 13;  // more than a collective has
static_assert(4 * kStepHops <= ExpertServing::kHops);

std::int64_t sum(std::span<const std::int64_t> values) {
  return std::accumulate(values.begin(), values.end(), std::int64_t{0});
}

}  // namespace

void check(const ServingOptions& o) {
  const auto refuse = [](const std::string& what) { throw UsageError("serving: " + what); };
  check(o.placer);
  if (o.width < 1) refuse("rows have at least one value");
  if (o.weight_bytes < 0 || !(o.plan_seconds >= 0))
    refuse("what an expert weighs and what a plan takes is not negative");
  if (!find_placement(o.placer.placement).estimates) return;
  if (o.profile == nullptr) refuse("placement '" + o.placer.placement + "' goes by a profile of paths");
  const PopularityOptions& profile = o.profile->options();
  if (profile.layers != o.placer.layers || profile.experts != o.placer.place.experts ||
      profile.choices != o.placer.choices)
    refuse("the profile is of " + std::to_string(profile.layers) + " layers of " +
           std::to_string(profile.experts) + " experts and " + std::to_string(profile.choices) +
           " choices, not of " + std::to_string(o.placer.layers) + " of " +
           std::to_string(o.placer.place.experts) + " and " + std::to_string(o.placer.choices));
}

ExpertServing::ExpertServing(Engine& engine, const Comm& group, const ServingOptions& options,
                             ServingDriver& driver)
    : engine_(engine), comm_(group), options_(options), driver_(driver), placer_(options.placer) {
  check(options_);
  if (options_.placer.place.ranks != comm_.size())
    throw UsageError("serving: a placement on " + std::to_string(options_.placer.place.ranks) +
                     " ranks cannot be served by " + std::to_string(comm_.size()));
  held_.assign(layers(), std::vector<bool>(experts() * ranks()));
  for (std::vector<bool>& held : held_) hold(held, static_placement(options_.placer.place));
  weights_.resize(static_cast<std::size_t>(options_.weight_bytes));
}

void ExpertServing::hold(std::vector<bool>& held, const ExpertPlacement& placement) const {
  held.assign(held.size(), false);
  for (std::size_t e = 0; e < experts(); ++e) {
    held[e * ranks() + e % ranks()] = true;  // at home they stay
    for (const int rank : placement.replicas[e]) held[e * ranks() + static_cast<std::size_t>(rank)] = true;
  }
}

void ExpertServing::begin(std::int64_t tokens) {
  tokens_ = static_cast<std::size_t>(tokens);
  paths_.assign(tokens_ * layers(), 0);
  start_expecting(0);
}

void ExpertServing::abandon(const std::exception_ptr& cause) noexcept {
  engine_.abandon(cause);
  if (!expecting_.valid()) return;
  try {
    expecting_.wait();
  } catch (...) {
    return;  // the cause, or what came before it
  }
}

void ExpertServing::start_expecting(int layer) {
  if (!placer_.kind().estimates) return;
  const SubmitOptions how{.name = "expected rows of experts", .traffic = TrafficClass::blocking};
  expecting_ = engine_.submit(comm_, how, [this, layer](Comm comm) { return expect(comm, this, layer); });
}

void ExpertServing::estimate(int layer) {
  expected_.assign(experts(), 0);
  for (std::size_t t = 0; t < tokens_; ++t) {
    const std::span path = std::span(paths_).subspan(t * layers(), static_cast<std::size_t>(layer));
    options_.profile->estimate(layer, path, expected_);
  }
}

// An operation of its own, beside the walk.
Task<void> ExpertServing::expect(Comm comm, ExpertServing* me, int layer) {
  const auto estimate = [me, layer] { me->estimate(layer); };
  co_await comm.compute(estimate);
  const Dense rows(std::span{me->expected_});
  const AllReduceOptions how;
  co_await all_reduce(comm, rows, how);
  const auto plan = [me, layer] {
    me->placer_.plan(layer, me->expected_);
    return me->options_.plan_seconds;
  };
  co_await comm.compute(plan);
  co_await me->bring_weights(comm.hops_from(kStepHops), layer);
}

// From their homes to the ranks that lack them.
Task<void> ExpertServing::bring_weights(Comm comm, int layer) {
  if (options_.weight_bytes == 0) co_return;
  std::vector<bool>& held = held_[static_cast<std::size_t>(layer)];
  std::vector<std::vector<std::byte>> brought;
  brought.reserve(experts());
  std::vector<Transfer> transfers;  // into it
  const ExpertPlacement& placement = placer_.placement(layer);
  for (std::size_t e = 0; e < experts(); ++e) {
    const int home = static_cast<int>(e % ranks());
    for (const int rank : placement.replicas[e]) {
      if (held[e * ranks() + static_cast<std::size_t>(rank)]) continue;
      const auto hop = static_cast<std::uint32_t>(e);
      if (rank == comm.rank()) {
        brought.emplace_back(weights_.size());
        transfers.push_back(comm.recv(home, hop, std::span(brought.back())));
      }
      if (home != comm.rank()) continue;
      transfers.push_back(comm.send(rank, hop, std::span<const std::byte>(weights_)));
      moved_bytes_ += weights_.size();
    }
  }
  hold(held, placement);
  for (Transfer& transfer : transfers) co_await transfer;
}

// Step 1
Task<void> ExpertServing::count(Comm comm, int layer, std::span<const std::int32_t> chosen) {
  const auto me = static_cast<std::size_t>(comm.rank());
  counts_.assign(ranks() * experts(), 0);
  for (std::size_t copy = 0; copy < chosen.size(); ++copy) {
    ++counts_[me * experts() + static_cast<std::size_t>(chosen[copy])];
    if (copy % choices() == 0)
      paths_[copy / choices() * layers() + static_cast<std::size_t>(layer)] = chosen[copy];
  }
  const Dense all_counts(std::span{counts_});
  const AllGatherOptions how;
  co_await all_gather(comm, all_counts, how);
}

// Step 2
void ExpertServing::settle(int layer) {
  std::vector<std::int64_t> all(experts());
  for (std::size_t i = 0; i < counts_.size(); ++i) all[i % experts()] += counts_[i];
  placer_.settle(layer, all);
}

ExpertServing::Flow ExpertServing::deal(int layer, std::span<const std::int32_t> chosen) {
  const std::vector<std::int64_t> rows = deal_rows(placer_.placement(layer), counts_, options_.placer.place);
  const auto me = static_cast<std::size_t>(comm_.rank());
  Flow flow;
  flow.out.resize(ranks());
  flow.in.resize(ranks());
  flow.counts.resize(ranks() * experts());
  std::vector<std::int64_t> first(ranks() * experts()), loads(ranks());  // where a destination's begin
  std::int64_t leaving = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::size_t source = i / experts() / ranks(), to = i / experts() % ranks(), e = i % experts();
    loads[to] += rows[i];
    if (source == me) {
      flow.out[to] += rows[i] * options_.width;
      first[to * experts() + e] = leaving;
      leaving += rows[i];
    }
    if (to != me) continue;
    flow.in[source] += rows[i] * options_.width;
    flow.counts[source * experts() + e] = rows[i];
  }
  const std::int64_t all = sum(loads);
  load_ = all == 0 ? 0
                   : static_cast<double>(*std::ranges::max_element(loads) * comm_.size()) /
                         static_cast<double>(all);
  // An expert's copies go to its ranks in order, as many to each as were dealt to it.
  flow.copies.resize(static_cast<std::size_t>(leaving));
  std::vector<std::size_t> to(experts());
  std::vector<std::int64_t> placed(experts());  // with the rank where they go now
  for (std::size_t copy = 0; copy < chosen.size(); ++copy) {
    const auto e = static_cast<std::size_t>(chosen[copy]);
    while (placed[e] == rows[(me * ranks() + to[e]) * experts() + e]) {
      ++to[e];
      placed[e] = 0;
    }
    flow.copies[static_cast<std::size_t>(first[to[e] * experts() + e] + placed[e]++)] =
        static_cast<std::int64_t>(copy);
  }
  return flow;
}

// Step 4, and back step 6
Task<void> ExpertServing::exchange(Comm comm, const Flow* flow, Dense mine, int layer, bool back) {
  const std::int64_t left = sum(flow->out) / options_.width, came = sum(flow->in) / options_.width;
  const Dense here = driver_.room(layer, came);
  if (mine.count != left * options_.width || here.count != came * options_.width)
    throw UsageError("serving: a driver gave " + std::to_string(mine.count) + " and " +
                     std::to_string(here.count) + " values instead of " +
                     std::to_string(left * options_.width) + " and " + std::to_string(came * options_.width));
  const Parts at_home{mine, flow->out}, at_experts{here, flow->in};
  const AllToAllOptions how;
  const std::uint64_t before = comm.bytes_sent();
  if (back)
    co_await all_to_all_v(comm, at_experts, at_home, how);
  else
    co_await all_to_all_v(comm, at_home, at_experts, how);
  row_bytes_ += comm.bytes_sent() - before;
  const std::span<const std::int64_t> leaving(back ? flow->in : flow->out);
  const auto own = static_cast<std::size_t>(comm.rank());
  formula_bytes_ += (sum(leaving) - leaving[own]) * static_cast<std::int64_t>(size_of(mine.dtype));
}

Task<void> ExpertServing::pass(Comm comm, int layer, std::span<const std::int32_t> chosen) {
  for (const std::int32_t expert : chosen) {
    if (expert < 0 || static_cast<std::size_t>(expert) >= experts())
      throw UsageError("serving: a token chose expert " + std::to_string(expert) + " of " +
                       std::to_string(experts()));
  }
  if (chosen.size() != tokens_ * choices())
    throw UsageError("serving: " + std::to_string(chosen.size()) + " choices of " + std::to_string(tokens_) +
                     " tokens");
  co_await count(comm, layer, chosen);
  if (placer_.kind().estimates) co_await expecting_;
  Flow flow;
  Dense leaving;
  const auto decide = [&] {
    settle(layer);
    flow = deal(layer, chosen);
    leaving = driver_.rows_to_send(layer, flow.copies);
    return placer_.replanned(layer) ? options_.plan_seconds : 0.0;
  };
  co_await comm.compute(decide);
  if (placer_.replanned(layer)) co_await bring_weights(comm.hops_from(kStepHops), layer);
  // Step 3
  if (static_cast<std::size_t>(layer) + 1 < layers()) start_expecting(layer + 1);
  co_await exchange(comm.hops_from(2 * kStepHops), &flow, leaving, layer, /*back=*/false);
  // Step 5
  co_await driver_.compute(comm, layer, flow.counts);
  const Dense home = driver_.room_for_return(layer, static_cast<std::int64_t>(flow.copies.size()));
  co_await exchange(comm.hops_from(3 * kStepHops), &flow, home, layer, /*back=*/true);
}

Task<void> ExpertServing::end(Comm comm) {
  const auto plan = [this] { placer_.batch_end(); };
  co_await comm.compute(plan);
  if (!placer_.kind().remembers) co_return;
  for (int l = 0; l < static_cast<int>(layers()); ++l)
    co_await bring_weights(comm.hops_from(static_cast<std::uint32_t>(l * options_.placer.place.experts)), l);
}

}  // namespace weft
