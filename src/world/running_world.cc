#include "world/running_world.h"

#include <exception>

#include "base/units.h"
#include "transports/endpoint.h"
#include "world/figures.h"

namespace weft {

namespace {

EngineOptions engine_options(const RunningWorld::Parts& parts, Log& log) {
  return {.priority = parts.priority,
          .window_bytes = parts.config->window_bytes,
          .hold_limit = parts.config->hold_limit,
          .stall_limit = parts.config->stall_limit,
          .operation_timeout = parts.config->operation_timeout,
          .time_limit = parts.config->time_limit,
          .trace = parts.trace,
          .log = &log};
}

// The endpoint is read on the engine's thread, so it is set there too. REQUIRES (references): as
// Engine::submit has it.
Task<void> settle(Comm comm, const LinkCost* known, std::uint64_t host, const Config& config) {
  Agreement agreed;
  co_await calibrate(comm, known, host, config, agreed);
  comm.endpoint().set_cost(agreed.cost);
  comm.endpoint().set_micro_op_bytes(agreed.micro_op_bytes);
}

}  // namespace

RunningWorld::RunningWorld(Transport& transport, const Parts& parts)
    : parts_(parts),
      name_(transport.name()),
      log_(parts.config->log, transport.rank()),
      engine_(transport, engine_options(parts, log_), parts.pool),
      thread_(engine_),
      unwinding_(std::uncaught_exceptions()) {}

void RunningWorld::start() {
  const Config& config = *parts_.config;
  const KeptFigures kept(rank() == 0 ? config.figures : "");
  const LinkCost* known = kept.known() != nullptr ? kept.known() : parts_.known_cost;
  const SubmitOptions options = {
      .name = "calibrate", .traffic = TrafficClass::blocking, .timeout = config.connect_timeout};
  log_.info("connected: rank " + std::to_string(rank()) + " of " + std::to_string(size()) + " over " + name_);
  run(options, [&config, known, host = parts_.host](Comm comm) { return settle(comm, known, host, config); });
  kept.keep(figures());
  if (!log_.enabled(LogLevel::info)) return;
  const LinkCost cost = engine_.world().cost();
  log_.info("a hop takes " + duration_text(from_seconds(cost.hop_seconds)) + ", a port carries " +
            std::to_string(1e-6 / cost.seconds_per_byte) + " MB/s");
  if (cost.node_ranks > 1) {
    const LinkCost inside = cost.inside();
    log_.info(std::to_string(cost.node_ranks) + " ranks share a node, inside which a hop takes " +
              duration_text(from_seconds(inside.hop_seconds)) + ", and a port carries " +
              std::to_string(1e-6 / inside.seconds_per_byte) + " MB/s");
  }
}

RunningWorld::~RunningWorld() {
  if (std::uncaught_exceptions() > unwinding_) return;
  try {
    engine_.settled().wait();
  } catch (...) {  // whoever waits for its operations is told
    log_.info("leaves a job that has failed");
  }
}

}  // namespace weft
