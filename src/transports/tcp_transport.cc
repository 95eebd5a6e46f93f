// The tcp transport's loop, and how it ends: heartbeats, lost peers, goodbyes.
#include "transports/tcp_transport.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "weft/error.h"

namespace weft::tcp {

namespace {

constexpr Time kFine = 20ms;  // a shorter sleep is timed by a timer, a longer one to the millisecond
// Of a message that is finished for the sake of the goodbye behind it.
constexpr std::size_t kLongestDetached = 16 << 20;

const std::string kSaid = " (said rank ";

std::string seconds_text(Time t) {
  const std::string text = std::to_string(seconds(t));
  return text.substr(0, text.find('.') + 2) + " s";
}

// How a connection ended that nobody took leave on.
std::string ending_text(int error) {
  switch (error) {
    case 0:
      return "its connection ended without a goodbye (the process was killed or has crashed)";
    case ECONNRESET:
      return "its connection was reset (the process was killed or has crashed with messages unread, or its "
             "host "
             "or something on the way has forgotten the connection)";
    case ETIMEDOUT:
      return "its connection timed out, what was sent is not acknowledged (its host or the link is down)";
    default:
      return "its connection failed: " + std::generic_category().message(error);
  }
}

void check(const TcpOptions& options) {
  if (options.size < 1) throw UsageError("a job has at least one rank, not " + std::to_string(options.size));
  if (options.rank < 0 || options.rank >= options.size) {
    throw UsageError("rank " + std::to_string(options.rank) + " is not in a job of " +
                     std::to_string(options.size) + " ranks");
  }
  if (options.port == 0) throw UsageError("the rendezvous port is 0: set WEFT_PORT, the same on all ranks");
  if (options.heartbeat <= 0ns || options.dead_after < 2 * options.heartbeat) {
    throw UsageError(
        "a peer must be allowed to miss a heartbeat: WEFT_DEAD_AFTER is at least twice WEFT_HEARTBEAT, and "
        "both are positive");
  }
  if (options.connect_timeout <= 0ns) throw UsageError("the connect timeout must be positive");
  if (options.eager_limit > options.credit) throw UsageError("the eager limit is above the credit of a peer");
}

}  // namespace

TcpTransport::TcpTransport(const TcpOptions& options)
    : options_(options), job_(job_hash(options.job)), work_(io_.get_executor()), timer_(io_.get_executor()) {
  check(options);
  Mesh mesh;
  if (options.size > 1)
    mesh = form_mesh(io_, options_);
  else
    mesh.sockets.resize(1);
  counters_.wire_bytes_sent = mesh.bytes.sent;
  counters_.wire_bytes_received = mesh.bytes.received;
  for (int other = 0; other < size(); ++other) {
    std::optional<Socket>& socket = mesh.sockets[static_cast<std::size_t>(other)];
    if (!socket) {
      peers_.push_back(nullptr);
      continue;
    }
    // Credit frames carry their bytes as length, so the parser's limit is the larger one.
    const wire::Expected expect{.job = job_,
                                .epoch = options.epoch,
                                .source = other,
                                .max_length = std::max<std::uint64_t>(options.max_message, options.credit)};
    const Peer::Link link{.rank = other,
                          .expect = expect,
                          .checksum = options.checksum,
                          .counters = &counters_,
                          .progress = &progress_,
                          .notsent_lowat = options.notsent_lowat};
    peers_.push_back(std::make_unique<Peer>(std::move(*socket), link, static_cast<PeerEvents&>(*this)));
    peers_.back()->credit_left = options.credit;
    peers_.back()->start();
  }
  dirty_.reserve(peers_.size());
  last_tick_ = clock_.now();
  next_tick_ = last_tick_ + options_.heartbeat / 2;
}

TcpTransport::~TcpTransport() {
  close("");
  while (workers_.load(std::memory_order_acquire) > 0) sched_yield();
  take_finished();
  std::vector<Incoming*> left_over;
  arrived_.for_each([&](Incoming& in) { left_over.push_back(&in); });
  granted_.for_each([&](Incoming& in) { left_over.push_back(&in); });
  for (Incoming* in : left_over) drop(*in);
}

// ---- the loop ----

void TcpTransport::touch(Peer& p) {
  if (!std::exchange(p.dirty, true)) dirty_.push_back(&p);
}

void TcpTransport::write_dirty() {
  for (std::size_t i = 0; i < dirty_.size(); ++i) {  // grows while sends complete and others are posted
    dirty_[i]->dirty = false;
    dirty_[i]->write();
  }
  dirty_.clear();
}

bool TcpTransport::poll() noexcept {
  try {
    return turn();
  } catch (...) {  // out of memory, or a fault of ours: the engine sees failure() and ends what is under way
    if (!failure_) failure_ = std::current_exception();
    return true;
  }
}

bool TcpTransport::turn() {
  const std::uint64_t before = progress_;
  write_dirty();
  if (io_.stopped()) io_.restart();
  // Bounded: what completes here has to be seen by the engine while more comes in.
  for (std::size_t i = 0; i < 2 * peers_.size() + 2 && io_.poll_one() > 0; ++i) {
  }
  const bool finished = take_finished();
  write_dirty();  // grants and credits that have come up
  if (clock_.now() >= next_tick_) tick();
  return progress_ != before || finished;
}

void TcpTransport::tick() {
  const Time interval = options_.heartbeat / 2;
  const Time now = clock_.now();
  // If this rank itself did not run for a while, the others had no chance to be heard.
  const Time late = now - last_tick_ - interval;
  last_tick_ = now;
  next_tick_ = now + interval;
  if (gives_way_until_ > now) next_tick_ = std::min(next_tick_, gives_way_until_);
  if (closing_) return;
  for (const auto& p : peers_) {
    if (p == nullptr || !p->open() || failure_) continue;
    if (late > interval) p->excuse(late);
    if (now - p->heard() > options_.dead_after) {
      p->read();  // it may have been heard, but not listened to
      if (failure_ || !p->open()) continue;
      if (now - p->heard() > options_.dead_after) {
        const std::string text = "rank " + std::to_string(p->rank()) + " has not answered for " +
                                 seconds_text(options_.dead_after) + ": it is stopped or its link is down";
        fail(TransportError(Kind::peer_lost, p->rank(), text), text);
        return;
      }
    }
    if (p->gives_way()) touch(*p);  // the hold may be over
    if ((p->idle() || p->gives_way()) && now - p->spoken() >= options_.heartbeat * 3 / 4) {
      p->say(frame(wire::FrameKind::heartbeat));
      touch(*p);
    }
  }
  write_dirty();
}

void TcpTransport::wait(Time until) noexcept {
  try {
    write_dirty();
    if (finished_.load(std::memory_order_acquire) != nullptr) return;
    sleeping_.store(true);
    if (!woken_.load()) run_io(std::min(until, next_tick_));
  } catch (...) {
    if (!failure_) failure_ = std::current_exception();
  }
  sleeping_.store(false);
  woken_.exchange(false);  // an exchange, so that what the waker wrote before is seen from here on
}

void TcpTransport::wake() noexcept {
  woken_.store(true);
  if (sleeping_.load()) io_.stop();
}

// Until something was moved, the time has come, or wake().
void TcpTransport::run_io(Time until) {
  const std::uint64_t before = progress_;
  if (io_.stopped() && !woken_.load()) io_.restart();
  const Time start = clock_.now();
  if (until <= start) return;
  if (until - start < kFine) {
    timer_.expires_at(point(until));
    timer_.async_wait(InSlot(timer_slot_, [](const std::error_code&) {}));
    while (progress_ == before && !woken_.load() && clock_.now() < until && io_.run_one() > 0) {
    }
    timer_.cancel();
    return;
  }
  while (progress_ == before && !woken_.load() && clock_.now() < until &&
         io_.run_one_until(point(until)) > 0) {
  }
}

// ---- the end of a peer, and of all ----

wire::Frame TcpTransport::frame(wire::FrameKind kind) const {
  return {.kind = kind, .epoch = options_.epoch, .job = job_, .source = rank()};
}

std::exception_ptr TcpTransport::left_error(int rank) const {
  return std::make_exception_ptr(
      TransportError(Kind::peer_lost, rank, "rank " + std::to_string(rank) + " has left the job"));
}

void TcpTransport::gone(Peer& p, std::exception_ptr error) {
  if (failure_ || closing_ || p.left) return p.close();
  if (!error) {
    p.close();
    const std::string text = "rank " + std::to_string(p.rank()) + " is lost: " + ending_text(p.broken_by());
    return fail(TransportError(Kind::peer_lost, p.rank(), text), text);
  }
  try {
    std::rethrow_exception(error);
  } catch (const TransportError& e) {
    fail(e, e.what());
  } catch (const std::exception& e) {
    const std::string text = "rank " + std::to_string(rank()) + " could not take a message of rank " +
                             std::to_string(p.rank()) + ": " + e.what();
    fail(TransportError(Kind::corrupt, p.rank(), text), text);
  }
}

void TcpTransport::goodbye(Peer& p, const wire::Frame& frame, std::span<const std::byte> text) {
  if (text.empty()) return peer_left(p);
  // Who is to blame stands in the slot (one more than the rank), the kind in the codec.
  const int culprit = frame.id.slot >= 1 && frame.id.slot <= static_cast<std::uint32_t>(size())
                          ? static_cast<int>(frame.id.slot) - 1
                          : p.rank();
  const Kind kind = frame.codec <= static_cast<std::uint8_t>(Kind::closed) ? static_cast<Kind>(frame.codec)
                                                                           : Kind::peer_lost;
  // Whoever passes it on leaves the first speaker's name in it; one that speaks of itself needs none.
  std::string said = printable(text);
  if (culprit != p.rank() && said.find(kSaid) == std::string::npos)
    said += kSaid + std::to_string(p.rank()) + ")";
  p.left = true;
  fail(TransportError(kind, culprit, said), said);
}

void TcpTransport::peer_left(Peer& p) {
  p.left = true;
  p.close();
  end_records(p.rank(), left_error(p.rank()));
}

void TcpTransport::fail(const TransportError& error, const std::string& text) {
  if (failure_ || closing_) return;
  failure_ = std::make_exception_ptr(error);
  end_records(-1, failure_);
  say_goodbye(error.kind(), error.peer(), text);
  if (error.kind() == Kind::peer_lost && error.peer() >= 0 && error.peer() != rank())
    peer(error.peer())->give_up();
}

void TcpTransport::say_goodbye(Kind kind, int culprit, const std::string& text) {
  wire::Frame goodbye = frame(wire::FrameKind::goodbye);
  goodbye.codec = static_cast<std::uint8_t>(kind);
  goodbye.id.slot = static_cast<std::uint32_t>(culprit + 1);
  for (const auto& p : peers_) {
    if (p == nullptr || !p->open()) continue;
    if (!text.empty()) p->stop_listening();
    p->say_last(goodbye, text);
    touch(*p);
  }
  write_dirty();
}

void TcpTransport::end_records(int peer, const std::exception_ptr& error) {
  end_sends(peer, error);
  end_receives(peer, error);
  if (peer < 0) end_local_sends(error);
}

void TcpTransport::end_sends(int peer, const std::exception_ptr& error) {
  std::vector<Outgoing*> unsent;
  lanes_.for_each([&](Outgoing& message) {
    if (peer < 0 || message.key.source == peer) unsent.push_back(&message);
  });
  for (Outgoing* message : unsent) lanes_.remove(*message);
  for (const auto& p : peers_) {
    if (p == nullptr || (peer >= 0 && p->rank() != peer)) continue;
    p->clear_queue();
    Outgoing* body = p->body();
    if (body == nullptr) continue;
    SendRecord* record = body->record;
    if (p->open() && body->payload.size() > kLongestDetached) p->close();
    if (!p->open()) {
      drop(*p->take_body());
    } else if (record != nullptr) {
      detach(*body);
    }
    if (record != nullptr) finish(*record, error);
  }
  for (Outgoing* message : unsent) {
    SendRecord* record = message->record;
    drop(*message);
    if (record != nullptr) finish(*record, error);
  }
}

void TcpTransport::end_receives(int peer, const std::exception_ptr& error) {
  std::vector<RecvRecord*> posted;
  posted_.for_each([&](RecvRecord& recv) {
    if (peer < 0 || recv.peer == peer) posted.push_back(&recv);
  });
  for (RecvRecord* recv : posted) posted_.erase(*recv);
  std::vector<Incoming*> halfway;
  granted_.for_each([&](Incoming& in) {
    if (peer < 0 || in.key.source == peer) halfway.push_back(&in);
  });
  for (Incoming* in : halfway) granted_.erase(*in);
  for (const auto& p : peers_) {
    if (p == nullptr || p->reading == nullptr || (peer >= 0 && p->rank() != peer)) continue;
    p->drop_payload();
    halfway.push_back(std::exchange(p->reading, nullptr));
  }
  for (Incoming* in : halfway) {
    if (in->recv != nullptr) {
      in->recv->transport_data = nullptr;
      posted.push_back(in->recv);
    }
    drop(*in);
  }
  for (RecvRecord* recv : posted) recv->complete(error);
}

// Of this rank to itself, that no receive has met. (What a worker has is completed when it is done.)
void TcpTransport::end_local_sends(const std::exception_ptr& error) {
  std::vector<Incoming*> local;
  arrived_.for_each([&](Incoming& in) {
    if (in.local != nullptr) local.push_back(&in);
  });
  for (Incoming* in : local) {
    arrived_.erase(*in);
    SendRecord& send = *in->local;
    drop(*in);
    finish(send, error);
  }
}

// A rank that leaves well waits for each peer as long as that takes anything, and dead_after more. After a
// failure nobody wants the data, only the reason: dead_after in all.
void TcpTransport::flush() {
  const Time deadline = failure_ ? later(clock_.now(), options_.dead_after) : kNever;
  for (const auto& p : peers_) {
    if (p != nullptr && p->open()) p->read();  // what was heard of it counts from here
  }
  for (;;) {
    write_dirty();
    bool all = true;
    for (const auto& p : peers_) all = (p == nullptr || p->flushed(options_.dead_after)) && all;
    const Time now = clock_.now();
    if (all || now >= deadline) return;
    if (io_.stopped()) io_.restart();
    io_.run_one_until(point(std::min(deadline, now + 2ms)));
  }
}

void TcpTransport::close(const std::string& reason) noexcept {
  if (std::exchange(closing_, true)) return;
  try {
    leave(reason);
  } catch (...) {
    if (!failure_) failure_ = std::current_exception();
  }
}

void TcpTransport::leave(const std::string& reason) {
  const std::exception_ptr why =
      std::make_exception_ptr(TransportError(Kind::closed, -1,
                                             "rank " + std::to_string(rank()) + " has closed its transport" +
                                                 (reason.empty() ? "" : ": " + reason)));
  if (!failure_ && !reason.empty()) {
    failure_ = why;
    end_records(-1, why);
    say_goodbye(Kind::peer_lost, rank(), "rank " + std::to_string(rank()) + " has stopped: " + reason);
  } else if (!failure_) {
    say_goodbye(Kind::peer_lost, rank(), "");
  }
  give_way(Time{});  // nothing waits for its turn any more
  flush();
  for (const auto& p : peers_) {
    if (p != nullptr) p->close();
  }
  if (!failure_) failure_ = why;
  end_records(-1, failure_);
  drain_io();
  next_tick_ = kNever;
}

// Handlers of closed sockets are in the queue, and their memory is in the peers.
void TcpTransport::drain_io() {
  timer_.cancel();
  if (io_.stopped()) io_.restart();
  while (io_.poll() > 0) {
  }
}

}  // namespace weft::tcp

namespace weft {

std::unique_ptr<Transport> connect_tcp(const TcpOptions& options) {
  return std::make_unique<tcp::TcpTransport>(options);
}

}  // namespace weft
