#include "world/sim_ranks.h"

#include <algorithm>

#include "transports/endpoint.h"
#include "weft/error.h"
#include "world/calibrate.h"

namespace weft {

namespace {

// In virtual bytes.
LinkCost cost_of(const LinkOptions& link, const KernelCosts& kernels) {
  LinkCost cost;
  cost.hop_seconds = std::max(link.latency_seconds + link.overhead_seconds, 1e-9);
  cost.seconds_per_byte = std::max(1.0 / link.bytes_per_second, 1e-12);
  cost.fold_seconds_per_byte = kernels.fold_byte;
  set_nodes(cost, link.ranks, link.nodes, link.scale_up_latency_seconds + link.overhead_seconds,
            link.scale_up_bytes_per_second);
  return cost;
}

}  // namespace

SimRanks::SimRanks(const SimRanksOptions& options) : world_(options.sim) {
  const LinkOptions& link = options.sim.link;
  LinkCost cost = cost_of(link, options.kernels);
  const auto virtual_micro_op = static_cast<double>(micro_op_bytes(cost, options.config));
  const auto micro_op = static_cast<std::size_t>(std::max(64.0, virtual_micro_op / link.byte_scale)) / 8 * 8;
  cost.seconds_per_byte *= link.byte_scale;
  cost.scale_up_seconds_per_byte *= link.byte_scale;
  cost.fold_seconds_per_byte *= link.byte_scale;
  const KernelCosts kernels = scaled(options.kernels, link.byte_scale);
  if (options.traces != nullptr) options.traces->resize(static_cast<std::size_t>(link.ranks));
  for (int r = 0; r < link.ranks; ++r) {
    Transport* transport = &world_.transport(r);
    if (options.decorate) {
      decorated_.push_back(options.decorate(*transport));
      transport = decorated_.back().get();
    }
    EngineOptions engine;
    engine.priority = options.priority;
    engine.window_bytes = options.config.window_bytes;
    engine.hold_limit = options.config.hold_limit;
    engine.stall_limit = options.config.stall_limit;
    engine.operation_timeout = kNever;
    if (options.traces != nullptr) engine.trace = &(*options.traces)[static_cast<std::size_t>(r)];
    engines_.push_back(std::make_unique<Engine>(*transport, engine, nullptr));
    Endpoint& endpoint = engines_.back()->world().endpoint();
    endpoint.set_byte_scale(link.byte_scale);
    endpoint.set_cost(cost);
    endpoint.set_kernels(kernels);
    endpoint.set_sim_workers(&world_.workers(r));
    endpoint.set_micro_op_bytes(micro_op);
    world_.attach(r, *engines_.back());
  }
}

SimRanks::~SimRanks() {
  for (int r = 0; r < size(); ++r) world_.detach(r);
}

Time SimRanks::run(const SubmitOptions& options, const std::function<Task<void>(Comm, int rank)>& make) {
  const Time start = world_.now();
  std::vector<Ticket> tickets;
  tickets.reserve(static_cast<std::size_t>(size()));
  for (int r = 0; r < size(); ++r) {
    tickets.push_back(
        engine(r).submit(engine(r).world(), options, [&make, r](Comm comm) { return make(comm, r); }));
  }
  std::size_t first_open = 0;
  const auto done = [&] {
    while (first_open < tickets.size() && tickets[first_open].done()) ++first_open;
    return first_open == tickets.size();
  };
  if (!world_.run_until(done)) {
    throw TransportError(
        TransportError::Kind::mismatch, static_cast<int>(first_open),
        "sim: rank " + std::to_string(first_open) + " waits for ever in " + std::string(options.name));
  }
  Time end = start;
  for (const Ticket& ticket : tickets) {
    ticket.wait();
    end = std::max(end, ticket.finished());
  }
  return end - start;
}

}  // namespace weft
