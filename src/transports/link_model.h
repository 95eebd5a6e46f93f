// The model of links and ports, in a time of its own. `sim` runs it in virtual time, `shaped` against the
// wall clock: there is one model, so that what one predicts the other does.
//
// Ports        Without nodes, every rank has one send port and one receive port of the link's rate. With
//              nodes, the ranks of a node (contiguous runs, as even as can be) share one scale-out send port
//              and one scale-out receive port, and each rank has a scale-up send and receive port for
//              traffic inside its node. The two networks do not disturb each other.
// Sharing      The operations in flight on a send port take turns, one quantum each, and in a turn of its own
//              the transfers of an operation do: one that has many peers at once gets no more of the port
//              than one that has one. Transfers that name no operation are operations of their own. Overhead
//              occupies the send port before the first quantum of a message.
// Cut-through  The head of a quantum reaches the receive port one latency after it left; that port serves
//              quanta in order of arrival, each for q/B, so a lone message takes overhead + latency +
//              bytes/B. Between the ports is a switch with room for everything: a busy receive port delays
//              arrivals, never a sender.
// Bytes        Each payload byte counts byte_scale bytes. A frame counts frame_bytes, unscaled: 0 by
//              default, because the cost formulas of the algorithms count payload only.
// Giving way   A transfer that has not begun may be told to wait for a point in time. The port serves others
//              meanwhile, or nobody.
// Free         A rank that sends to itself occupies no port and takes no time.
//
// Two notices a transfer: `sent` when its last byte has left the send port, `arrived` when it has left the
// receive port; never in the other order. Events at the same time come in the order in which they were
// caused, so equal calls give equal notices.
//
// Resolution is 1/1024 ns (a notice is rounded up to a nanosecond), range 50 days: start the clock near
// zero. Cost: two heap operations for a transfer of one quantum, one more for each further quantum.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "weft/clock.h"
#include "weft/function_ref.h"

namespace weft {

struct LinkOptions {
  static constexpr double kUnlimited = std::numeric_limits<double>::infinity();

  int ranks = 1;
  double latency_seconds = 0;
  double bytes_per_second = kUnlimited;  // of a rank's port; with nodes, of the node's scale-out port
  int nodes = 0;                         // 0: every rank is a node of its own
  double scale_up_latency_seconds = 0;
  double scale_up_bytes_per_second = kUnlimited;
  double overhead_seconds = 0;  // of a message, on its send port
  double byte_scale = 1;
  double frame_bytes = 0;  // that a message adds to its payload
  std::uint64_t quantum_bytes = 65536;
  int max_quanta = 0;  // a long transfer that is alone on its port takes larger quanta instead of more than
                       // these; 0: it does not
};

enum class LinkNotice : std::uint8_t { sent, arrived };

// Throws UsageError for rates that are not positive, negative or infinite times, NaN, and more nodes than
// ranks.
void check(const LinkOptions& options);
// The node of a rank; REQUIRES: checked options.
int node_of(const LinkOptions& options, int rank);

// Thread: none of its own, and no lock.
class LinkModel {
 public:
  // `at` is the ideal time, which may lie before the time that advance() was given.
  using Notify = FunctionRef<void(std::uint32_t transfer, LinkNotice notice, Time at)>;

  explicit LinkModel(const LinkOptions& options);  // throws UsageError as check() does

  // A transfer of `payload_bytes` that is ready at `at` and begins at `begins` or later. The number that is
  // returned is free for reuse after its `arrived`. `at` may lie before events that have happened: the
  // transfer then starts as if it had been known, as far as its ports were idle. `operation`: the same for all
  // ranks' transfers of one; 0: it is one of its own.
  std::uint32_t add(int from, int to, std::uint64_t payload_bytes, Time at, Time begins = Time{0},
                    std::uint64_t operation = 0);
  // Of this rank's transfers that have not begun, those for which `waits` holds begin at `until` or later,
  // the others may begin now. `waits` may not call this object.
  void give_way(int rank, Time until, Time now, FunctionRef<bool(std::uint32_t transfer)> waits);
  // No more notices of this transfer; what has not left the port never does. REQUIRES: not arrived.
  void cancel(std::uint32_t transfer);

