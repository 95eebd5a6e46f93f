// One rank's end of `sim`: posting, matching, delivery; and what is left of a rank that closes or dies.
#include "transports/delivery.h"
#include "transports/sim_parts.h"

namespace weft {

int SimWorld::Rank::size() const { return static_cast<int>(world_.ranks.size()); }
const Clock& SimWorld::Rank::clock() const { return world_.clock; }
void SimWorld::Rank::wake() noexcept { world_.mark(*this); }

// Why nothing can be posted for `peer`, or null.
std::exception_ptr SimWorld::Rank::refusal(int peer) const {
  if (failure_) return failure_;
  if (closed_) return closed_;
  const Rank& other = world_.rank_at(peer);
  if (!other.known_ || peer == rank_) return nullptr;
  return sim_error(
      TransportError::Kind::peer_lost, peer,
      "rank " + std::to_string(rank_) + ": rank " + std::to_string(peer) + " " + other.farewell_);
}

void SimWorld::Rank::post(SendRecord& send) noexcept {
  send.transport_data = nullptr;
  if (!gone_ && sends_posted_ == dies_at_message_) {
    world_.die(*this, "at its message " + std::to_string(sends_posted_));
  }
  if (const std::exception_ptr error = refusal(send.peer)) return sent(send, error);
  ++sends_posted_;
  counters_.messages_sent += 1;
  counters_.payload_bytes_sent += send.payload.size();
  counters_.wire_bytes_sent += send.payload.size() + wire::kFrameBytes;
  SimMessage& m = world_.make_message(send, rank_);
  Rank& to = world_.rank_at(send.peer);
  to.order_.enter(m);
  if (RecvRecord* recv = to.receives_.pop(m.key))
    world_.match(m, *recv);
  else
    to.messages_.push(m);
  if (m.eager || m.matched) world_.start(m);
}

void SimWorld::Rank::post(RecvRecord& recv) noexcept {
  recv.transport_data = nullptr;
  if (failure_ || closed_) return recv.complete(refusal(rank_));
  if (SimMessage* m = messages_.pop(recv.key)) {
    world_.match(*m, recv);
    if (!m->started) world_.start(*m);
    world_.offer(*m);
  } else if (const std::exception_ptr error = refusal(recv.peer)) {
    recv.complete(error);
  } else {
    receives_.push(recv);
  }
}

void SimWorld::Rank::cancel(TransferRecord& record) noexcept {
  auto* m = static_cast<SimMessage*>(std::exchange(record.transport_data, nullptr));
  if (auto* recv = dynamic_cast<RecvRecord*>(&record)) {
    if (m != nullptr)
      m->recv = nullptr;
    else
      receives_.erase(*recv);
    return;
  }
  if (m == nullptr) return;
  if (m->started) {
    world_.let_go_of_sender(*m);
    m->send = nullptr;
  } else {  // nobody has asked for it, so it was never there
    m->send = nullptr;
    world_.rank_at(m->to).lose(*m);
  }
  if (auto& send = static_cast<SendRecord&>(record); send.observer != nullptr) send.observer->sent(send);
}

void SimWorld::Rank::give_way(Time until) noexcept {
  gives_way_until_ = until;
  const auto waits = [this](std::uint32_t transfer) {
    const SendRecord* send = world_.in_flight[transfer]->send;
    return send != nullptr && gives_way(*send);  // what was taken back makes room by going
  };
  world_.link.give_way(rank_, until, world_.clock.time, waits);
}

bool SimWorld::Rank::poll() noexcept {
  if (inbox_.empty()) return false;
  reading_.swap(inbox_);
  for (const Mail& mail : reading_) {
    if (mail.to_sender)
      finish_send(*mail.message);
    else
      take(*mail.message);
  }
  reading_.clear();
  return true;
}

void SimWorld::Rank::finish_send(SimMessage& m) {
  m.settled = true;
  if (SendRecord* send = m.send) {
    if (!m.delivered) world_.let_go_of_sender(m);
    m.send = nullptr;
    sent(*send);
  }
  world_.release(m);
}

// Its consumer needs time: the message comes again when that has passed.
bool SimWorld::Rank::handles(SimMessage& m) {
  if (m.recv == nullptr || std::exchange(m.handled, true)) return false;
  const Sink& sink = m.recv->sink;
  const double cost = sink.seconds_per_byte * static_cast<double>(m.bytes);
  if (sink.kind != Sink::Kind::consume || !(cost > 0)) return false;
  m.queued = false;
  m.delayed = true;
  world_.schedule(workers_.handle(world_.clock.time, cost), State::Event::arrival, &m, 0);
  return true;
}

void SimWorld::Rank::take(SimMessage& m) {
  if (handles(m)) return;
  if (RecvRecord* recv = std::exchange(m.recv, nullptr)) {
    recv->transport_data = nullptr;
    counters_.messages_received += 1;
    counters_.payload_bytes_received += m.bytes;
    counters_.wire_bytes_received += m.bytes + wire::kFrameBytes;
    ++world_.statistics.deliveries;
    const auto time = static_cast<std::uint64_t>(world_.clock.time.count());
    world_.hash =
        mix(world_.hash ^ mix(time ^ mix(hash_of(m.key) ^ m.bytes ^ static_cast<std::uint64_t>(m.to) << 40)));
    std::exception_ptr error;
    try {
      const wire::Frame frame = wire::parse_frame(m.frame, recv->peer);
      wire::check_frame(frame,
                        {.job = world_.options.job, .epoch = 0, .source = recv->peer, .max_length = m.bytes});
      check_arrival(*recv, frame, rank_);
      if (!m.placed) {
        const std::span<const std::byte> payload = m.send != nullptr ? m.send->payload : m.copy.span();
        deliver(*recv, payload, recv->operation.executor->arena());
      }
    } catch (...) {
      error = std::current_exception();
    }
    recv->complete(error);
  }
  m.delivered = true;
  if (auto* behind = static_cast<SimMessage*>(order_.leave(m))) world_.offer(*behind);
  if (m.eager)
    world_.release(m);  // its sender is told when it has left, not now
  else
    world_.tell_sender(m);
}

// ---- leaving ----

void SimWorld::Rank::close(const std::string& reason) noexcept {
  if (gone_) return;
  closed_ = sim_error(TransportError::Kind::closed, -1,
                      "rank " + std::to_string(rank_) + ": the transport is closed");
  const std::string farewell = "has left the job" + (reason.empty() ? reason : ": " + reason);
  world_.depart(*this, farewell, !reason.empty(), from_seconds(world_.options.link.latency_seconds));
}

// This rank is gone: nothing that it posted waits any longer. What it has sent goes on from copies.
void SimWorld::Rank::end_records() {
  const std::exception_ptr error = failure_ ? failure_ : closed_;
  for (SimMessage& m : world_.pool) {
    if (!m.live) continue;
    if (m.to == rank_ && m.recv != nullptr) {
      RecvRecord* recv = std::exchange(m.recv, nullptr);
      recv->transport_data = nullptr;
      recv->complete(error);
    }
    if (m.key.source == rank_ && m.send != nullptr) {
      world_.let_go_of_sender(m);
      SendRecord* send = std::exchange(m.send, nullptr);
      if (!m.started) world_.rank_at(m.to).lose(m);
      sent(*send, error);
    }
  }
  std::vector<RecvRecord*> waiting;
  receives_.for_each([&](RecvRecord& recv) { waiting.push_back(&recv); });
  for (RecvRecord* recv : waiting) {
    receives_.erase(*recv);
    recv->complete(error);
  }
}

// This rank is dead: what has not left its ports is lost, and whatever stands behind that in its flow.
void SimWorld::Rank::lose_messages() {
  std::vector<SimMessage*> flow;
  for (SimMessage& m : world_.pool) {
    if (!m.live || m.key.source != rank_ || m.left || m.delivered) continue;
    for (FlowNode* node = &m; node != nullptr; node = node->behind)
      flow.push_back(static_cast<SimMessage*>(node));
    for (; !flow.empty(); flow.pop_back())
      world_.rank_at(flow.back()->to).lose(*flow.back());  // the last first
  }
}

// A message to this rank that will not come. Its receive, if it has one, waits on.
void SimWorld::Rank::lose(SimMessage& m) {
  if (!m.matched) messages_.erase(m);
  if (RecvRecord* recv = std::exchange(m.recv, nullptr)) {
    recv->transport_data = nullptr;
    receives_.push(*recv);
  }
  if (std::exchange(m.on_link, false)) world_.link.cancel(m.transfer);
  m.delivered = true;
  if (!m.eager || !m.left) m.settled = true;  // otherwise a mail to the sender is on its way
  if (auto* behind = static_cast<SimMessage*>(order_.leave(m))) world_.offer(*behind);
  world_.release(m);
}

// This rank learns that another one is gone.
void SimWorld::Rank::peer_gone(const Rank& peer, bool failed) {
  if (gone_ || &peer == this) return;
  const std::exception_ptr error = refusal(peer.rank_);
  if (failed && !failure_) failure_ = error;
  std::vector<RecvRecord*> orphans;
  receives_.for_each([&](RecvRecord& recv) {
    if (recv.peer == peer.rank_ || failed) orphans.push_back(&recv);
  });
  for (RecvRecord* recv : orphans) {
    receives_.erase(*recv);
    recv->complete(error);
  }
  world_.mark(*this);
}

// This rank is known to be gone: its messages have no receiver.
void SimWorld::Rank::give_up_messages() {
  std::vector<SimMessage*> unread;
  messages_.for_each([&](SimMessage& m) { unread.push_back(&m); });
  for (SimMessage* m : unread) {
    if (m->started) {
      messages_.erase(*m);
      m->matched = true;  // with nobody: dropped when it arrives
      world_.offer(*m);
      continue;
    }
    SendRecord* send = std::exchange(m->send, nullptr);
    Rank& sender = world_.rank_at(m->key.source);
    lose(*m);
    if (send == nullptr) continue;
    sender.sent(*send, sender.refusal(rank_));
    world_.mark(sender);
  }
}

}  // namespace weft
