#include <sched.h>

#include <algorithm>
#include <cstring>
#include <functional>

#include "transports/delivery.h"
#include "transports/mpi_transport.h"
#include "weft/error.h"
#include "wire/crc32c.h"

namespace weft::mpi {

// ---- sending ----

Outgoing& MpiTransport::take_outgoing() {
  if (free_outgoing_.empty()) {
    Outgoing& fresh = memory_->outgoing.emplace_back();
    fresh.head = Buffer(memory_->arena, wire::kFrameBytes + options_.bounce_bytes);
    return fresh;
  }
  Outgoing& out = *free_outgoing_.back();
  free_outgoing_.pop_back();
  return out;
}

bool MpiTransport::start_send(Outgoing& out, const std::byte* data, std::size_t bytes, const Route& to) {
  MPI_Request request = MPI_REQUEST_NULL;
  const int code = MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, to.peer, to.tag, to.comm, &request);
  if (code != MPI_SUCCESS) {
    fail(code, -1, "MPI_Isend");
    return false;
  }
  requests_.push_back(request);
  owners_.push_back({Owner::Role::outgoing, &out});
  ++out.pending;
  return true;
}

void MpiTransport::post(SendRecord& send) noexcept {
  const std::size_t length = send.payload.size();
  Route to{};
  try {
    if (closed_ || failure_) std::rethrow_exception(refusal());
    if (length > options_.max_message) {
      throw UsageError("mpi: a message of " + std::to_string(length) + " bytes is above max_message, " +
                       std::to_string(options_.max_message));
    }
    to = route(send);
  } catch (...) {
    sent(send, std::current_exception());
    return;
  }
  stir();
  wire::Frame frame = frame_of(send, options_.job, options_.epoch, rank_);
  if (options_.checksum) frame.payload_crc = wire::crc32c(send.payload);
  const wire::FrameBytes encoded = wire::encode_frame(frame);
  Outgoing& out = take_outgoing();
  std::memcpy(out.head.data(), encoded.data(), encoded.size());
  counters_.messages_sent += 1;
  counters_.payload_bytes_sent += length;
  counters_.wire_bytes_sent += length + wire::kFrameBytes;

  if (length <= options_.bounce_bytes) {
    if (length > 0) std::memcpy(out.head.data() + wire::kFrameBytes, send.payload.data(), length);
    const bool started = start_send(out, out.head.data(), wire::kFrameBytes + length, to);
    if (!started) release(out);
    sent(send, started ? nullptr : failure_);
    return;
  }
  bool started = start_send(out, out.head.data(), wire::kFrameBytes, to);
  for (std::size_t at = 0; started && at < length; at += options_.piece_limit) {
    started = start_send(out, send.payload.data() + at, std::min(options_.piece_limit, length - at), to);
  }
  if (started) {
    out.record = &send;
    send.transport_data = &out;
  } else {
    if (out.pending == 0) release(out);
    sent(send, failure_);
  }
}

// ---- receiving ----

bool MpiTransport::start_recv(Lane& lane, Owner::Role role, std::byte* data, std::size_t bytes) {
  MPI_Request request = MPI_REQUEST_NULL;
  const int code =
      MPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, lane.source, lane.tag, lane.comm, &request);
  if (code != MPI_SUCCESS) {
    fail(code, lane.key.source, "MPI_Irecv");
    return false;
  }
  requests_.push_back(request);
  owners_.push_back({role, &lane});
  return true;
}

void MpiTransport::post(RecvRecord& recv) noexcept {
  Route from{};
  try {
    if (closed_ || failure_) std::rethrow_exception(refusal());
    from = route(recv);
  } catch (...) {
    recv.complete(std::current_exception());
    return;
  }
  stir();
  Lane& lane = lane_of(recv, from);
  append(lane, recv);
  if (lane.state == Lane::State::arrived)
    open_message(lane);
  else
    advance(lane);
}

Lane& MpiTransport::lane_of(const RecvRecord& recv, const Route& from) {
  const Identity lane_id{
      .group = recv.id.group, .slot = static_cast<std::uint32_t>(from.tag), .step = 0, .hop = 0};
  const MatchKey key{recv.peer, lane_id};
  if (Lane* lane = lanes_.front(key)) return *lane;
  if (free_lanes_.empty()) {
    Lane& fresh = memory_->lanes.emplace_back();
    fresh.head = Buffer(memory_->arena, wire::kFrameBytes + options_.bounce_bytes);
    free_lanes_.push_back(&fresh);
  }
  Lane& lane = *free_lanes_.back();
  free_lanes_.pop_back();
  lane.key = key;
  lane.comm = from.comm;
  lane.source = from.peer;
  lane.tag = from.tag;
  lanes_.push(lane);
  return lane;
}

void MpiTransport::append(Lane& lane, RecvRecord& recv) {
  recv.transport_data = &lane;
  recv.match_next = nullptr;
  recv.match_previous = lane.last;
  (lane.last != nullptr ? lane.last->match_next : lane.first) = &recv;
  lane.last = &recv;
}

