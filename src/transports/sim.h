// `sim`: virtual time, any number of ranks in one thread. The same coroutines and the same engines that run
// on real transports run here; a loop of events drives them instead of threads.
//
// An instant  Every rank that has something to do is polled until none has. Then virtual time jumps to the
//             earliest of: an event of the link model, a deadline of an attached Pollable, a delayed
//             arrival, a death. Only the ranks that this concerns are polled next, so a step costs the same
//             with 8 ranks and with 1,024. What coroutines compute takes the virtual time that it says
//             (weft/comm.h: compute, charge, and the consumers of messages), on the rank's own worker and
//             communication thread or on cores that all ranks share (sim_workers.h).
// A message   Up to the eager limit it enters the link when it is posted, and its send completes when the
//             last byte has left the send port (the payload is then copied once). Above the limit it enters
//             the link when its receive is posted (asking costs nothing) and its send completes at delivery:
//             the receiver reads the sender's span, no copy. A message is matched with its receive as soon
//             as both are posted, the k-th send with the k-th receive of (source, identity).
// Order       First in, first out per (source, destination, identity). Nothing else is ordered, and jitter
//             shows it: each message is late by a random time, drawn from the seed.
// Death       The rank is no longer polled, and what has not left its ports never does. After
//             detection_seconds every survivor has failure(), and its records with the dead rank end in
//             TransportError(peer_lost).
// Again       The same options and programs give the same events: event_hash() is a running hash of every
//             delivery in order.
//
// Limits: a cancelled send that has entered the link still arrives (from a copy); a cancelled receive takes
// the message it was matched with along. Payloads carry no checksum: nothing here can change them.
//
// Thread: everything, wake() included, on one thread.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "transports/link_model.h"
#include "weft/function_ref.h"
#include "weft/pollable.h"
#include "weft/transport.h"

namespace weft {

class SimWorkers;

struct SimDeath {
  int rank = 0;
  // Whichever comes first: at a time, or instead of posting its send of this number (from 0).
  Time at = kNever;
  std::uint64_t at_message = std::numeric_limits<std::uint64_t>::max();
};

struct SimOptions {
  LinkOptions link;                                                   // link.max_quanta of 0 becomes 64
  std::size_t eager_limit = std::numeric_limits<std::size_t>::max();  // 0: every send waits for its receive
  std::uint64_t seed = 0;
  double jitter_seconds = 0;  // each arrival is late by a random time up to this
  std::vector<SimDeath> deaths;
  double detection_seconds = 1e-3;
  int workers = 0;  // that compute for all ranks; 0: each rank has its own
  std::uint64_t job = 1;
};

struct SimStatistics {
  std::uint64_t messages = 0;    // that entered the link
  std::uint64_t deliveries = 0;  // that met their receive
  std::uint64_t instants = 0;    // points of virtual time
  std::uint64_t polls = 0;
  std::uint64_t alive = 0;  // messages from post until delivered and their senders told
  std::uint64_t peak_alive = 0;
};

class SimWorld {
 public:
  explicit SimWorld(SimOptions options);  // throws UsageError for options that make no sense
  ~SimWorld();                            // REQUIRES: nobody uses its transports any more
  SimWorld(const SimWorld&) = delete;
  SimWorld& operator=(const SimWorld&) = delete;

  int size() const;
  // Its wait() must never be called: the loop drives the rank.
  Transport& transport(int rank);
  SimWorkers& workers(int rank);  // for the endpoint of its engine
  // `rank` is driven by `pollable`, which must live while the world runs, or until it is detached.
  void attach(int rank, Pollable& pollable);
  void detach(int rank);

  // Until nothing is left to happen. What still waits then waits for ever: a deadlock, unless somebody set a
  // deadline.
  void run();
  // Until `done` (a named callable, asked once an instant). False if nothing is left to happen and it still
  // does not hold.
  bool run_until(FunctionRef<bool()> done);

  Time now() const;
  std::uint64_t event_hash() const;
  SimStatistics statistics() const;

 private:
  struct State;
  class Rank;
  std::unique_ptr<State> state_;
};

}  // namespace weft
