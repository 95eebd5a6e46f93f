// What transports/mpi.cc (life, groups, goodbye, sleep) and transports/mpi_messages.cc (sends, receives,
// progress) share. Nobody else includes this: it needs <mpi.h>.
#pragma once

#ifndef OMPI_SKIP_MPICXX
#define OMPI_SKIP_MPICXX 1  // MPI's C++ bindings, gone from the standard since 3.0
#endif
#include <mpi.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "transports/match_table.h"
#include "transports/mpi.h"
#include "transports/mpi_tag.h"
#include "weft/transport.h"
#include "wire/frame.h"

namespace weft::mpi {

inline constexpr Time kShortestSleep = 5us;
inline constexpr Time kCancelPatience = 2s;  // for what the network alone delays

std::string text_of(int code);  // MPI's own words

// A group as MPI knows it.
struct Members {
  MPI_Comm comm = MPI_COMM_NULL;
  std::vector<int> rank_in_group;  // by rank in the world; -1 for strangers
};

// A message that leaves. Reused, with its bounce buffer.
struct Outgoing {
  SendRecord* record = nullptr;  // null when it was copied or cancelled: nobody waits
  Buffer head;                   // the frame, and a short payload behind it
  int pending = 0;               // requests
};

// The receives of one (group, source, tag), first in first out. Lives from the first receive until the last
// has its payload.
struct Lane {
  enum class State { idle, listening, arrived, filling };

  MatchKey key;  // identity: the group, and the tag in place of the slot
  Lane* match_next = nullptr;
  Lane* match_previous = nullptr;

  MPI_Comm comm = MPI_COMM_NULL;
  int source = 0;  // in the group
  int tag = 0;
  State state = State::idle;
  RecvRecord* first = nullptr;
  RecvRecord* last = nullptr;

  bool cancelling = false;  // of `listening`: MPI was asked once; asking twice crashes Open MPI 4.1

  Buffer head;  // where a frame (and a short payload) arrives
  std::size_t head_bytes = 0;
  wire::Frame frame;

  RecvRecord* filling = nullptr;  // whose payload arrives; null once it was cancelled
  Buffer staging;                 // of a consumer
  std::span<std::byte> target;
  std::size_t filled = 0;
  int pending = 0;
  std::exception_ptr broken;  // what follows on this lane cannot be told apart any more
};

// What MPI may hold in its hands: left to the process when a failed transport goes before its requests.
struct Memory {
  Arena arena;  // of heads and staging, which may outlive the engine's
  std::deque<Outgoing> outgoing;
  std::deque<Lane> lanes;
  Buffer control_head;
};

struct Owner {
  enum class Role { outgoing, head, piece, control } role;
  void* target;
};

struct Event {
  Owner owner;
  int error;
  int bytes;
  bool cancelled;
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
  void add_group(std::uint64_t group, std::span<const int> members) override;
  bool poll() noexcept override;
  Time next_event() const override { return kNever; }
  void wait(Time until) noexcept override;
  void wake() noexcept override;
  std::exception_ptr failure() const override { return failure_; }
  void close(const std::string& reason) noexcept override;
  TrafficCounters counters() const override { return counters_; }

 private:
  struct Route {
    MPI_Comm comm;
    int peer;
    int tag;
  };
  void agree_on_options();
  MPI_Comm duplicate_world();
  void listen_to_control();
  Route route(const TransferRecord& record) const;
  std::exception_ptr refusal() const;
  void fail(int code, int peer, const char* doing);

  bool start_send(Outgoing& out, const std::byte* data, std::size_t bytes, const Route& to);
  bool start_recv(Lane& lane, Owner::Role role, std::byte* data, std::size_t bytes);
  Outgoing& take_outgoing();
  void release(Outgoing& out) { free_outgoing_.push_back(&out); }
  static void sent(SendRecord& send, std::exception_ptr error) {
    if (send.observer != nullptr) send.observer->sent(send);
    send.complete(std::move(error));
  }

  Lane& lane_of(const RecvRecord& recv, const Route& from);
  void append(Lane& lane, RecvRecord& recv);
  void unlink(Lane& lane, RecvRecord& recv);
  void advance(Lane& lane);
  void open_message(Lane& lane);
  void fill(Lane& lane);
  void finish(Lane& lane, std::span<const std::byte> payload, bool in_place);
  void break_lane(Lane& lane, const std::exception_ptr& why);
  void cancel_recv(RecvRecord& recv);
  void cancel_head(Lane& lane);

  bool collect();
  void dispatch();
  void handle(const Event& event);
  void head_came(Lane& lane, const Event& event);
  void piece_came(Lane& lane, const Event& event);
  void goodbye_came(const Event& event);
  void stir() {
    last_event_ = clock_.now();
    sleep_ = kShortestSleep;
  }

  MpiOptions options_;
  bool finalise_;
  int rank_ = 0;
  int size_ = 1;
  MpiTagLayout layout_;
  SteadyClock clock_;
  MPI_Comm parent_ = MPI_COMM_NULL;   // groups are made from it; no message is ever on it
  MPI_Comm control_ = MPI_COMM_NULL;  // goodbyes
  std::map<std::uint64_t, Members> groups_;
  std::unique_ptr<Memory> memory_ = std::make_unique<Memory>();

  std::vector<MPI_Request> requests_;  // parallel to owners_
  std::vector<Owner> owners_;
  std::vector<int> indices_;
  std::vector<MPI_Status> statuses_;
  std::vector<Event> events_;
  std::size_t next_to_handle_ = 0;

  std::vector<Outgoing*> free_outgoing_;
  std::vector<Lane*> free_lanes_;
  MatchTable<Lane> lanes_;

  bool closed_ = false;
  std::exception_ptr failure_;
  TrafficCounters counters_;

  Time last_event_{};
  Time sleep_ = kShortestSleep;
  std::thread::id sleeper_;  // the thread whose timers were made exact
  std::mutex mutex_;
  std::condition_variable changed_;
  bool woken_ = false;
};

}  // namespace weft::mpi
