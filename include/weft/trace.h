// What a rank did and when: one event per operation and per micro-op (a message that the scheduler started),
// and what its driver says of itself: computing, waiting. Written as Chrome trace JSON, which ui.perfetto.dev
// opens; verify_trace() checks it against the rules of the scheduler.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "weft/clock.h"
#include "weft/traffic.h"

namespace weft {

struct TraceEvent {
  // hold: gradient traffic is held back, by an announcement or by an operation that holds.
  enum class Kind : std::uint8_t { operation, micro_op, computing, waiting, hold };
  Kind kind = Kind::operation;
  std::string name;
  TrafficClass traffic = TrafficClass::gradient;
  int priority = 0;
  std::uint32_t slot = 0, step = 0, hop = 0;
  int peer = -1;  // micro-op: world rank it goes to
  std::uint64_t bytes = 0;
  Time ready{};     // operation: the engine knows of it; micro-op: handed to the scheduler; else as started
  Time started{};   // operation: its coroutine runs; micro-op: handed to the transport
  Time finished{};  // operation: all its transfers are over; micro-op: the transport has taken every byte
  Unheld unheld = Unheld::no;  // micro-op
  bool failed = false;
  bool holds = false;  // operation: others are held back from ready to finished
};

// Belongs to one engine. add() from any thread; read, copy or move it when nobody adds. Has the first `most`
// events, and counts the others. An event is added at its end: what is open when the engine is shut down ends
// there.
class Trace {
 public:
  explicit Trace(std::size_t most = std::numeric_limits<std::size_t>::max()) : most_(most) {}
  Trace(const Trace& other) : most_(other.most_), left_out_(other.left_out_), events_(other.events_) {}
  Trace(Trace&& other) noexcept
      : most_(other.most_), left_out_(other.left_out_), events_(std::move(other.events_)) {}
  Trace& operator=(Trace other) noexcept {
    most_ = other.most_;
    left_out_ = other.left_out_;
    events_ = std::move(other.events_);
    return *this;
  }
  ~Trace() = default;

  void add(TraceEvent event) {
    const std::lock_guard lock(mutex_);
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
  std::mutex mutex_;
  std::size_t most_;
  std::uint64_t left_out_ = 0;
  std::vector<TraceEvent> events_;
};

// One process (pid) per rank, with a lane each for computing, waiting, holds and every class of traffic;
// operations are async spans, all else slices. `first`: the rank of the first trace.
std::string chrome_trace(std::span<const Trace* const> of_rank, int first = 0);

struct TraceReport {
  // One sentence for each non-blocking micro-op that
  // - started, neither aged nor wanted, while a blocking micro-op waited or was in the transport, an operation
  //   that holds was ready or ran, or blocking traffic was announced (gradients give way);
  // - started, neither aged nor wanted, while one of a higher class, or of its class with a priority before
  //   its own, was queued (order);
  // - was queued for longer than `idle` at a stretch while nothing was in the transport and nothing held
  //   (work is conserved);
  // and one where events were left out, because nobody knows what they would show.
  std::vector<std::string> breaches;
  std::uint64_t aged = 0;    // micro-ops that started because they had been held for too long
  std::uint64_t wanted = 0;  // and because somebody waited for their operation
};
// `idle`: what a communication thread may take to see that the transport is free; in virtual time nothing.
TraceReport verify_trace(const Trace& trace, Time idle = kNever);

}  // namespace weft
