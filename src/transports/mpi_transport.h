// What transports/mpi.cc (life, goodbye, letting go, sleep) and transports/mpi_messages.cc (sends, receives,
// progress) share. Nobody else includes this: it needs <mpi.h>.
#pragma once

#ifndef OMPI_SKIP_MPICXX
#define OMPI_SKIP_MPICXX 1  // MPI's C++ bindings, gone from the standard since 3.0
#endif
#include <mpi.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "transports/match_table.h"
#include "transports/mpi.h"
#include "transports/records.h"
#include "wire/frame.h"

namespace weft::mpi {

inline constexpr Time kShortestSleep = 5us;
inline constexpr Time kCancelPatience = 2s;  // for what the network alone delays
inline constexpr int kHeadTag = 0;           // payloads have those above
// Enough for the heads that come between two polls; what finds none waits in MPI.
inline constexpr std::size_t kListeners = 16;

std::string text_of(int code);  // MPI's own words

class MpiTransport;

// A computation on the worker pool: the checksum of what leaves, or checksum and sink of what came.
struct PoolWork {
  MpiTransport* transport = nullptr;
  void (*compute)(PoolWork&) = nullptr;               // on the worker
  void (*after)(MpiTransport&, PoolWork&) = nullptr;  // on the engine's thread
  bool running = false;                               // handed to the pool, and not taken back
  std::atomic<bool> over{false};                      // the worker's last touch of it
  PoolWork* next = nullptr;                           // among those that are over
  void wait_for_worker() const {
    while (!over.load(std::memory_order_acquire)) std::this_thread::yield();
  }
};

// A message that leaves. Reused, with its bounce buffer.
struct Outgoing : PoolWork {
  MatchKey key;  // while its checksum is computed, or while it stands behind one whose is
  Outgoing* match_next = nullptr;
  Outgoing* match_previous = nullptr;

  SendRecord* record = nullptr;  // null when it was copied or cancelled: nobody waits
  wire::Frame frame;
  std::span<const std::byte> payload;
  Buffer head;      // the frame, and a short payload behind it
  int pending = 0;  // requests
};

// A receive that is posted for the next head, whoever sends it.
struct Listener {
  Buffer head;
  bool filled = false;
  int source = 0;  // if so
  std::size_t bytes = 0;
};

// A message whose head came before its receive was posted. Reused.
struct Arrival {
  MatchKey key;
  Arrival* match_next = nullptr;
  Arrival* match_previous = nullptr;

  wire::Frame frame;
  int tag = 0;     // of a long payload
  Buffer payload;  // a short one
};

// A long payload on its way to where it belongs: one at a time of a (source, identity), so that its memory is
// still warm when the next one takes it. Reused.
struct Incoming : PoolWork {
  MatchKey key;
  Incoming* match_next = nullptr;
  Incoming* match_previous = nullptr;

  RecvRecord* record = nullptr;  // null once it was cancelled
  wire::Frame frame;
  Buffer staging;  // of a consumer
  std::span<std::byte> target;
  std::size_t filled = 0;
  int pending = 0;
  std::exception_ptr problem;  // with its checksum or its sink
};

// What MPI may hold in its hands: left to the process when a failed transport goes before its requests.
struct Memory {
  Arena arena;  // of heads and staging, which may outlive the engine's
  std::array<Listener, kListeners> listeners;
  std::deque<Outgoing> outgoing;
  std::deque<Arrival> arrivals;
  std::deque<Incoming> incoming;
};

struct Owner {
  enum class Role { outgoing, head, piece } role;
  void* target;
};

struct Event {
  Owner owner;
  int error;
  int bytes;
  int source;
};

class MpiTransport final : public Transport {
 public:
  MpiTransport(const MpiOptions& options, bool finalise);
  ~MpiTransport() override;

