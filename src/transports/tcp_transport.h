// The tcp transport proper: which message meets which receive, credits, heartbeats, failure. Connections are
// in tcp_peer.h.
//
// Short messages (up to the eager limit) go at once while the peer's credit lasts. All others ask first:
// request -> grant when the receive is posted -> data, read straight into its memory. While one message of an
// identity waits for its grant, later ones of that identity ask too; so a data frame that finds a granted
// receive of its identity belongs to it, and order within an identity is the order of posting.
#pragma once

#include <array>
#include <asio/executor_work_guard.hpp>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "transports/tcp.h"
#include "transports/tcp_peer.h"
#include "transports/tcp_rendezvous.h"
#include "weft/error.h"

namespace weft::tcp {

class TcpTransport final : public Transport, private PeerEvents {
 public:
  explicit TcpTransport(const TcpOptions& options);  // connects; throws as connect_tcp does
  ~TcpTransport() override;
  TcpTransport(const TcpTransport&) = delete;
  TcpTransport& operator=(const TcpTransport&) = delete;

  std::string_view name() const override { return "tcp"; }
  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }
  const Clock& clock() const override { return clock_; }
  std::exception_ptr failure() const override { return failure_; }
  TrafficCounters counters() const override { return counters_; }

  void post(SendRecord& send) noexcept override;
  void post(RecvRecord& recv) noexcept override;
  void cancel(TransferRecord& record) noexcept override;
  void give_way(Time until) noexcept override;
  bool poll() noexcept override;
  Time next_event() const override { return next_tick_; }
  void wait(Time until) noexcept override;
  void wake() noexcept override;
  void close(const std::string& reason) noexcept override;

 private:
  using Kind = TransportError::Kind;

  // ---- tcp_transport.cc: the loop, peers and their end ----
  Peer* peer(int rank) const { return peers_[static_cast<std::size_t>(rank)].get(); }
  void touch(Peer& p);  // it has something to write
  void write_dirty();
  bool turn();  // poll(), which lets no exception out
  void tick();
  void run_io(Time until);
  // The first failure is the one that stays. `text` is what the others are told; they hear it from whoever
  // saw it first.
  void fail(const TransportError& error, const std::string& text);
  void say_goodbye(Kind kind, int culprit, const std::string& text);
  void peer_left(Peer& p);
  void end_records(int peer, const std::exception_ptr& error);  // of this peer, or of all (-1)
  void end_sends(int peer, const std::exception_ptr& error);
  void end_receives(int peer, const std::exception_ptr& error);
  void end_local_sends(const std::exception_ptr& error);
  void leave(const std::string& reason);
  void flush();
  void drain_io();
  std::exception_ptr left_error(int rank) const;
  wire::Frame frame(wire::FrameKind kind) const;
  void gone(Peer& p, std::exception_ptr error) override;
  void goodbye(Peer& p, const wire::Frame& frame, std::span<const std::byte> text) override;

  // ---- tcp_matching.cc: messages ----
  void send_to_self(SendRecord& send);
  void send_to(Peer& p, SendRecord& send);
  void match(Incoming& in, RecvRecord& recv);
  bool bind(Incoming& in,
            RecvRecord& recv);  // false: they do not suit each other, and the receive has its error
  void grant(Incoming& in);
  void give(Incoming& in);     // its payload is here and its receive too
  void consume(Incoming& in);  // on the pool
  bool take_finished();        // what the pool has done
  void give_back_credit(Peer& p, std::size_t bytes);
  void finish(SendRecord& send, std::exception_ptr error = nullptr);
  void drop(Outgoing& message);
  void drop(Incoming& in);
  void cancel_send(SendRecord& send);
  void cancel_recv(RecvRecord& recv);
  void detach(Outgoing& message);
  Incoming& make_incoming(const MatchKey& key, const wire::Frame& frame);
  void control(Peer& p, const wire::Frame& frame) override;
  void granted(Peer& p, const wire::Frame& frame);
  std::span<std::byte> landing(Peer& p, const wire::Frame& frame) override;
  void landed(Peer& p, const wire::Frame& frame) override;
  bool may_begin(const Outgoing& message) override;
  void begun(Outgoing& message) override;
  void sent(Outgoing& message) override;

  const TcpOptions options_;
  const std::uint64_t job_;
  SteadyClock clock_;
  Arena arena_;
  asio::io_context io_{1};
  asio::executor_work_guard<IoExecutor> work_;
  SteadyTimer timer_;
  HandlerSlot timer_slot_;
  std::vector<std::unique_ptr<Peer>> peers_;  // by rank; null for the own
  std::vector<Peer*> dirty_;
  MatchTable<RecvRecord> posted_;
  MatchTable<Incoming> arrived_;  // requested or waiting
  MatchTable<Incoming> granted_;
  Lanes lanes_;
  Time gives_way_until_{};
  std::uint64_t sequence_ = 0;
  std::uint64_t progress_ = 0;
  TrafficCounters counters_;
  Time next_tick_;
  Time last_tick_;
  std::exception_ptr failure_;
  bool closing_ = false;  // and closed, once close() has returned

  std::atomic<bool> woken_{false};
  std::atomic<bool> sleeping_{false};
  std::atomic<Incoming*> finished_{nullptr};  // a stack
  std::atomic<int> workers_{0};               // that may still touch this object
};

}  // namespace weft::tcp
