// What an engine did and when: one event per operation and per micro-op (a message that the scheduler
// started). Written as Chrome trace JSON, which ui.perfetto.dev opens; verified by tests against the rule
// that gradient traffic gives way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "weft/clock.h"
#include "weft/transport.h"

namespace weft {

struct TraceEvent {
  enum class Kind : std::uint8_t { operation, micro_op };
  Kind kind = Kind::operation;
  std::string name;
  TrafficClass traffic = TrafficClass::gradient;
  int priority = 0;
  std::uint32_t slot = 0, step = 0, hop = 0;
  int peer = -1;  // micro-op: world rank it goes to
  std::uint64_t bytes = 0;
  Time ready{};     // operation: the engine knows of it; micro-op: handed to the scheduler
  Time started{};   // operation: its coroutine runs; micro-op: handed to the transport
  Time finished{};  // operation: all its transfers are over; micro-op: the transport has taken every byte
  bool aged = false;
  bool failed = false;
};

// Belongs to one engine; read it when the engine is idle. Has the first `most` events, and counts the others.
class Trace {
 public:
  explicit Trace(std::size_t most = std::numeric_limits<std::size_t>::max()) : most_(most) {}

  void add(TraceEvent event) {
    if (events_.size() < most_)
      events_.push_back(std::move(event));
    else
      ++left_out_;
  }
  std::span<const TraceEvent> events() const { return events_; }
  std::uint64_t left_out() const { return left_out_; }
  void clear() {
    events_.clear();
    left_out_ = 0;
  }

 private:
  std::size_t most_;
  std::uint64_t left_out_ = 0;
  std::vector<TraceEvent> events_;
};

// One process (pid) per rank, operations as async spans, micro-ops as slices on a lane per class. `first`:
// the rank of the first trace.
std::string chrome_trace(std::span<const Trace* const> of_rank, int first = 0);
// Every breach of: no micro-op of another class starts while a blocking operation of the same rank is ready
// or runs, unless it is marked as aged. One sentence each; empty if there is none.
std::vector<std::string> breaches(const Trace& trace);

}  // namespace weft