  Time next_event() const { return heap_.empty() ? kNever : to_time(heap_.front().at); }
  // Lets everything happen that is due at `now`. `notify` may not call this object.
  void advance(Time now, Notify notify);

  // Not before this time will the transfer arrive: exact once its last quantum has begun; before that, as if
  // no other transfer were on its port. Only grows, while nothing is cancelled or let begin earlier.
  // REQUIRES: not arrived.
  Time earliest_arrival(std::uint32_t transfer) const;

  std::uint64_t events() const { return sequence_; }

 private:
  using Tick = std::int64_t;
  static constexpr Tick kTicks = 1024;  // in a nanosecond
  static constexpr std::uint32_t kNone = 0xffff'ffffu;

  struct Network {
    Tick latency = 0;
    double ticks_per_byte = 0;
  };
  struct Transfer {
    double bytes = 0, moved = 0, quantum = 0;
    Tick arrives = -1;  // known when the last quantum has begun
    std::uint32_t send_port = 0, receive_port = 0;
    std::uint32_t next = kNone;  // of its operation, on its send port
    int from = 0;
    Tick begins = 0;    // not before
    bool paid = false;  // the overhead
    bool cancelled = false;
    bool begun() const { return paid || moved > 0 || arrives >= 0; }
  };
  // The transfers of an operation that are on a send port, in the order of their turns.
  struct Flow {
    std::uint64_t operation = 0;
    std::uint32_t first = kNone, last = kNone;
    std::uint32_t next = kNone;  // on its send port
  };
  struct SendPort {
    Tick free_at = 0;                           // end of what it does, or since when it is idle
    std::uint32_t first = kNone, last = kNone;  // flows, none of them empty, in the order of their turns
    bool busy = false;
    bool overhead = false;  // is being paid, for the first
  };
  enum class Kind : std::uint8_t { port_free, may_begin, arrived, own };
  struct Event {
    Tick at;
    std::uint64_t sequence;
    std::uint32_t subject;  // a port or a transfer
    Kind kind;
  };

  static Tick to_ticks(Time t);
  static Time to_time(Tick t) { return Time((t + kTicks - 1) / kTicks); }
  static bool later(const Event& a, const Event& b) {
    return a.at != b.at ? a.at > b.at : a.sequence > b.sequence;
  }
  const Network& network_of(std::uint32_t port) const { return networks_[port < scale_up_ports_ ? 1 : 0]; }
  Tick ticks(const Network& network, double from, double to) const;
  void push(Tick at, Kind kind, std::uint32_t subject);
  void release(std::uint32_t transfer);
  void enter(SendPort& port, std::uint32_t transfer, std::uint64_t operation);
  void append(Flow& flow, std::uint32_t transfer);
  std::uint32_t first_of(const SendPort& port) const { return flows_[port.first].first; }
  std::uint32_t take_first(SendPort& port);
  void end_turn(SendPort& port, bool goes_on);
  bool bring_forward(Flow& flow, Tick at);
  bool bring_forward(SendPort& port, Tick at);
  void serve_if_idle(std::uint32_t port, Tick at);
  void serve(std::uint32_t port, Tick at);
  void port_free(std::uint32_t port, Tick at, Notify notify);

  LinkOptions options_;
  Network networks_[2];  // scale-out, scale-up
  Tick overhead_ = 0;
  std::uint32_t scale_up_ports_ = 0;
  // With nodes: a scale-up port for each rank, then a scale-out port for each node.
  std::vector<SendPort> send_ports_;
  std::vector<Tick> receive_free_;
  std::vector<Transfer> transfers_;
  std::vector<std::uint32_t> unused_;
  std::vector<Flow> flows_;
  std::vector<std::uint32_t> unused_flows_;
  std::vector<Event> heap_;
  std::uint64_t sequence_ = 0;
};

}  // namespace weft
