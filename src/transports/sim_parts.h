// The parts of `sim`: a message, a rank's end of the transport (sim_rank.cc) and the world with its event
// loop (sim.cc). sim.h says what they do together.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <limits>
#include <queue>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "transports/flow_order.h"
#include "transports/match_table.h"
#include "transports/records.h"
#include "transports/sim.h"
#include "transports/sim_workers.h"
#include "weft/error.h"
#include "wire/frame.h"

namespace weft {

// A message from its post until it was delivered and its sender has been told.
struct SimMessage : FlowNode {
  SimMessage* match_next = nullptr;  // among the messages that no receive has asked for
  SimMessage* match_previous = nullptr;
  wire::FrameBytes frame;
  Buffer copy;                 // of the payload, once the sender's memory may go
  SendRecord* send = nullptr;  // until it is completed or cancelled
  RecvRecord* recv = nullptr;  // from match to delivery
  std::size_t bytes = 0;
  std::size_t link_bytes = 0;  // each of which the link counts byte_scale times
  int to = 0;
  std::uint32_t transfer = 0;  // of the link model
  bool live = false;
  bool eager = false;
  bool matched = false;    // with a receive, which may have been cancelled since
  bool started = false;    // has entered the link
  bool on_link = false;    // and `transfer` is its number there
  bool left = false;       // its last byte has left the send port
  bool placed = false;     // the payload lies in the memory of its receive
  bool delayed = false;    // an event will let it arrive
  bool arrived = false;    // its last byte is there
  bool queued = false;     // in the inbox of its receiver
  bool handled = false;    // the time of its consumer has passed, or passes
  bool delivered = false;  // or dropped
  bool settled = false;    // the sender has nothing to do with it any more
};

inline std::exception_ptr sim_error(TransportError::Kind kind, int peer, const std::string& what) {
  return std::make_exception_ptr(TransportError(kind, peer, what));
}

class VirtualClock final : public Clock {
 public:
  Time now() const override { return time; }
  bool simulated() const override { return true; }
  Time time{0};
};

class SimWorld::Rank final : public Transport {
 public:
  Rank(State& world, int rank, SimWorkers workers)
      : world_(world), rank_(rank), workers_(std::move(workers)) {}

  std::string_view name() const override { return "sim"; }
  int rank() const override { return rank_; }
  int size() const override;
  const Clock& clock() const override;
  void post(SendRecord& send) noexcept override;
  void post(RecvRecord& recv) noexcept override;
  void cancel(TransferRecord& record) noexcept override;
  void give_way(Time until) noexcept override;
  bool poll() noexcept override;
  Time next_event() const override { return kNever; }  // the loop polls when there is something
  void wait(Time) noexcept override {
    std::fputs("weft: wait() on a rank of sim, which its event loop drives (SimWorld::run)\n", stderr);
    std::abort();
  }
  void wake() noexcept override;
  std::exception_ptr failure() const override { return failure_; }
  void close(const std::string& reason) noexcept override;
  TrafficCounters counters() const override { return counters_; }

  // The world's.
  struct Mail {
    SimMessage* message;
    bool to_sender;  // its part is over; else a delivery
  };
  std::exception_ptr refusal(int peer) const;
  void finish_send(SimMessage& m);
  bool handles(SimMessage& m);
  void take(SimMessage& m);
  void end_records();
  void lose_messages();
  void lose(SimMessage& m);
  void peer_gone(const Rank& peer, bool failed);
  void give_up_messages();
  void sent(SendRecord& send, std::exception_ptr error = nullptr) {
    send.transport_data = nullptr;
    if (send.observer != nullptr) send.observer->sent(send);
    send.complete(std::move(error));
  }

  State& world_;
  int rank_;
  SimWorkers workers_;
  bool gone_ = false;    // closed or dead
  bool dead_ = false;    // nobody polls it any more
  bool failed_ = false;  // the others stop because of it
  bool known_ = false;   // the others know that it is gone
  bool dirty_ = false;   // in the list of ranks to poll
  std::string farewell_;
  Pollable* pollable_ = nullptr;
  Time deadline_ = kNever;  // that stands in the set of deadlines
  Time gives_way_until_{0};
  std::uint64_t sends_posted_ = 0;
  std::uint64_t dies_at_message_ = std::numeric_limits<std::uint64_t>::max();
  std::exception_ptr failure_;
  std::exception_ptr closed_;
  MatchTable<RecvRecord> receives_;  // that wait for a message
  MatchTable<SimMessage> messages_;  // to this rank that wait for a receive
  FlowOrder order_;                  // of all messages to this rank
  std::vector<Mail> inbox_, reading_;
  TrafficCounters counters_;
};

struct SimWorld::State {
  explicit State(SimOptions o);

  struct Event {
    enum Kind : std::uint8_t { arrival, death, news } kind;  // news: the others learn that a rank is gone
    Time at;
    std::uint64_t sequence;
    SimMessage* message;
    int rank;
    friend bool operator<(const Event& a, const Event& b) {  // the earliest is the largest
      return a.at != b.at ? a.at > b.at : a.sequence > b.sequence;
    }
  };

  Rank& rank_at(int rank) { return *ranks[static_cast<std::size_t>(rank)]; }
  void mark(Rank& rank) {
    if (!std::exchange(rank.dirty_, true)) dirty.push_back(&rank);
  }
  SimMessage& make_message(SendRecord& send, int from);
  void release(SimMessage& m);
  void match(SimMessage& m, RecvRecord& recv);
  void start(SimMessage& m);
  void let_go_of_sender(SimMessage& m);
  void arrive(SimMessage& m);
  void offer(SimMessage& m);
  void tell_sender(SimMessage& m);
  void schedule(Time at, Event::Kind kind, SimMessage* message, int rank);
  void depart(Rank& rank, std::string farewell, bool failed, Time known_after);
  void die(Rank& rank, const std::string& how);
  void handle(const Event& event);
  void poll(Rank& rank);
  void settle();
  bool step();

  SimOptions options;
  LinkModel link;
  VirtualClock clock;
  Arena arena;
  std::vector<std::unique_ptr<Rank>> ranks;
  std::deque<SimMessage> pool;
  std::vector<SimMessage*> unused;
  std::vector<SimMessage*> in_flight;  // by transfer
  std::vector<Rank*> dirty;
  std::set<std::pair<Time, int>> deadlines;
  std::priority_queue<Event> events;
  std::uint64_t sequence = 0;
  std::uint64_t hash = 0;
  SimStatistics statistics;
};

}  // namespace weft
