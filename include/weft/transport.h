// The seam between algorithms and whatever moves bytes. A Transport is one rank's end of it.
//
// Contract: messages are first in, first out per (source, destination, identity), and nothing else is
// ordered. Every receive names its source and identity; there are no wildcards. A send may complete only when
// its receiver has posted (eager limit zero), so nobody awaits a send before posting the receive that its
// peer may be waiting for.
//
// Memory: a posted record and the memory it names stay valid until the record is completed or cancelled.
// cancel() returns only when the transport has let go of both; it may wait for a copy that is under way,
// never for a peer's program.
//
// Thread: one thread (the engine's) calls everything, except wake().
#pragma once

#include <coroutine>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <string_view>

#include "weft/clock.h"
#include "weft/executor.h"
#include "weft/identity.h"

namespace weft {

class RecvRecord;
class SendRecord;
class Transport;
class WorkerPool;
struct Operation;

// In the order in which they go: what blocks computation first, what has most slack last.
enum class TrafficClass : std::uint8_t { blocking, prior, gradient, delayed };
constexpr std::string_view name_of(TrafficClass c) {
  constexpr std::string_view names[] = {"blocking", "prior", "gradient", "delayed"};
  return names[static_cast<std::size_t>(c)];
}

// Something that a coroutine of an operation waits for. Linked into its operation while it is not done, so
// that a failure reaches it and a time-out can name it.
class Wait {
 public:
  explicit Wait(Operation& op);
  Wait(const Wait&) = delete;
  Wait& operator=(const Wait&) = delete;
  virtual ~Wait();

  // Lets go of everything that is not done yet, so that complete() may follow at once. False if it cannot be
  // hurried (a computation on the worker pool): it then completes by itself.
  virtual bool abandon() noexcept = 0;
  // Its end is progress of the operation: bytes have moved, or something was computed.
  virtual bool is_progress() const { return true; }
  void complete(std::exception_ptr failure =
                    nullptr) noexcept;  // at most once; resumes the waiter through the executor

  Operation& operation;
  std::coroutine_handle<> waiter;
  std::exception_ptr error;
  bool done = false;

 private:
  friend struct Operation;
  Wait* previous_ = nullptr;
  Wait* next_ = nullptr;
};

// What all transfers of one running operation share. Made by the engine (or by run_bare in tests); lives
// until the operation has ended and every record is gone.
struct Operation {
  std::string_view name = "operation";
  TrafficClass traffic = TrafficClass::gradient;
  int priority = 0;  // smaller goes first within a class
  std::uint64_t group = 0;
  std::uint32_t slot = 0;
  std::uint32_t step = 0;
  bool local = false;             // it sends and receives nothing
  std::uint32_t fingerprint = 0;  // family, algorithm, type, count: compared with the peer's on every message
  std::uint32_t opening = 0;  // the fingerprint that was declared first: an operation may have several parts
  Executor* executor = nullptr;
  WorkerPool* pool = nullptr;  // null: computations run inline
  Time started{};
  Time progressed{};  // when a transfer or a computation of it last ended well

  std::exception_ptr failure;  // once set, every send, receive and await of this operation throws it
  bool waited_for = false;     // a thread or a driver waits for the ticket: held micro-ops start at once
  std::uint64_t bytes_sent = 0;
  std::uint64_t messages_sent = 0;
  double computed_seconds = 0;  // processor time of its computations (weft/comm.h, Compute), or virtual

  // Makes every pending wait throw `cause`. The first cause stays.
  void fail(std::exception_ptr cause) noexcept;
  Wait* first_pending() const { return pending_; }
  static Wait* next_pending(const Wait& wait) { return wait.next_; }

 private:
  friend class Wait;
  Wait* pending_ = nullptr;
};

// A send or a receive that was handed to a transport. (What else it has: src/transports/records.h.)
class TransferRecord : public Wait {
 public:
  TransferRecord(Transport& carrier, Operation& op, int peer_rank, const Identity& identity)
      : Wait(op), transport(carrier), peer(peer_rank), id(identity) {}
  bool abandon() noexcept override;

  Transport& transport;  // where it was posted and is cancelled
  int peer;              // rank in the world
  Identity id;
  Time posted{};
  void* transport_data = nullptr;  // the transport's own
};

// Whole life of the transport, payload and frames (what a link counter would see of them), from this rank.
struct TrafficCounters {
  std::uint64_t messages_sent = 0, messages_received = 0;
  std::uint64_t payload_bytes_sent = 0, payload_bytes_received = 0;
  std::uint64_t wire_bytes_sent = 0, wire_bytes_received = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual std::string_view name() const = 0;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const Clock& clock() const = 0;

  // Takes the record over. Both may complete it at once or at any later poll(). Neither waits and neither
  // throws: a problem lands in the record.
  virtual void post(SendRecord& send) noexcept = 0;
  virtual void post(RecvRecord& recv) noexcept = 0;
  virtual void cancel(TransferRecord& record) noexcept = 0;
  // Urgent traffic of this rank is under way. Until then (a time that is past ends it) a transport that can
  // tell holds back less urgent messages that were posted and have not begun, except where somebody waits;
  // called again with the same time, it looks who waits now.
  virtual void give_way(Time until) noexcept = 0;

  // Moves what can be moved without waiting and completes records. True if anything happened.
  virtual bool poll() noexcept = 0;
  // When poll() next has something to do by the clock alone.
  virtual Time next_event() const = 0;
  // Sleeps until something arrives, wake() is called, or `until`.
  virtual void wait(Time until) noexcept = 0;
  virtual void wake() noexcept = 0;  // any thread

  // Why this transport can carry nothing more (a lost peer, a corrupt stream), or null. Sticky.
  virtual std::exception_ptr failure() const = 0;
  // Tells the peers goodbye. With a reason it is a failure: they stop with a TransportError that quotes it.
  // REQUIRES: every send of this rank is done or cancelled (the engine sees to it).
  virtual void close(const std::string& reason) noexcept = 0;

  virtual TrafficCounters counters() const = 0;
};

}  // namespace weft
