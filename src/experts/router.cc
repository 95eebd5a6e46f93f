#include "experts/router.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "weft/collective.h"

namespace weft {

RouterSums::RouterSums(Engine& engine, const Comm& world, std::vector<ExpertShape> layers, Options options)
    : engine_(engine),
      comm_(world),
      layers_(std::move(layers)),
      options_(std::move(options)),
      walked_(options_.first_step) {}

std::vector<PlanRow> RouterSums::rows() const {
  std::vector<PlanRow> out;
  out.reserve(layers_.size());
  for (std::size_t l = 0; l < layers_.size(); ++l) {
    out.push_back({.tensor = layers_[l].router(),
                   .count = router_values(options_.experts.count),
                   .strategy = std::string(name()),
                   .group = comm_.group_id(),
                   .ranks = comm_.size(),
                   .scheme = "dense",
                   .codec = {},
                   .traffic = TrafficClass::prior,
                   .slot = options_.first_slot + static_cast<std::uint32_t>(l),
                   .why = "losses of a router are of all ranks' tokens"});
  }
  return out;
}

std::vector<Exchange> RouterSums::exchanges() const {
  std::vector<Exchange> out;
  for (std::size_t l = 0; l < layers_.size(); ++l) {
    Exchange exchange{.name = "choices of " + layers_[l].name,
                      .traffic = TrafficClass::prior,
                      .group = comm_.group_id(),
                      .slot = options_.first_slot + static_cast<std::uint32_t>(l),
                      .each_micro_batch = true};
    exchange.reads = {{TensorName::Of::activation, layers_[l].router()}};
    exchange.writes = {{TensorName::Of::gradient, layers_[l].router()}};
    out.push_back(std::move(exchange));
  }
  return out;
}

void RouterSums::weave(Weaver& weaver) const {
  for (int m = 0; m < weaver.micro_batches(); ++m) {
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      const int exchange = static_cast<int>(l);
      weaver.after({Work::forward, layers_[l].block, layers_[l].gate, m}, start_of(exchange, 0, m));
      weaver.before(weaver.going_back(layers_[l].block, layers_[l].gate, m), wait_of(exchange, 0, m));
    }
  }
}

void RouterSums::set_micro_batches(int count) {
  if (std::ranges::any_of(work(), [](const Ticket& t) { return t.valid() && !t.done(); }))
    throw UsageError("router: a step begins while sums of the last one are on their way");
  walked_ += static_cast<std::uint32_t>(sums_.size());
  sums_.assign(static_cast<std::size_t>(count), std::vector<Sums>(layers_.size()));
}

void RouterSums::start(int exchange, const When& when, TensorSource& tensors) {
  if (static_cast<std::size_t>(when.micro_batch) >= sums_.size())
    throw UsageError("router: micro-batch " + std::to_string(when.micro_batch) + " of a step of " +
                     std::to_string(sums_.size()));
  Sums& into = sums_[static_cast<std::size_t>(when.micro_batch)][static_cast<std::size_t>(exchange)];
  const ExpertShape& layer = layers_[static_cast<std::size_t>(exchange)];
  const Dense given = tensors.tensor({TensorName::Of::activation, layer.router(), when.micro_batch});
  into.values.assign(static_cast<std::size_t>(router_values(options_.experts.count)), 0);
  if (given.count != 0 && given.count != router_values(options_.experts.count))
    throw UsageError("router: layer '" + layer.name + "' gave " + std::to_string(given.count) +
                     " values, not " + std::to_string(router_values(options_.experts.count)));
  for (std::size_t i = 0; i < static_cast<std::size_t>(given.count); ++i) {
    into.values[i] = given.dtype == DType::float64 ? reinterpret_cast<const double*>(given.data)[i]
                                                   : reinterpret_cast<const float*>(given.data)[i];
  }
  const SubmitOptions how{.name = "choices of experts",
                          .traffic = TrafficClass::prior,
                          .slot = options_.first_slot + static_cast<std::uint32_t>(exchange),
                          .step = walked_ + static_cast<std::uint32_t>(when.micro_batch)};
  const Dense all(std::span<double>{into.values});
  into.ticket = engine_.submit(comm_, how, [all](Comm comm) { return all_reduce(comm, all); });
}

Ticket RouterSums::ticket(int exchange, const When& when) const {
  if (when.offset != 0 || static_cast<std::size_t>(when.micro_batch) >= sums_.size()) return {};
  return sums(exchange, when.micro_batch).ticket;
}

std::vector<Ticket> RouterSums::work() const {
  std::vector<Ticket> out;
  for (const std::vector<Sums>& of_batch : sums_) {
    for (const Sums& sums : of_batch) out.push_back(sums.ticket);
  }
  return out;
}

std::vector<double> RouterSums::gradient(int layer, int micro_batch) const {
  const Sums& from = sums(layer, micro_batch);
  const auto experts = static_cast<std::size_t>(options_.experts.count);
  std::vector<double> out(from.values.size());
  const double all = tokens(from);
  if (all == 0) return out;
  const double share = comm_.size() / static_cast<double>(sums_.size()) / all;
  for (std::size_t e = 0; e < experts; ++e) {
    const double chosen = from.values[experts + 1 + e] / (options_.experts.choices * all);
    out[e] = share * options_.experts.balance_loss * static_cast<double>(experts) * chosen;
  }
  out[experts] = share * options_.experts.z_loss;
  return out;
}

double RouterSums::loss() const {
  const auto experts = static_cast<std::size_t>(options_.experts.count);
  double out = 0;
  for (const std::vector<Sums>& of_batch : sums_) {
    for (const Sums& from : of_batch) {
      if (from.values.empty() || tokens(from) == 0) continue;
      const double all = tokens(from);
      double balance = 0;
      for (std::size_t e = 0; e < experts; ++e)
        balance += from.values[experts + 1 + e] / (options_.experts.choices * all) * from.values[e] / all;
      out += options_.experts.balance_loss * static_cast<double>(experts) * balance +
             options_.experts.z_loss * from.values[experts] / all;
    }
  }
  return sums_.empty() ? 0 : out / static_cast<double>(sums_.size());
}

std::vector<double> RouterSums::chosen(int layer) const {
  const auto experts = static_cast<std::size_t>(options_.experts.count);
  std::vector<double> out(experts);
  for (const std::vector<Sums>& of_batch : sums_) {
    const Sums& from = of_batch[static_cast<std::size_t>(layer)];
    for (std::size_t e = 0; e < experts && !from.values.empty(); ++e) out[e] += from.values[experts + 1 + e];
  }
  return out;
}

double RouterSums::load(int layer) const {
  const std::vector<double> of_expert = chosen(layer);
  const double all = std::accumulate(of_expert.begin(), of_expert.end(), 0.0);
  if (all == 0) return 0;
  return *std::ranges::max_element(of_expert) * static_cast<double>(of_expert.size()) / all;
}

}  // namespace weft