void MpiTransport::unlink(Lane& lane, RecvRecord& recv) {
  (recv.match_previous != nullptr ? recv.match_previous->match_next : lane.first) = recv.match_next;
  (recv.match_next != nullptr ? recv.match_next->match_previous : lane.last) = recv.match_previous;
  recv.match_next = recv.match_previous = nullptr;
  recv.transport_data = nullptr;
}

// After any change: refuses, listens for the next message, or gives the lane back.
void MpiTransport::advance(Lane& lane) {
  if (lane.broken) {
    while (RecvRecord* recv = lane.first) {
      unlink(lane, *recv);
      recv->complete(lane.broken);
    }
    return;
  }
  if (lane.state != Lane::State::idle) return;
  if (lane.first == nullptr) {
    lanes_.erase(lane);
    free_lanes_.push_back(&lane);
  } else if (start_recv(lane, Owner::Role::head, lane.head.data(), lane.head.size())) {
    lane.state = Lane::State::listening;
  }
}

void MpiTransport::break_lane(Lane& lane, const std::exception_ptr& why) {
  lane.broken = why;
  lane.state = Lane::State::idle;
  advance(lane);
}

// The frame of the next message is here, and so is a receive for it.
void MpiTransport::open_message(Lane& lane) {
  RecvRecord& recv = *lane.first;
  bool behind = false;  // the payload follows the frame in one piece
  try {
    const auto corrupt = [&](const std::string& what) {
      throw TransportError(TransportError::Kind::corrupt, recv.peer,
                           "frame from rank " + std::to_string(recv.peer) + ": " + what);
    };
    if (lane.head_bytes < wire::kFrameBytes) corrupt("only " + std::to_string(lane.head_bytes) + " bytes");
    lane.frame = wire::parse_frame(lane.head.span().first<wire::kFrameBytes>(), recv.peer);
    wire::check_frame(lane.frame, {.job = options_.job,
                                   .epoch = options_.epoch,
                                   .source = recv.peer,
                                   .max_length = options_.max_message});
    if (lane.frame.kind != wire::FrameKind::data) corrupt("no data where data were expected");
    behind = lane.frame.length <= options_.bounce_bytes;
    const std::size_t announced = wire::kFrameBytes + (behind ? lane.frame.length : 0);
    if (lane.head_bytes != announced) {
      corrupt(std::to_string(lane.head_bytes) + " bytes came where " + std::to_string(announced) +
              " were announced");
    }
    check_arrival(recv, lane.frame, rank_);
  } catch (...) {
    break_lane(lane, std::current_exception());
    return;
  }
  unlink(lane, recv);
  recv.transport_data = &lane;
  lane.filling = &recv;
  if (behind)
    finish(lane, lane.head.span().subspan(wire::kFrameBytes, lane.frame.length), false);
  else
    fill(lane);
}

// Receives a long payload where it belongs.
void MpiTransport::fill(Lane& lane) {
  RecvRecord& recv = *lane.filling;
  const std::size_t length = lane.frame.length;
  try {
    switch (recv.sink.kind) {
      case Sink::Kind::into:
        lane.target = recv.sink.into;
        break;
      case Sink::Kind::consume:
        lane.staging = Buffer(memory_->arena, length);
        lane.target = lane.staging.span();
        break;
      case Sink::Kind::keep:
        recv.sink.kept = Buffer(recv.operation.executor->arena(), length);
        lane.target = recv.sink.kept.span();
        break;
    }
  } catch (...) {
    lane.filling = nullptr;
    recv.transport_data = nullptr;
    recv.complete(std::current_exception());
    break_lane(lane, std::current_exception());
    return;
  }
  lane.state = Lane::State::filling;
  lane.filled = 0;
  for (std::size_t at = 0; at < length; at += options_.piece_limit) {
    const std::size_t bytes = std::min(options_.piece_limit, length - at);
    if (!start_recv(lane, Owner::Role::piece, lane.target.data() + at, bytes))
      return;  // failure() reaches the record
    ++lane.pending;
  }
}

void MpiTransport::finish(Lane& lane, std::span<const std::byte> payload, bool in_place) {
  RecvRecord* recv = std::exchange(lane.filling, nullptr);
  counters_.messages_received += 1;
  counters_.payload_bytes_received += payload.size();
  counters_.wire_bytes_received += payload.size() + wire::kFrameBytes;
  std::exception_ptr problem;
  if (recv != nullptr) {
    try {
      if (options_.checksum) wire::check_payload(lane.frame, payload);
      if (!in_place) deliver(*recv, payload, recv->operation.executor->arena());
    } catch (...) {
      problem = std::current_exception();
    }
    recv->transport_data = nullptr;
  }
  lane.staging = Buffer();
  lane.target = {};
  lane.state = Lane::State::idle;
  advance(lane);
  if (recv != nullptr) recv->complete(problem);
}

