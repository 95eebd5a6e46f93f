// `faulty`: faults on purpose, drawn from a seed, so that every failure can be shown to end in the right
// error and never in wrong data or in a hang.
//
//   FaultyTransport  stands in front of any transport: delays sends (messages of different peers and
//                    identities overtake each other; those of one keep their order), and lets its rank die at
//                    a given message
//   make_tamper      works inside `threads`, on messages in flight behind their checksums: loses, shortens
//                    and changes them
//
// What happens to a message depends on (seed, source, destination, identity, how many of these were before
// it) and on nothing else, so a run with the same seed meets the same faults whatever its timing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "transports/decorator.h"
#include "transports/threads.h"
#include "weft/traffic.h"

namespace weft {

// Probabilities are per message.
struct FaultOptions {
  std::uint64_t seed = 1;
  // FaultyTransport
  double delay = 0;  // that it waits, for a time of up to
  Time max_delay = 1ms;
  std::optional<TrafficClass> delay_only;  // what is of another class does not wait
  std::uint64_t die_at_message = 0;        // the n-th send of this rank, from 1; it is not sent. 0: never
  std::string last_words;                  // said to the peers at death; if empty the rank falls silent
  // make_tamper
  double drop = 0;
  double truncate = 0;       // to a random shorter length; the frame still says the old one
  double corrupt = 0;        // one bit of the payload, or of the frame where there is no payload
  double corrupt_frame = 0;  // one bit of the frame
};

// Throws UsageError for a probability outside 0 .. 1.
void check(const FaultOptions& options);

// For ThreadsOptions::tamper; its copies share their state. Any thread. REQUIRES: outlives every message it
// has touched (ThreadsWorld keeps it that long).
Tamper make_tamper(const FaultOptions& options);

// The n-th message from here to a peer with this identity.
class MessageNumbers {
 public:
  std::uint32_t next(int from, int to, const Identity& id);

 private:
  std::unordered_map<std::uint64_t, std::uint32_t> numbers_;  // by a hash of 64 bits
};

class FaultyTransport final : public Decorator {
 public:
  FaultyTransport(Transport& inner, FaultOptions options);

  bool dead() const { return dead_; }
  std::uint64_t messages_delayed() const { return delayed_; }

  void post(SendRecord& send) noexcept override;
  void post(RecvRecord& recv) noexcept override;
  void cancel(TransferRecord& record) noexcept override;
  bool poll() noexcept override;
  Time next_event() const override;
  void wait(Time until) noexcept override;
  // Once this rank is dead: an error of kind closed. The operations of this rank end with it.
  std::exception_ptr failure() const override { return failure_ ? failure_ : inner_.failure(); }
  void close(const std::string& reason) noexcept override;

 private:
  struct Held {
    SendRecord* send;
    Time due;
  };
  Time delay_of(const SendRecord& send);
  std::vector<Held>::iterator first_due();
  void die() noexcept;

  FaultOptions options_;
  MessageNumbers numbers_;
  std::vector<Held> held_;  // in order of posting; within a peer and identity also in order of due times
  std::uint64_t sends_ = 0;
  std::uint64_t delayed_ = 0;
  bool dead_ = false;
  std::exception_ptr failure_;
};

}  // namespace weft
