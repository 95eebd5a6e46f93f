#include <algorithm>
#include <cstring>
#include <functional>

#include "base/worker_pool.h"
#include "transports/delivery.h"
#include "transports/mpi_transport.h"
#include "weft/error.h"
#include "wire/crc32c.h"

namespace weft::mpi {

namespace {

// An object of a deque that is never given back, only reused.
template <class T>
T& take(std::vector<T*>& free, std::deque<T>& all) {
  if (free.empty()) return all.emplace_back();
  T& reused = *free.back();
  free.pop_back();
  return reused;
}

}  // namespace

void MpiTransport::check_peer(const TransferRecord& record) const {
  if (closed_ || failure_) std::rethrow_exception(refusal());
  if (record.peer < 0 || record.peer >= size_) {
    throw UsageError("mpi: rank " + std::to_string(record.peer) + " is outside the world of " +
                     std::to_string(size_));
  }
}

// ---- sending ----

Outgoing& MpiTransport::take_outgoing() {
  Outgoing& out = take(free_outgoing_, memory_->outgoing);
  if (out.head.data() == nullptr)
    out.head = Buffer(memory_->arena, wire::kFrameBytes + options_.bounce_bytes);
  return out;
}

bool MpiTransport::start_send(Outgoing& out, std::span<const std::byte> bytes, int peer, int tag) {
  MPI_Request request = MPI_REQUEST_NULL;
  const int code =
      MPI_Isend(bytes.data(), static_cast<int>(bytes.size()), MPI_BYTE, peer, tag, comm_, &request);
  if (code != MPI_SUCCESS) {
    fail(code, peer, "MPI_Isend");
    return false;
  }
  requests_.push_back(request);
  owners_.push_back({Owner::Role::outgoing, &out});
  ++out.pending;
  return true;
}

void MpiTransport::post(SendRecord& send) noexcept {
  const std::size_t length = send.payload.size();
  try {
    check_peer(send);
    if (length > options_.max_message) {
      throw UsageError("mpi: a message of " + std::to_string(length) + " bytes is above max_message, " +
                       std::to_string(options_.max_message));
    }
  } catch (...) {
    sent(send, std::current_exception());
    return;
  }
  stir();
  counters_.messages_sent += 1;
  counters_.payload_bytes_sent += length;
  counters_.wire_bytes_sent += length + wire::kFrameBytes;
  Outgoing& out = take_outgoing();
  out.record = &send;
  out.payload = send.payload;
  out.key = {send.peer, send.id};
  out.frame = frame_of(send, options_.job, options_.epoch, rank_);
  send.transport_data = &out;
  const bool first = summing_.front(out.key) == nullptr;
  if (options_.checksum && is_work(send.operation, length)) {
    summing_.push(out);
    out.after = [](MpiTransport& self, PoolWork& work) {
      self.leave_in_order(static_cast<Outgoing&>(work).key);
    };
    on_pool(send.operation, out, [](PoolWork& work) {
      auto& mine = static_cast<Outgoing&>(work);
      mine.frame.payload_crc = wire::crc32c(mine.payload);
    });
    return;
  }
  if (options_.checksum) out.frame.payload_crc = wire::crc32c(send.payload);
  if (first)
    leave(out);
  else
    summing_.push(out);
}

// What was posted first under its key leaves first.
void MpiTransport::leave_in_order(MatchKey key) {
  for (Outgoing* out = summing_.front(key); out != nullptr && !out->running; out = summing_.front(key)) {
    summing_.erase(*out);
    SendRecord* const send = out->record;
    if (send != nullptr && !failure_) {
      leave(*out);
      continue;
    }
    out->record = nullptr;
    release(*out);
    if (send == nullptr) continue;  // it was cancelled
    send->transport_data = nullptr;
    sent(*send, failure_);
  }
}

void MpiTransport::leave(Outgoing& out) {
  SendRecord& send = *out.record;
  const std::size_t length = out.payload.size();
  const std::span<std::byte> head = out.head.span();
  const wire::FrameBytes encoded = wire::encode_frame(out.frame);
  std::memcpy(head.data(), encoded.data(), encoded.size());
  if (!is_long(out.frame)) {
    if (length > 0) std::memcpy(head.data() + wire::kFrameBytes, out.payload.data(), length);
    out.record = nullptr;
    send.transport_data = nullptr;
    const bool started = start_send(out, head.first(wire::kFrameBytes + length), send.peer, kHeadTag);
    if (!started) release(out);
    sent(send, started ? nullptr : failure_);
    return;
  }
  bool started = start_send(out, head.first(wire::kFrameBytes), send.peer, kHeadTag);
  const int tag = tag_of(long_sent_[static_cast<std::size_t>(send.peer)]++);
  for (std::size_t at = 0; started && at < length; at += options_.piece_limit) {
    const std::size_t bytes = std::min(options_.piece_limit, length - at);
    started = start_send(out, out.payload.subspan(at, bytes), send.peer, tag);
  }
  if (started) return;
  out.record = nullptr;
  send.transport_data = nullptr;
  if (out.pending == 0) release(out);
  sent(send, failure_);
}

// ---- long computations ----

// `compute` touches nothing but the work and what it names.
void MpiTransport::on_pool(Operation& operation, PoolWork& work, void (*compute)(PoolWork&)) {
  work.transport = this;
  work.compute = compute;
  work.running = true;
  work.over.store(false, std::memory_order_relaxed);
  workers_.fetch_add(1, std::memory_order_relaxed);
  operation.pool->submit(FunctionRef<void()>(&work, [](void* target) {
    auto& mine = *static_cast<PoolWork*>(target);
    MpiTransport& self = *mine.transport;
    mine.compute(mine);
    mine.next = self.finished_.load(std::memory_order_relaxed);
    while (!self.finished_.compare_exchange_weak(mine.next, &mine, std::memory_order_release,
                                                 std::memory_order_relaxed)) {
    }
    mine.over.store(true, std::memory_order_release);
    self.wake();
    self.workers_.fetch_sub(1, std::memory_order_release);
  }));
}

bool MpiTransport::take_finished() {
  PoolWork* work = finished_.exchange(nullptr, std::memory_order_acquire);
  const bool any = work != nullptr;
  while (work != nullptr) {
    PoolWork& mine = *std::exchange(work, work->next);
    mine.wait_for_worker();  // it has only to say so
    mine.running = false;
    mine.after(*this, mine);
  }
  return any;
}

// ---- receiving ----

void MpiTransport::listen(Listener& listener) {
  MPI_Request request = MPI_REQUEST_NULL;
  const int code = MPI_Irecv(listener.head.data(), static_cast<int>(listener.head.size()), MPI_BYTE,
                             MPI_ANY_SOURCE, kHeadTag, comm_, &request);
  if (code != MPI_SUCCESS) {
    fail(code, -1, "MPI_Irecv");
    return;
  }
  requests_.push_back(request);
  owners_.push_back({Owner::Role::head, &listener});
}

void MpiTransport::post(RecvRecord& recv) noexcept {
  try {
    check_peer(recv);
  } catch (...) {
    recv.complete(std::current_exception());
    return;
  }
  stir();
  recv.transport_data = &waiting_;
  waiting_.push(recv);
  match(recv.key);
}

// What has come meets what waits for it, unless a long payload of the same key is still arriving.
void MpiTransport::match(const MatchKey& key) {
  while (arrived_.size() > 0 && filling_.front(key) == nullptr) {
    Arrival* arrival = arrived_.front(key);
    RecvRecord* recv = arrival != nullptr ? waiting_.pop(key) : nullptr;
    if (recv == nullptr) return;
    arrived_.erase(*arrival);
    open_message(*recv, arrival->frame, arrival->payload.span(), arrival->tag);
    arrival->payload = Buffer();
    free_arrivals_.push_back(arrival);
  }
}

// What cannot be read here makes everything behind it unreadable.
void MpiTransport::head_came(std::span<const std::byte> bytes, int source) {
  try {
    const auto corrupt = [source](const std::string& what) {
      throw TransportError(TransportError::Kind::corrupt, source,
                           "frame from rank " + std::to_string(source) + ": " + what);
    };
    if (bytes.size() < wire::kFrameBytes) corrupt("only " + std::to_string(bytes.size()) + " bytes");
    const wire::Frame frame = wire::parse_frame(bytes.first<wire::kFrameBytes>(), source);
    wire::check_frame(
        frame,
        {.job = options_.job, .epoch = options_.epoch, .source = source, .max_length = options_.max_message});
    const std::size_t announced = wire::kFrameBytes + (is_long(frame) ? 0 : frame.length);
    if (bytes.size() != announced) {
      corrupt(std::to_string(bytes.size()) + " bytes came where " + std::to_string(announced) +
              " were announced");
    }
    const std::span<const std::byte> behind = bytes.subspan(wire::kFrameBytes);
    if (frame.kind == wire::FrameKind::data)
      data_came(frame, behind);
    else if (frame.kind == wire::FrameKind::goodbye && !is_long(frame))
      goodbye_came(frame, behind);
    else
      corrupt("no data where data were expected");
  } catch (...) {
    if (!failure_) failure_ = std::current_exception();
  }
}

void MpiTransport::data_came(const wire::Frame& frame, std::span<const std::byte> payload) {
  const int tag = is_long(frame) ? tag_of(long_announced_[static_cast<std::size_t>(frame.source)]++) : 0;
  const MatchKey key{frame.source, frame.id};
  if (filling_.front(key) == nullptr) {
    if (RecvRecord* recv = waiting_.pop(key)) {
      open_message(*recv, frame, payload, tag);
      return;
    }
  }
  Arrival& arrival = take(free_arrivals_, memory_->arrivals);
  arrival.key = key;
  arrival.frame = frame;
  arrival.tag = tag;
  if (!payload.empty()) {
    arrival.payload = Buffer(memory_->arena, payload.size());
    std::memcpy(arrival.payload.data(), payload.data(), payload.size());
  }
  arrived_.push(arrival);
}

// A head has met its receive. A long payload that the receive refuses stays with MPI.
void MpiTransport::open_message(RecvRecord& recv, const wire::Frame& frame,
                                std::span<const std::byte> payload, int tag) {
  recv.transport_data = nullptr;
  try {
    check_arrival(recv, frame, rank_);
    if (is_long(frame)) {
      fill(recv, frame, tag);
      return;
    }
  } catch (...) {
    recv.complete(std::current_exception());
    return;
  }
  received(&recv, payload.size(), use(recv, frame, payload, false));
}

// Receives a long payload where it belongs.
void MpiTransport::fill(RecvRecord& recv, const wire::Frame& frame, int tag) {
  const std::size_t length = frame.length;
  Buffer staging;
  std::span<std::byte> target = recv.sink.into;
  if (recv.sink.kind == Sink::Kind::consume) {
    staging = Buffer(memory_->arena, length);
    target = staging.span();
  } else if (recv.sink.kind == Sink::Kind::keep) {
    recv.sink.kept = Buffer(recv.operation.executor->arena(), length);
    target = recv.sink.kept.span();
  }
  Incoming& incoming = take(free_incoming_, memory_->incoming);
  incoming.key = recv.key;
  filling_.push(incoming);
  incoming.record = &recv;
  incoming.frame = frame;
  incoming.staging = std::move(staging);
  incoming.target = target;
  incoming.filled = 0;
  recv.transport_data = &incoming;
  for (std::size_t at = 0; at < length; at += options_.piece_limit) {
    const auto bytes = static_cast<int>(std::min(options_.piece_limit, length - at));
    MPI_Request request = MPI_REQUEST_NULL;
    const int code = MPI_Irecv(target.data() + at, bytes, MPI_BYTE, frame.source, tag, comm_, &request);
    if (code != MPI_SUCCESS) {
      fail(code, frame.source, "MPI_Irecv");  // failure() reaches the record
      return;
    }
    requests_.push_back(request);
    owners_.push_back({Owner::Role::piece, &incoming});
    ++incoming.pending;
  }
}

// Checks a payload and hands it to its sink, on the engine's thread or on a worker.
std::exception_ptr MpiTransport::use(RecvRecord& recv, const wire::Frame& frame,
                                     std::span<const std::byte> payload, bool in_place) const noexcept {
  try {
    if (options_.checksum) wire::check_payload(frame, payload);
    if (!in_place) deliver(recv, payload, recv.operation.executor->arena());
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

// `recv` is null where nobody waits any more.
void MpiTransport::received(RecvRecord* recv, std::size_t bytes, std::exception_ptr problem) {
  counters_.messages_received += 1;
  counters_.payload_bytes_received += bytes;
  counters_.wire_bytes_received += bytes + wire::kFrameBytes;
  if (recv == nullptr) return;
  recv->transport_data = nullptr;
  recv->complete(std::move(problem));
}

// ---- progress ----

// Heads of one source fill the listeners in the order in which they were sent, and listeners are filled in
// the order in which they listen, though MPI may tell of them in another: so the oldest comes first.
void MpiTransport::take_heads() {
  while (!failure_ && memory_->listeners[oldest_listener_].filled) {
    Listener& listener = memory_->listeners[oldest_listener_];
    oldest_listener_ = (oldest_listener_ + 1) % kListeners;
    listener.filled = false;
    head_came(listener.head.span().first(listener.bytes), listener.source);
    listen(listener);
  }
}

// Asks MPI what has completed, once: with every question that finds nothing it may give its core away. The
// requests leave the list here, so that handling an event may add others.
bool MpiTransport::collect() {
  if (requests_.empty()) return false;
  const std::size_t count = requests_.size();
  if (indices_.size() < count) {
    indices_.resize(2 * count);
    statuses_.resize(2 * count);
  }
  int done = 0;
  const int code =
      MPI_Testsome(static_cast<int>(count), requests_.data(), &done, indices_.data(), statuses_.data());
  if (code != MPI_SUCCESS && code != MPI_ERR_IN_STATUS) {
    fail(code, -1, "MPI_Testsome");
    return true;
  }
  if (done == MPI_UNDEFINED || done == 0) return false;
  for (int i = 0; i < done; ++i) {
    const MPI_Status& status = statuses_[static_cast<std::size_t>(i)];
    int bytes = 0;
    MPI_Get_count(&status, MPI_BYTE, &bytes);
    events_.push_back({.owner = owners_[static_cast<std::size_t>(indices_[static_cast<std::size_t>(i)])],
                       .error = code == MPI_ERR_IN_STATUS ? status.MPI_ERROR : MPI_SUCCESS,
                       .bytes = bytes,
                       .source = status.MPI_SOURCE});
  }
  std::sort(indices_.begin(), indices_.begin() + done, std::greater<>());
  for (int i = 0; i < done; ++i) {
    const auto at = static_cast<std::size_t>(indices_[static_cast<std::size_t>(i)]);
    requests_[at] = requests_.back();
    owners_[at] = owners_.back();
    requests_.pop_back();
    owners_.pop_back();
  }
  return true;
}

// May be entered again from an observer or a cancel: each event is handled once.
void MpiTransport::dispatch() {
  while (next_to_handle_ < events_.size()) {
    const Event event = events_[next_to_handle_++];
    handle(event);
  }
  events_.clear();
  next_to_handle_ = 0;
}

bool MpiTransport::poll() noexcept {
  const bool computed = take_finished();
  if (!collect()) return computed;
  dispatch();
  stir();
  return true;
}

void MpiTransport::handle(const Event& event) {
  if (event.owner.role == Owner::Role::piece) {
    piece_came(*static_cast<Incoming*>(event.owner.target), event);
    return;
  }
  if (event.owner.role == Owner::Role::head) {
    if (event.error != MPI_SUCCESS) fail(event.error, -1, "a receive");
    Listener& listener = *static_cast<Listener*>(event.owner.target);
    listener.filled = true;
    listener.source = event.source;
    listener.bytes = static_cast<std::size_t>(event.bytes);
    take_heads();
    return;
  }
  Outgoing& out = *static_cast<Outgoing*>(event.owner.target);
  if (event.error != MPI_SUCCESS) fail(event.error, out.record != nullptr ? out.record->peer : -1, "a send");
  if (--out.pending > 0) return;
  SendRecord* record = std::exchange(out.record, nullptr);
  release(out);
  if (record == nullptr) return;
  record->transport_data = nullptr;
  sent(*record, failure_);
}

void MpiTransport::piece_came(Incoming& incoming, const Event& event) {
  const int source = incoming.frame.source;
  if (event.error != MPI_SUCCESS) fail(event.error, source, "a receive");
  incoming.filled += static_cast<std::size_t>(event.bytes);
  if (--incoming.pending > 0 || failure_) return;
  if (incoming.filled != incoming.frame.length) {
    failure_ = std::make_exception_ptr(TransportError(
        TransportError::Kind::corrupt, source,
        "frame from rank " + std::to_string(source) + ": length is " + std::to_string(incoming.frame.length) +
            ", but " + std::to_string(incoming.filled) + " bytes arrived"));
    return;
  }
  const auto compute = [](PoolWork& work) {
    auto& mine = static_cast<Incoming&>(work);
    mine.problem = mine.transport->use(*mine.record, mine.frame, mine.target, mine.staging.data() == nullptr);
  };
  incoming.problem = nullptr;
  incoming.transport = this;
  if (incoming.record != nullptr && is_work(incoming.record->operation, incoming.frame.length)) {
    incoming.after = [](MpiTransport& self, PoolWork& work) {
      self.payload_is_used(static_cast<Incoming&>(work));
    };
    on_pool(incoming.record->operation, incoming, compute);
    return;
  }
  if (incoming.record != nullptr) compute(incoming);
  payload_is_used(incoming);
}

void MpiTransport::payload_is_used(Incoming& incoming) {
  received(std::exchange(incoming.record, nullptr), incoming.frame.length, incoming.problem);
  incoming.staging = Buffer();
  incoming.target = {};
  filling_.erase(incoming);
  free_incoming_.push_back(&incoming);
  match(incoming.key);
}

}  // namespace weft::mpi