// ---- letting go ----

void MpiTransport::cancel(TransferRecord& record) noexcept {
  if (record.transport_data == nullptr) return;
  if (auto* recv = dynamic_cast<RecvRecord*>(&record)) {
    cancel_recv(*recv);
    return;
  }
  auto& send = static_cast<SendRecord&>(record);
  static_cast<Outgoing*>(std::exchange(send.transport_data, nullptr))->record = nullptr;
  if (send.observer != nullptr) send.observer->sent(send);
}

void MpiTransport::cancel_recv(RecvRecord& recv) {
  Lane& lane = *static_cast<Lane*>(recv.transport_data);
  if (lane.filling != &recv) {
    unlink(lane, recv);
    if (lane.first == nullptr && lane.state == Lane::State::listening) cancel_head(lane);
    return;
  }
  recv.transport_data = nullptr;
  lane.filling = nullptr;
  if (recv.sink.kind == Sink::Kind::consume) return;  // the memory is ours
  const Time give_up = clock_.now() + kCancelPatience;
  while (!failure_ && lane.state == Lane::State::filling && lane.filling == nullptr) {
    if (clock_.now() > give_up) {
      failure_ = std::make_exception_ptr(TransportError(
          TransportError::Kind::peer_lost, recv.peer,
          "rank " + std::to_string(rank_) + ": mpi: a receive from rank " + std::to_string(recv.peer) +
              " was cancelled while its payload arrived, and the rest did not come within 0.1 s; end the "
              "job"));
      return;
    }
    if (collect())
      dispatch();
    else
      sched_yield();
  }
}

// Nobody waits for this lane's next message: MPI may forget the receive. If it has matched already, the frame
// arrives and waits in the lane for the next receive.
void MpiTransport::cancel_head(Lane& lane) {
  if (std::exchange(lane.cancelling, true)) return;
  for (std::size_t i = 0; i < owners_.size(); ++i) {
    if (owners_[i].role == Owner::Role::head && owners_[i].target == &lane) MPI_Cancel(&requests_[i]);
  }
}

// ---- progress ----

// Asks MPI what has completed. The requests leave the list here, so that handling an event may add others.
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
    int cancelled = 0;
    MPI_Get_count(&status, MPI_BYTE, &bytes);
    MPI_Test_cancelled(&status, &cancelled);
    events_.push_back({.owner = owners_[static_cast<std::size_t>(indices_[static_cast<std::size_t>(i)])],
                       .error = code == MPI_ERR_IN_STATUS ? status.MPI_ERROR : MPI_SUCCESS,
                       .bytes = bytes,
                       .cancelled = cancelled != 0});
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
  if (!collect()) return false;
  dispatch();
  stir();
  return true;
}

void MpiTransport::handle(const Event& event) {
  switch (event.owner.role) {
    case Owner::Role::outgoing: {
      Outgoing& out = *static_cast<Outgoing*>(event.owner.target);
      if (event.error != MPI_SUCCESS)
        fail(event.error, out.record != nullptr ? out.record->peer : -1, "a send");
      if (--out.pending > 0) break;
      SendRecord* record = std::exchange(out.record, nullptr);
      release(out);
      if (record == nullptr) break;
      record->transport_data = nullptr;
      sent(*record, failure_);
      break;
    }
    case Owner::Role::head:
      head_came(*static_cast<Lane*>(event.owner.target), event);
      break;
    case Owner::Role::piece:
      piece_came(*static_cast<Lane*>(event.owner.target), event);
      break;
    case Owner::Role::control:
      goodbye_came(event);
      break;
  }
}

void MpiTransport::head_came(Lane& lane, const Event& event) {
  lane.cancelling = false;
  if (event.cancelled) {
    lane.state = Lane::State::idle;
    advance(lane);
    return;
  }
  if (event.error != MPI_SUCCESS) {
    fail(event.error, lane.key.source, "a receive");
    break_lane(lane, failure_);
    return;
  }
  lane.head_bytes = static_cast<std::size_t>(event.bytes);
  lane.state = Lane::State::arrived;
  if (lane.first != nullptr) open_message(lane);
}

void MpiTransport::piece_came(Lane& lane, const Event& event) {
  if (event.error != MPI_SUCCESS) fail(event.error, lane.key.source, "a receive");
  lane.filled += static_cast<std::size_t>(event.bytes);
  if (--lane.pending > 0 || failure_) return;
  if (lane.filled == lane.frame.length) {
    finish(lane, lane.target, lane.staging.data() == nullptr);
    return;
  }
  failure_ = std::make_exception_ptr(TransportError(
      TransportError::Kind::corrupt, lane.key.source,
      "frame from rank " + std::to_string(lane.key.source) + ": length is " +
          std::to_string(lane.frame.length) + ", but " + std::to_string(lane.filled) + " bytes arrived"));
}

}  // namespace weft::mpi
