#include "transports/link_model.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "weft/error.h"

namespace weft {

namespace {

[[noreturn]] void refuse(const std::string& what) { throw UsageError("link: " + what); }

void check_time(double seconds, const char* name) {
  if (!(seconds >= 0 && seconds < 3600)) {
    refuse(std::string(name) + " must be between 0 and 3600 seconds, not " + std::to_string(seconds));
  }
}

void check_positive(double value, const char* name) {
  if (!(value > 0)) refuse(std::string(name) + " must be positive, not " + std::to_string(value));
}

}  // namespace

void check(const LinkOptions& o) {
  if (o.ranks < 1) refuse("a job needs at least one rank, not " + std::to_string(o.ranks));
  if (o.nodes < 0 || o.nodes > o.ranks) {
    refuse(std::to_string(o.ranks) + " ranks cannot be split over " + std::to_string(o.nodes) + " nodes");
  }
  check_time(o.latency_seconds, "latency_seconds");
  check_time(o.scale_up_latency_seconds, "scale_up_latency_seconds");
  check_time(o.overhead_seconds, "overhead_seconds");
  check_positive(o.bytes_per_second, "bytes_per_second");
  check_positive(o.scale_up_bytes_per_second, "scale_up_bytes_per_second");
  check_positive(o.byte_scale, "byte_scale");
  if (!std::isfinite(o.byte_scale)) refuse("byte_scale must be finite");
  if (!(o.frame_bytes >= 0 && o.frame_bytes <= 65536)) refuse("frame_bytes must be between 0 and 65536");
  if (o.quantum_bytes == 0) refuse("quantum_bytes must be positive");
  if (o.max_quanta < 0) refuse("max_quanta must not be negative");
}

int node_of(const LinkOptions& o, int rank) {
  return o.nodes == 0 ? rank : static_cast<int>(static_cast<std::int64_t>(rank) * o.nodes / o.ranks);
}

LinkModel::LinkModel(const LinkOptions& options) : options_(options) {
  check(options);
  const auto in_ticks = [](double seconds) {
    return static_cast<Tick>(std::llround(seconds * 1e9 * kTicks));
  };
  networks_[0] = {in_ticks(options.latency_seconds), 1e9 * kTicks / options.bytes_per_second};
  networks_[1] = {in_ticks(options.scale_up_latency_seconds),
                  1e9 * kTicks / options.scale_up_bytes_per_second};
  overhead_ = in_ticks(options.overhead_seconds);
  scale_up_ports_ = options.nodes == 0 ? 0 : static_cast<std::uint32_t>(options.ranks);
  const std::uint32_t scale_out_ports =
      static_cast<std::uint32_t>(options.nodes == 0 ? options.ranks : options.nodes);
  send_ports_.resize(scale_up_ports_ + scale_out_ports);
  receive_free_.resize(scale_up_ports_ + scale_out_ports);
}

LinkModel::Tick LinkModel::to_ticks(Time t) {
  constexpr Tick kLast = std::numeric_limits<Tick>::max() / 2 / kTicks;  // leaves room to add to it
  return std::clamp<Tick>(t.count(), 0, kLast) * kTicks;
}

// Of the bytes [from, to) of a transfer. By position, so that the quanta of a transfer sum to its whole
// without a rounding each.
LinkModel::Tick LinkModel::ticks(const Network& network, double from, double to) const {
  return std::llround(to * network.ticks_per_byte) - std::llround(from * network.ticks_per_byte);
}

void LinkModel::push(Tick at, Kind kind, std::uint32_t subject) {
  heap_.push_back({at, sequence_++, subject, kind});
  std::push_heap(heap_.begin(), heap_.end(), later);
}

void LinkModel::release(std::uint32_t transfer) { unused_.push_back(transfer); }

void LinkModel::append(Flow& flow, std::uint32_t transfer) {
  transfers_[transfer].next = kNone;
  (flow.first == kNone ? flow.first : transfers_[flow.last].next) = transfer;
  flow.last = transfer;
}

// At the end of its operation's transfers; an operation that has none here comes behind the others.
void LinkModel::enter(SendPort& port, std::uint32_t transfer, std::uint64_t operation) {
  for (std::uint32_t id = operation == 0 ? kNone : port.first; id != kNone; id = flows_[id].next) {
    if (flows_[id].operation == operation) return append(flows_[id], transfer);
  }
  std::uint32_t id = static_cast<std::uint32_t>(flows_.size());
  if (unused_flows_.empty()) {
    flows_.emplace_back();
  } else {
    id = unused_flows_.back();
    unused_flows_.pop_back();
  }
  flows_[id] = {.operation = operation};
  append(flows_[id], transfer);
  (port.first == kNone ? port.first : flows_[port.last].next) = id;
  port.last = id;
}

// The flow whose turn it is lets go of the transfer whose turn it is.
std::uint32_t LinkModel::take_first(SendPort& port) {
  Flow& flow = flows_[port.first];
  const std::uint32_t transfer = flow.first;
  flow.first = transfers_[transfer].next;
  return transfer;
}

// Of the first flow; one that has nothing left leaves the port.
void LinkModel::end_turn(SendPort& port, bool goes_on) {
  const std::uint32_t id = port.first;
  if (flows_[id].first == kNone) {
    port.first = flows_[id].next;
    unused_flows_.push_back(id);
  } else if (goes_on && flows_[id].next != kNone) {
    port.first = std::exchange(flows_[id].next, kNone);
    flows_[port.last].next = id;
    port.last = id;
  }
}

// Whoever is next and may begin comes first; those that wait keep their places. False if nobody may.
bool LinkModel::bring_forward(Flow& flow, Tick at) {
  std::uint32_t before = kNone;
  for (std::uint32_t id = flow.first; id != kNone; before = id, id = transfers_[id].next) {
    Transfer& x = transfers_[id];
    if (x.cancelled || (!x.begun() && x.begins > at)) continue;
    if (before == kNone) return true;
    transfers_[before].next = x.next;
    if (flow.last == id) flow.last = before;
    x.next = std::exchange(flow.first, id);
    return true;
  }
  return false;
}

bool LinkModel::bring_forward(SendPort& port, Tick at) {
  std::uint32_t before = kNone;
  for (std::uint32_t id = port.first; id != kNone; before = id, id = flows_[id].next) {
    if (!bring_forward(flows_[id], at)) continue;
    if (before == kNone) return true;
    flows_[before].next = flows_[id].next;
    if (port.last == id) port.last = before;
    flows_[id].next = std::exchange(port.first, id);
    return true;
  }
  return false;
}

void LinkModel::serve_if_idle(std::uint32_t port, Tick at) {
  SendPort& idle = send_ports_[port];
  const Tick from = std::max(at, idle.free_at);
  if (!idle.busy && bring_forward(idle, from)) serve(port, from);
}

void LinkModel::give_way(int rank, Time until, Time now, FunctionRef<bool(std::uint32_t transfer)> waits) {
  const Tick begins = to_ticks(until), at = to_ticks(now);
  const auto look_at = [&](std::uint32_t port) {
    bool later = false;
    for (std::uint32_t flow = send_ports_[port].first; flow != kNone; flow = flows_[flow].next) {
      for (std::uint32_t id = flows_[flow].first; id != kNone; id = transfers_[id].next) {
        Transfer& x = transfers_[id];
        if (x.from != rank || x.begun() || x.cancelled) continue;
        x.begins = waits(id) ? begins : 0;
        later |= x.begins > at;
      }
    }
    if (later && until != kNever) push(begins, Kind::may_begin, port);
    serve_if_idle(port, at);
  };
  if (scale_up_ports_ > 0) look_at(static_cast<std::uint32_t>(rank));
  look_at(scale_up_ports_ + static_cast<std::uint32_t>(node_of(options_, rank)));
}

std::uint32_t LinkModel::add(int from, int to, std::uint64_t payload_bytes, Time at, Time begins,
                             std::uint64_t operation) {
  std::uint32_t id;
  if (unused_.empty()) {
    id = static_cast<std::uint32_t>(transfers_.size());
    transfers_.emplace_back();
  } else {
    id = unused_.back();
    unused_.pop_back();
    transfers_[id] = Transfer{};
  }
  const Tick ready = to_ticks(at);
  if (from == to) {
    transfers_[id].arrives = ready;
    push(ready, Kind::own, id);
    return id;
  }
  const int from_node = node_of(options_, from);
  const int to_node = node_of(options_, to);
  const bool inside = options_.nodes != 0 && from_node == to_node;
  Transfer& x = transfers_[id];
  x.send_port =
      inside ? static_cast<std::uint32_t>(from) : scale_up_ports_ + static_cast<std::uint32_t>(from_node);
  x.receive_port =
      inside ? static_cast<std::uint32_t>(to) : scale_up_ports_ + static_cast<std::uint32_t>(to_node);
  x.from = from;
  x.begins = to_ticks(begins);
  x.bytes = static_cast<double>(payload_bytes) * options_.byte_scale + options_.frame_bytes;
  x.quantum = static_cast<double>(options_.quantum_bytes);
  if (options_.max_quanta > 0) x.quantum = std::max(x.quantum, x.bytes / options_.max_quanta);
  if (network_of(x.send_port).ticks_per_byte == 0) x.quantum = x.bytes;
  enter(send_ports_[x.send_port], id, operation);
  if (x.begins > ready && begins != kNever) push(x.begins, Kind::may_begin, x.send_port);
  serve_if_idle(x.send_port, ready);
  return id;
}

void LinkModel::cancel(std::uint32_t transfer) { transfers_[transfer].cancelled = true; }

// The port begins its next quantum, or goes idle.
void LinkModel::serve(std::uint32_t port_index, Tick at) {
  SendPort& port = send_ports_[port_index];
  while (port.first != kNone && transfers_[first_of(port)].cancelled) {
    release(take_first(port));
    end_turn(port, /*goes_on=*/false);
  }
  port.busy = bring_forward(port, at);
  port.free_at = at;
  if (!port.busy) return;
  const std::uint32_t first = first_of(port);
  Transfer& x = transfers_[first];
  if (!x.paid && overhead_ > 0) {
    x.paid = port.overhead = true;
    port.free_at = at + overhead_;
    push(port.free_at, Kind::port_free, port_index);
    return;
  }
  const Network& network = network_of(port_index);
  const bool alone = flows_[port.first].next == kNone;  // else turns are of equal length
  const double quantum =
      alone || network.ticks_per_byte == 0 ? x.quantum : static_cast<double>(options_.quantum_bytes);
  const double end = x.moved + quantum >= x.bytes ? x.bytes : x.moved + quantum;
  const Tick duration = ticks(network, x.moved, end);
  x.moved = end;
  port.free_at = at + duration;
  push(port.free_at, Kind::port_free, port_index);
  // All quanta of this network begin in order of time and have the same latency, so this is their order of
  // arrival too.
  Tick& receive_free = receive_free_[x.receive_port];
  receive_free = std::max(at + network.latency, receive_free) + duration;
  if (end == x.bytes) {
    x.arrives = receive_free;
    push(x.arrives, Kind::arrived, first);
  }
}

void LinkModel::port_free(std::uint32_t port_index, Tick at, Notify notify) {
  SendPort& port = send_ports_[port_index];
  std::uint32_t sent = kNone;
  if (port.overhead) {
    port.overhead = false;
  } else {
    const std::uint32_t first = take_first(port);
    if (transfers_[first].arrives < 0)
      append(flows_[port.first], first);
    else if (!transfers_[first].cancelled)
      sent = first;
    end_turn(port, /*goes_on=*/true);
  }
  serve(port_index, at);
  if (sent != kNone) notify(sent, LinkNotice::sent, to_time(at));
}

void LinkModel::advance(Time now, Notify notify) {
  const Tick until = to_ticks(now);
  while (!heap_.empty() && heap_.front().at <= until) {
    std::pop_heap(heap_.begin(), heap_.end(), later);
    const Event event = heap_.back();
    heap_.pop_back();
    if (event.kind == Kind::port_free) {
      port_free(event.subject, event.at, notify);
      continue;
    }
    if (event.kind == Kind::may_begin) {
      serve_if_idle(event.subject, event.at);
      continue;
    }
    release(event.subject);
    if (transfers_[event.subject].cancelled) continue;
    const Time at = to_time(event.at);
    if (event.kind == Kind::own) notify(event.subject, LinkNotice::sent, at);
    notify(event.subject, LinkNotice::arrived, at);
  }
}

Time LinkModel::earliest_arrival(std::uint32_t transfer) const {
  const Transfer& x = transfers_[transfer];
  if (x.arrives >= 0) return to_time(x.arrives);
  const Network& network = network_of(x.send_port);
  const Tick from = std::max(send_ports_[x.send_port].free_at, x.begun() ? 0 : x.begins);
  const Tick begins = from + (x.paid ? 0 : overhead_) + network.latency;
  return to_time(std::max(begins, receive_free_[x.receive_port]) + ticks(network, x.moved, x.bytes));
}

}  // namespace weft