  std::string_view name() const override { return "mpi"; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const Clock& clock() const override { return clock_; }
  void post(SendRecord& send) noexcept override;
  void post(RecvRecord& recv) noexcept override;
  void cancel(TransferRecord& record) noexcept override;
  void give_way(Time) noexcept override {}  // what was posted is MPI's, which knows no classes
  bool poll() noexcept override;
  Time next_event() const override { return kNever; }
  void wait(Time until) noexcept override;
  void wake() noexcept override;
  std::exception_ptr failure() const override { return failure_; }
  void close(const std::string& reason) noexcept override;
  TrafficCounters counters() const override { return counters_; }

 private:
  void agree_on_options();
  std::exception_ptr refusal() const;
  void check_peer(const TransferRecord& record) const;
  void fail(int code, int peer, const char* doing);

  // The n-th long payload from a rank to another has the n-th tag, on both sides.
  int tag_of(std::uint32_t number) const {
    return kHeadTag + 1 + static_cast<int>(number % static_cast<std::uint32_t>(payload_tags_));
  }
  bool start_send(Outgoing& out, std::span<const std::byte> bytes, int peer, int tag);
  Outgoing& take_outgoing();
  void leave(Outgoing& out);
  void leave_in_order(MatchKey key);  // a copy: what it belongs to may be reused
  bool is_work(const Operation& operation, std::size_t bytes) const {
    return operation.pool != nullptr && bytes >= options_.worker_bytes;
  }
  void on_pool(Operation& operation, PoolWork& work, void (*compute)(PoolWork&));
  bool take_finished();
  void release(Outgoing& out) { free_outgoing_.push_back(&out); }
  static void sent(SendRecord& send, std::exception_ptr error) {
    if (send.observer != nullptr) send.observer->sent(send);
    send.complete(std::move(error));
  }

  void listen(Listener& listener);
  void take_heads();
  void head_came(std::span<const std::byte> bytes, int source);
  void data_came(const wire::Frame& frame, std::span<const std::byte> payload);
  [[noreturn]] void goodbye_came(const wire::Frame& frame, std::span<const std::byte> text);
  void match(const MatchKey& key);
  void open_message(RecvRecord& recv, const wire::Frame& frame, std::span<const std::byte> payload, int tag);
  void fill(RecvRecord& recv, const wire::Frame& frame, int tag);
  std::exception_ptr use(RecvRecord& recv, const wire::Frame& frame, std::span<const std::byte> payload,
                         bool in_place) const noexcept;
  void received(RecvRecord* recv, std::size_t bytes, std::exception_ptr problem);
  void payload_is_used(Incoming& incoming);
  void cancel_send(SendRecord& send);
  void cancel_recv(RecvRecord& recv);
  void take_back(Incoming& incoming);
  bool is_long(const wire::Frame& frame) const { return frame.length > options_.bounce_bytes; }

  bool collect();
  void dispatch();
  void handle(const Event& event);
  void piece_came(Incoming& incoming, const Event& event);
  void stir() {
    last_event_ = clock_.now();
    sleep_ = kShortestSleep;
  }

  MpiOptions options_;
  bool finalise_;
  int rank_ = 0;
  int size_ = 1;
  int payload_tags_ = 0;
  SteadyClock clock_;
  MPI_Comm comm_ = MPI_COMM_NULL;
  std::unique_ptr<Memory> memory_ = std::make_unique<Memory>();

  std::size_t oldest_listener_ = 0;
  std::vector<MPI_Request> requests_;  // parallel to owners_
  std::vector<Owner> owners_;
  std::vector<int> indices_;
  std::vector<MPI_Status> statuses_;
  std::vector<Event> events_;
  std::size_t next_to_handle_ = 0;

  std::vector<std::uint32_t> long_sent_, long_announced_;  // numbers of the next, by peer
  std::vector<Outgoing*> free_outgoing_;
  std::vector<Arrival*> free_arrivals_;
  std::vector<Incoming*> free_incoming_;
  MatchTable<RecvRecord> waiting_;
  MatchTable<Arrival> arrived_;
  MatchTable<Incoming> filling_;
  MatchTable<Outgoing> summing_;  // in the order in which they were posted
  std::atomic<PoolWork*> finished_{nullptr};
  std::atomic<int> workers_{0};  // that may still touch this object

  bool closed_ = false;
  std::exception_ptr failure_;
  TrafficCounters counters_;

  Time last_event_{};
  Time sleep_ = kShortestSleep;
  std::thread::id sleeper_;  // the thread whose timers were made exact
  Mutex mutex_;
  std::condition_variable changed_;
  bool woken_ WEFT_GUARDED_BY(mutex_) = false;
};

}  // namespace weft::mpi
