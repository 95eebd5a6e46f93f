// A joined world as Python sees it: collectives on memory given by address, and the end of it.
//
// Memory and Python objects that an operation needs are named when it is submitted (`keep`) and let go when
// it has ended, wherever the Work object went: one that is dropped while its operation runs leaves them to
// the session, which keeps them until then or until it is closed.
//
// After a fork the child has no communication thread: the session does nothing there, not even end. (The
// Python side, which knows of forks, refuses every call; here only the destructor matters.)
#pragma once

#include <pybind11/pybind11.h>
#include <sys/types.h>

#include <cstdint>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "weft/world.h"

namespace weft::python {

using Address = std::uintptr_t;
// Where a vector lies, how many elements it has, and of which type: "float32", "bytes" ...
using Memory = std::tuple<Address, std::int64_t, std::string>;

// Where a process is that no launcher's variables place: rank, size, rank 0's address and port, token.
using Place = std::tuple<int, int, std::string, int, std::string>;

Dense dense_of(const Memory& memory);  // throws UsageError for an unknown type or a negative count

class Work;

class Session : public std::enable_shared_from_this<Session> {
 public:
  // What a running operation needs, and how to see that it has ended.
  struct Kept {
    std::vector<Ticket> tickets;
    std::shared_ptr<void> object;
    std::vector<pybind11::object> objects;
  };

  // `trace`: a folder, made where it is missing, in which this rank leaves trace.rankN.json when it closes;
  // empty: none. Throws UsageError where it cannot be written. Without a place the launcher says it.
  static std::shared_ptr<Session> join(const std::string& trace, const std::optional<Place>& place);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  World& world();  // throws UsageError where it is closed
  bool is_open() const { return world_ != nullptr; }

  std::shared_ptr<Work> submit(const char* name, TrafficClass traffic, pybind11::object keep,
                               Engine::Make make, bool holds = false);
  std::shared_ptr<Work> all_reduce(const Memory& data, const std::string& op, pybind11::object keep);
  std::shared_ptr<Work> reduce_scatter(const Memory& data, const std::string& op, pybind11::object keep);
  std::shared_ptr<Work> all_gather(const Memory& data, pybind11::object keep);
  std::shared_ptr<Work> broadcast(const Memory& data, int root, pybind11::object keep);
  std::shared_ptr<Work> all_to_all(const Memory& send, std::vector<std::int64_t> send_counts,
                                   const Memory& recv, std::vector<std::int64_t> recv_counts,
                                   pybind11::object keep);
  std::shared_ptr<Work> barrier();

  // On all ranks: throws UsageError, the same on all of them, where one has failed or has other lines
  // (agreed.h), each of which is what and value. `fix`: ends the sentence. Ctrl-C ends the wait. Takes a slot.
  void agree(const std::vector<std::tuple<std::string, std::string>>& lines, const std::string& fix);
  // Slots of plan rows, the same on all ranks where they ask in the same order.
  std::uint32_t take_slots(std::uint32_t count);
  void keep_until_done(Kept kept);
  // Called while the engine is still there; by then nobody uses the session any more.
  void before_close(std::function<void()> tell) { closers_.push_back(std::move(tell)); }
  // This rank's program cannot go on: what is in flight fails with this text, here and on the peers.
  void abandon(const std::string& text);
  // Waits for what is in flight (Ctrl-C ends that), then says goodbye. A second call does nothing.
  void close();

 private:
  Session() = default;
  void close_now();
  void let_go();  // of what has ended

  pid_t process_ = 0;
  std::shared_ptr<Trace> trace_;  // outlives the world
  std::ofstream trace_file_;
  std::unique_ptr<World> world_;
  std::vector<Kept> kept_;
  std::vector<std::function<void()>> closers_;
  std::uint32_t next_slot_ = 1;  // 0 is for operations without messages
};

// An operation that was submitted.
class Work {
 public:
  Work(std::shared_ptr<Session> session, Ticket ticket, pybind11::object keep)
      : session_(std::move(session)), ticket_(std::move(ticket)), keep_(std::move(keep)) {}
  ~Work();
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

  bool done() const { return ticket_.done(); }
  void wait();  // rethrows the operation's error

 private:
  std::shared_ptr<Session> session_;
  Ticket ticket_;
  pybind11::object keep_;
};

void bind_session(pybind11::module_& module);

}  // namespace weft::python
