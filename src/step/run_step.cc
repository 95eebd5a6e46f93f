#include "step/run_step.h"

#include <utility>

#include "transports/endpoint.h"
#include "weft/error.h"

namespace weft {

Task<void> run_step(Driver* driver, Strategies* strategies, const Table* table) {
  strategies->begin(*table);
  Engine& engine = strategies->engine();
  const int micro_batches = table->micro_batches();
  for (const Move& move : table->moves) {
    const Time start = engine.now();
    switch (move.kind) {
      case Move::Kind::compute:
        strategies->computing();
        co_await driver->compute(move.piece);
        engine.note(TraceEvent::Kind::computing, strategies->shape().title(move.piece, micro_batches),
                    strategies->step(), start);
        strategies->computed(move.piece);
        break;
      case Move::Kind::announce:
        strategies->announce(move);
        break;
      case Move::Kind::start:
        strategies->start(move, *driver);
        break;
      case Move::Kind::wait: {
        const Ticket ticket = strategies->ticket(move);
        if (ticket.valid()) co_await driver->wait(ticket);
        if (ticket.valid() && engine.now() > start)
          engine.note(TraceEvent::Kind::waiting, strategies->name_of(move.exchange), strategies->step(),
                      start);
        if (ticket.valid()) driver->waited(move, ticket, start);
        strategies->waited(move, start);
        break;
      }
    }
  }
  strategies->end(*table);
}

Walker::Walker(Driver& driver, Strategies& strategies)
    : driver_(driver),
      strategies_(strategies),
      executor_(arena_, strategies.engine().world().endpoint().transport().clock()) {}

void Walker::begin(const Table& table) {
  if (walking()) throw UsageError("a step begins before the last one was walked to its end");
  task_ = run_step(&driver_, &strategies_, &table);
  task_.start(executor_);
  check_end();
}

void Walker::go_on() {
  if (!walking()) throw UsageError("there is no step to go on with");
  executor_.ready(std::exchange(gate_.waiter_, {}));
  while (executor_.run()) continue;
  check_end();
}

void Walker::check_end() {
  if (!task_.done()) return;
  Task<void> ended = std::exchange(task_, {});
  ended.result();
}

void Walker::walk(const Table& table) {
  begin(table);
  if (walking()) throw UsageError("a driver that must not suspend has suspended");
}

void abandon(Strategies& strategies, std::exception_ptr cause) noexcept {
  strategies.engine().abandon(std::move(cause));
  for (const Ticket& ticket : strategies.tickets()) {
    try {
      ticket.wait();
    } catch (...) {
      continue;  // the cause, or what came before it
    }
  }
}

}  // namespace weft
