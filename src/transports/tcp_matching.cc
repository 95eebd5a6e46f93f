// Messages of the tcp transport: how sends become frames, how frames meet receives.
#include <sched.h>

#include <algorithm>
#include <new>
#include <utility>

#include "base/worker_pool.h"
#include "transports/delivery.h"
#include "transports/tcp_transport.h"
#include "weft/error.h"

namespace weft::tcp {

namespace {

// What an unexpected message costs its receiver: also an empty one takes memory.
constexpr std::size_t charge_of(std::uint64_t length) {
  return static_cast<std::size_t>(length) + wire::kFrameBytes;
}

constexpr std::size_t kMostRequests = 1 << 20;  // of one peer that wait here: only a hostile one has more

[[noreturn]] void corrupt(int peer, const std::string& what) {
  throw TransportError(TransportError::Kind::corrupt, peer,
                       "frame from rank " + std::to_string(peer) + ": " + what);
}

}  // namespace

// ---- sends ----

void TcpTransport::finish(SendRecord& send, std::exception_ptr error) {
  send.transport_data = nullptr;
  if (send.observer != nullptr) send.observer->sent(send);
  send.complete(std::move(error));
}

void TcpTransport::drop(Outgoing& message) {
  message.~Outgoing();
  arena_.deallocate(&message, sizeof(Outgoing));
}

void TcpTransport::post(SendRecord& send) noexcept {
  try {
    if (failure_) return finish(send, failure_);
    if (send.peer < 0 || send.peer >= size())
      throw UsageError("there is no rank " + std::to_string(send.peer));
    if (send.payload.size() > options_.max_message) {
      throw UsageError("a message of " + std::to_string(send.payload.size()) +
                       " bytes is above the limit of " + std::to_string(options_.max_message));
    }
    if (send.peer == rank()) return send_to_self(send);
    Peer& p = *peer(send.peer);
    if (p.left) return finish(send, left_error(p.rank()));
    send_to(p, send);
  } catch (...) {
    finish(send, std::current_exception());
  }
}

void TcpTransport::send_to(Peer& p, SendRecord& send) {
  auto& message = *new (arena_.allocate(sizeof(Outgoing))) Outgoing();
  message.key = {p.rank(), send.id};
  message.record = &send;
  message.frame = frame_of(send, job_, options_.epoch, rank());
  message.payload = send.payload;
  message.traffic = send.operation.traffic;
  message.priority = send.operation.priority;
  message.sequence = sequence_++;
  send.transport_data = &message;

  using State = Outgoing::State;
  const Outgoing* before = lanes_.last(message.key);
  if (before != nullptr)
    std::tie(message.traffic, message.priority) = std::tuple(before->traffic, before->priority);
  const std::size_t length = send.payload.size();
  const bool eager = options_.eager_limit > 0 && length <= options_.eager_limit &&
                     charge_of(length) <= p.credit_left &&
                     (before == nullptr || before->state == State::eager);
  if (eager) {
    p.credit_left -= charge_of(length);
    message.state = State::eager;
    p.enqueue(message);
  } else if (before != nullptr && (before->state == State::eager || before->state == State::asking)) {
    message.state = State::asking;  // its request must not overtake them
    p.enqueue(message);
  } else {
    message.state = State::requested;
    message.frame.kind = wire::FrameKind::request;
    p.say(message.frame);
  }
  lanes_.append(message);
  touch(p);
}

void TcpTransport::begun(Outgoing& message) {
  lanes_.remove(message);
  message.state = Outgoing::State::writing;
}

bool TcpTransport::may_begin(const Outgoing& message) {
  using State = Outgoing::State;
  const bool asks = message.state == State::asking;
  // First what was posted first under its key. A request may overtake what has asked before it.
  for (const Outgoing* m = lanes_.first(message.key); m != nullptr && m != &message; m = m->lane_next) {
    if (!asks || m->state == State::eager || m->state == State::asking) return false;
  }
  if (asks || message.traffic == TrafficClass::blocking || gives_way_until_ == Time{0}) return true;
  if (message.record != nullptr && message.record->operation.waited_for) return true;
  return clock_.now() >= gives_way_until_;
}

void TcpTransport::give_way(Time until) noexcept {
  const bool over = until <= clock_.now();
  gives_way_until_ = over ? Time{0} : until;
  if (!over) next_tick_ = std::min(next_tick_, until);  // which looks at those that wait
  for (const auto& p : peers_) {
    if (p != nullptr && p->gives_way()) touch(*p);
  }
}

void TcpTransport::sent(Outgoing& message) {
  if (message.record != nullptr) finish(*message.record);
  drop(message);
}

void TcpTransport::granted(Peer& p, const wire::Frame& frame) {
  Outgoing* message = lanes_.first({p.rank(), frame.id});
  while (message != nullptr && message->state != Outgoing::State::requested) message = message->lane_next;
  if (message == nullptr || message->frame.length != frame.length)
    corrupt(p.rank(), "it grants what was not asked for");
  if (message->record == nullptr) {  // cancelled: the receiver waits for its own deadline
    lanes_.remove(*message);
    drop(*message);
    return;
  }
  message->state = Outgoing::State::granted;
  p.enqueue(*message);
  touch(p);
}

// The payload goes on living here, so that the sender gets its memory back and the receiver the whole frame.
void TcpTransport::detach(Outgoing& message) {
  message.detached = Buffer(arena_, message.payload.size());
  std::copy(message.payload.begin(), message.payload.end(), message.detached.data());
  message.payload = message.detached.span();
  message.record = nullptr;
}

// ---- receives ----

Incoming& TcpTransport::make_incoming(const MatchKey& key, const wire::Frame& frame) {
  auto& in = *new (arena_.allocate(sizeof(Incoming))) Incoming();
  in.key = key;
  in.frame = frame;
  return in;
}

void TcpTransport::drop(Incoming& in) {
  if (in.eager) give_back_credit(*peer(in.key.source), charge_of(in.frame.length));
  in.~Incoming();
  arena_.deallocate(&in, sizeof(Incoming));
}

void TcpTransport::give_back_credit(Peer& p, std::size_t bytes) {
  p.owed += bytes;
  if (p.owed < options_.credit / 4 || !p.open() || p.left || failure_) return;
  wire::Frame credit = frame(wire::FrameKind::credit);
  credit.length = p.owed;
  p.held -= p.owed;
  p.owed = 0;
  p.say(credit);
  touch(p);
}

void TcpTransport::send_to_self(SendRecord& send) {
  wire::Frame frame = frame_of(send, job_, options_.epoch, rank());
  Incoming& in = make_incoming({rank(), send.id}, frame);
  in.state = Incoming::State::waiting;
  in.local = &send;
  send.transport_data = &in;
  if (RecvRecord* recv = posted_.pop(in.key))
    match(in, *recv);
  else
    arrived_.push(in);
}

void TcpTransport::post(RecvRecord& recv) noexcept {
  try {
    if (failure_) return recv.complete(failure_);
    if (recv.peer < 0 || recv.peer >= size())
      throw UsageError("there is no rank " + std::to_string(recv.peer));
    if (Incoming* in = arrived_.pop(recv.key)) return match(*in, recv);
    if (recv.peer != rank() && peer(recv.peer)->left) return recv.complete(left_error(recv.peer));
    posted_.push(recv);
  } catch (...) {
    recv.complete(std::current_exception());
  }
}

bool TcpTransport::bind(Incoming& in, RecvRecord& recv) {
  try {
    check_arrival(recv, in.frame, rank());
    if (recv.sink.kind == Sink::Kind::keep && in.state != Incoming::State::waiting) {
      recv.sink.kept = Buffer(recv.operation.executor->arena(), static_cast<std::size_t>(in.frame.length));
    }
  } catch (...) {
    recv.complete(std::current_exception());
    return false;
  }
  in.recv = &recv;
  recv.transport_data = &in;
  return true;
}

// The oldest message of a key meets the oldest receive of it.
void TcpTransport::match(Incoming& in, RecvRecord& recv) {
  const bool suits = bind(in, recv);
  if (in.state == Incoming::State::requested) {
    Peer& p = *peer(in.key.source);
    --p.requests;
    if (p.left || !p.open()) {
      if (suits) {
        recv.transport_data = nullptr;
        recv.complete(left_error(p.rank()));
      }
      return drop(in);
    }
    in.discard = !suits;  // the sender is let go all the same, as it would be after a short message
    return grant(in);
  }
  if (suits) return give(in);
  if (in.local != nullptr) finish(*in.local);
  drop(in);
}

void TcpTransport::grant(Incoming& in) {
  in.state = Incoming::State::granted;
  granted_.push(in);
  Peer& p = *peer(in.key.source);
  wire::Frame grant = frame(wire::FrameKind::grant);
  grant.id = in.frame.id;
  grant.length = in.frame.length;
  p.say(grant);
  touch(p);
}

std::span<std::byte> TcpTransport::landing(Peer& p, const wire::Frame& frame) {
  const MatchKey key{p.rank(), frame.id};
  Incoming* in = granted_.front(key);
  if (in != nullptr) {
    if (in->frame.length != frame.length) corrupt(p.rank(), "its length is not the one that was granted");
    granted_.erase(*in);
    in->frame = frame;
  } else {
    if (frame.length > options_.eager_limit || charge_of(frame.length) > options_.credit - p.held) {
      corrupt(p.rank(), std::to_string(frame.length) + " bytes were sent without asking");
    }
    in = &make_incoming(key, frame);
    in->eager = true;
    p.held += charge_of(frame.length);
    if (arrived_.front(key) == nullptr) {
      if (RecvRecord* recv = posted_.pop(key)) in->discard = !bind(*in, *recv);
    }
  }
  in->state = Incoming::State::reading;
  p.reading = in;
  if (in->discard) return {};
  if (in->recv != nullptr && in->recv->sink.kind == Sink::Kind::into) return in->recv->sink.into;
  if (in->recv != nullptr && in->recv->sink.kind == Sink::Kind::keep) return in->recv->sink.kept.span();
  in->buffer = Buffer(arena_, static_cast<std::size_t>(frame.length));
  return in->buffer.span();
}

void TcpTransport::landed(Peer& p, const wire::Frame& frame) {
  Incoming& in = *std::exchange(p.reading, nullptr);
  counters_.messages_received += 1;
  counters_.payload_bytes_received += frame.length;
  if (in.discard) return drop(in);
  in.state = Incoming::State::waiting;
  if (in.recv != nullptr) {
    if (in.recv->sink.kind == Sink::Kind::consume) return give(in);
    RecvRecord& recv = *in.recv;  // its payload was read into place
    recv.transport_data = nullptr;
    drop(in);
    return recv.complete();
  }
  // A receive that was posted while the payload came has found nothing and waits; otherwise the message does.
  if (RecvRecord* recv = posted_.pop(in.key))
    match(in, *recv);
  else
    arrived_.push(in);
}

void TcpTransport::give(Incoming& in) {
  RecvRecord& recv = *in.recv;
  const std::span<const std::byte> payload =
      in.local != nullptr ? in.local->payload : std::span<const std::byte>(in.buffer.span());
  if (recv.operation.pool != nullptr && payload.size() > options_.worker_bytes) return consume(in);
  std::exception_ptr error;
  try {
    deliver(recv, payload, recv.operation.executor->arena());
  } catch (...) {
    error = std::current_exception();
  }
  recv.transport_data = nullptr;
  if (in.local != nullptr) finish(*in.local);
  drop(in);
  recv.complete(std::move(error));
}

void TcpTransport::consume(Incoming& in) {
  in.state = Incoming::State::consuming;
  in.transport = this;
  workers_.fetch_add(1, std::memory_order_relaxed);
  in.recv->operation.pool->submit(FunctionRef<void()>(&in, [](void* target) {
    auto& job = *static_cast<Incoming*>(target);
    TcpTransport& self = *job.transport;
    try {
      const std::span<const std::byte> payload =
          job.local != nullptr ? job.local->payload : job.buffer.span();
      deliver(*job.recv, payload, job.recv->operation.executor->arena());
    } catch (...) {
      job.thrown = std::current_exception();
    }
    job.finished.store(true, std::memory_order_release);
    job.next_finished = self.finished_.load(std::memory_order_relaxed);
    while (!self.finished_.compare_exchange_weak(job.next_finished, &job, std::memory_order_release,
                                                 std::memory_order_relaxed)) {
    }
    self.wake();
    self.workers_.fetch_sub(1, std::memory_order_release);
  }));
}

bool TcpTransport::take_finished() {
  Incoming* job = finished_.exchange(nullptr, std::memory_order_acquire);
  const bool any = job != nullptr;
  while (job != nullptr) {
    Incoming& in = *std::exchange(job, job->next_finished);
    RecvRecord* recv = in.recv;
    const std::exception_ptr thrown = in.thrown;
    if (in.local != nullptr) finish(*in.local);
    drop(in);
    if (recv != nullptr) {
      recv->transport_data = nullptr;
      recv->complete(thrown);
    }
  }
  return any;
}

// ---- frames without payload ----

void TcpTransport::control(Peer& p, const wire::Frame& frame) {
  switch (frame.kind) {
    case wire::FrameKind::heartbeat:
      return;
    case wire::FrameKind::grant:
      return granted(p, frame);
    case wire::FrameKind::credit:
      if (frame.length > options_.credit - p.credit_left)
        corrupt(p.rank(), "it gives back more credit than was used");
      p.credit_left += static_cast<std::size_t>(frame.length);
      return;
    case wire::FrameKind::request: {
      if (frame.length > options_.max_message)
        corrupt(p.rank(), "it asks for more than the limit of a message");
      if (p.requests >= kMostRequests) corrupt(p.rank(), "too many requests wait here");
      Incoming& in = make_incoming({p.rank(), frame.id}, frame);
      in.state = Incoming::State::requested;
      ++p.requests;
      if (RecvRecord* recv = arrived_.front(in.key) == nullptr ? posted_.pop(in.key) : nullptr)
        return match(in, *recv);
      arrived_.push(in);
      return;
    }
    case wire::FrameKind::data:
    case wire::FrameKind::goodbye:
      break;
  }
}

// ---- cancelling ----

void TcpTransport::cancel(TransferRecord& record) noexcept {
  if (record.done) return;
  if (auto* recv = dynamic_cast<RecvRecord*>(&record))
    cancel_recv(*recv);
  else
    cancel_send(static_cast<SendRecord&>(record));
}

void TcpTransport::cancel_recv(RecvRecord& recv) {
  auto* in = static_cast<Incoming*>(std::exchange(recv.transport_data, nullptr));
  if (in == nullptr) return posted_.erase(recv);
  if (in->state == Incoming::State::consuming) {
    while (!in->finished.load(std::memory_order_acquire)) sched_yield();
  } else {
    in->discard = true;
    if (in->state == Incoming::State::reading) peer(in->key.source)->drop_payload();
  }
  in->recv = nullptr;
}

void TcpTransport::cancel_send(SendRecord& send) {
  if (send.peer == rank()) {
    auto& in = *static_cast<Incoming*>(std::exchange(send.transport_data, nullptr));
    if (in.state == Incoming::State::consuming) {
      while (!in.finished.load(std::memory_order_acquire)) sched_yield();
      in.local = nullptr;
    } else {
      arrived_.erase(in);
      drop(in);
    }
  } else if (auto* message = static_cast<Outgoing*>(std::exchange(send.transport_data, nullptr))) {
    using State = Outgoing::State;
    Peer& p = *peer(send.peer);
    switch (message->state) {
      case State::eager:
        p.credit_left += charge_of(message->payload.size());
        [[fallthrough]];
      case State::asking:
        p.dequeue(*message);
        lanes_.remove(*message);
        drop(*message);
        break;
      case State::requested:
        message->record = nullptr;
        break;  // stays, to take the grant that will come
      case State::granted:
      case State::writing:
        detach(*message);
        break;
    }
  }
  if (send.observer != nullptr) send.observer->sent(send);
}

}  // namespace weft::tcp
