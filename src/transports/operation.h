// A running operation as transports and the engine see it: what it is, and what its coroutines wait for.
#pragma once

#include <coroutine>
#include <cstdint>
#include <exception>
#include <string_view>

#include "base/executor.h"
#include "base/identity.h"
#include "weft/clock.h"
#include "weft/traffic.h"

namespace weft {

class Transport;
class WorkerPool;
struct Operation;

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
  // At most once; resumes the waiter through the executor.
  void complete(std::exception_ptr failure = nullptr) noexcept;

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
  bool is_whole = false;          // none of its bytes stands for others, whatever the byte scale
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
  double computed_seconds = 0;  // processor time of its computations (Comm::compute), or virtual

  // Makes every pending wait throw `cause`. The first cause stays.
  void fail(std::exception_ptr cause) noexcept;
  Wait* first_pending() const { return pending_; }
  static Wait* next_pending(const Wait& wait) { return wait.next_; }

 private:
  friend class Wait;
  Wait* pending_ = nullptr;
};

// A send or a receive that was handed to a transport. (What else it has: records.h.)
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

}  // namespace weft
