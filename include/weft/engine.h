// The engine of one rank: runs any number of operations at once on one thread, most urgent traffic first.
//
// It is a single-threaded object with its transport's clock (poll, next_deadline). On real transports a
// communication thread drives it; in `sim` the event loop drives the very same object. submit(), hold(),
// release() and tickets may be used from any thread.
//
//   Ticket ticket = engine.submit(comm, {.name = "gradients of layer 3", .slot = 3, .step = step},
//                                 [=](Comm c) { return all_reduce(c, gradient); });
//   ticket.wait();   // rethrows what went wrong
//
// Rules of the road
//   - blocking traffic starts at once, whatever else is there
//   - other traffic starts by (class, priority, age), at most `window_bytes` of it in the transport at a
//     time, and not while it is held back: while a blocking send of this rank is not done, from submission to
//     end of an operation that says so (SubmitOptions::holds: all-to-alls), or between hold() and release().
//     A blocking receive that waits for a late peer holds nothing back
//   - what is held back starts all the same after a limit, or at once when somebody waits for its ticket:
//     without this a rank that waits for its gradients and ranks that hold theirs back for it would wait for
//     each other. The limit is hold_limit, or four times what was predicted of the traffic that holds
//   - a message that finds no receiver gives its place in the window back (stall_limit): a limit on what is
//     in flight must never keep a peer from what it needs
//   - every operation has a deadline, which counts from its last progress: bytes of its own that moved, a
//     computation of its own that ended, a send of its own that stands in a queue which moves, a ticket that
//     it awaits and that makes progress; or any of that on another rank, which the ranks of an operation that
//     takes long tell each other (src/engine/inquiry.h). They compare what they call as well, so that one
//     that calls something else is named
//   - a failure (other than a UsageError of one call) fails every ticket in flight with the same cause and
//     closes the transport with it, so that the peers stop too
#pragma once

#include <coroutine>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "weft/comm.h"
#include "weft/inline_function.h"
#include "weft/pollable.h"
#include "weft/task.h"
#include "weft/trace.h"

namespace weft {

class Log;
class Transport;
class WorkerPool;

struct EngineOptions {
  // affects results: nothing
  // affects speed only
  bool priority = true;          // false: first come, first served (to compare with)
  std::size_t window_bytes = 0;  // non-blocking traffic handed to the transport at a time; 0: two micro-ops,
                                 // sixteen after a second without long blocking messages
  Time hold_limit = 50ms;        // at least; longer where longer traffic is predicted. kNever: never age
  Time stall_limit = 10ms;  // a message in the transport for longer than this and four times what the window
                            // needs on the link no longer counts against the window
  Time operation_timeout = 60s;  // without progress, of an operation that names none
  Time time_limit = kNever;      // from start to end, whatever progress is made; of one that names none
  Trace* trace = nullptr;        // filled while the engine lives
  Log* log = nullptr;            // outlives the engine
};

struct SubmitOptions {
  std::string_view name = "operation";  // for errors and traces; copied
  TrafficClass traffic = TrafficClass::gradient;
  int priority = 0;  // smaller first within the class
  // Of the plan row; none: the group's next number, so all ranks submit in one order.
  std::optional<std::uint32_t> slot = std::nullopt;
  std::uint32_t step = 0;  // training step
  bool local = false;      // it sends and receives nothing, so it has no identity
  Time timeout{};          // without progress; 0: the engine's
  Time time_limit{};       // from start to end, whatever progress is made; 0: the engine's
  // affects speed only
  bool holds = false;  // of a blocking one: other traffic is held back from its submission to its end
  double predicted_seconds = 0;  // of one that holds, where it can be told: held traffic ages later
};

namespace detail {
struct Submission;
}

// A promise of the engine. Copies share it; it may outlive the engine.
class Ticket {
 public:
  Ticket() = default;
  explicit Ticket(std::shared_ptr<detail::Submission> submission) : submission_(std::move(submission)) {}

  bool valid() const { return submission_ != nullptr; }
  bool done() const;
  // Blocks the calling thread (not the engine's) until the operation has ended, then rethrows its error if it
  // has one.
  void wait() const;
  std::exception_ptr error() const;  // REQUIRES: done()
  // Calls `f` on the engine's thread when the operation has ended, here and at once if it has. No wait: held
  // traffic stays held. One that throws on the engine's thread fails the engine: nobody else would hear it.
  void then(std::function<void()> f) const;

  // On the engine's clock. REQUIRES: done().
  Time submitted() const;
  Time started() const;
  Time finished() const;
  // Processor time of the operation's computations (Comm::compute) on this rank. REQUIRES: done().
  double computed_seconds() const;

  // A coroutine awaits a ticket: co_await ticket.
  class Awaiter;
  Awaiter operator co_await() const;
  // Awaits the end alone: throws nothing, and is not hurried by a failure of the operation that awaits.
  Awaiter ended() const;
  // Awaits the end alone, as the next on a stream does: no wait, so held traffic stays held. Its deadline
  // follows the progress of what it stands behind.
  Awaiter behind() const;

 private:
  std::shared_ptr<detail::Submission> submission_;
};

class Engine final : public Pollable {
 public:
  using Make = InlineFunction<Task<void>(Comm)>;

  Engine(Transport& transport, const EngineOptions& options, WorkerPool* pool);
  ~Engine();  // fails what is in flight; says goodbye to the peers
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  Comm world() const;

  // Any thread. `make` is called on the engine's thread with a Comm bound to the operation, and lives until
  // the operation has ended; memory that it names must live until the ticket is done. Throws a UsageError
  // where an operation with the same group, slot and step has not ended: their messages could not be told
  // apart.
  Ticket submit(const Comm& comm, const SubmitOptions& options, Make make);

  // Any thread. Done when everything that was submitted before has ended; counts as waiting for all of it,
  // and leaves errors to the tickets they belong to.
  Ticket settled();

  // Any thread. Between the two no gradient traffic starts: blocking traffic is about to come, and is
  // expected to be over after `predicted_seconds` (0: not known). Nests.
  void hold(double predicted_seconds = 0);
  void release();

  // Any thread. Time on the engine's clock.
  Time now() const;
  // Any thread. One line that a user should see (a warning), where there is a log.
  void log_line(const std::string& line) const;
  // Any thread. Adds a span (computing, waiting) that ends now to the trace, where there is one.
  void note(TraceEvent::Kind kind, std::string_view name, std::uint32_t step, Time started);

  // Any thread. The program of this rank cannot go on: ends everything in flight with `cause` and tells the
  // peers.
  void abandon(std::exception_ptr cause);

  bool poll() noexcept override;
  Time next_deadline() const override;

  // The engine's thread, or before it runs / after it has stopped.
  std::exception_ptr failure() const;
  std::size_t in_flight() const;
  // Ends everything in flight with `cause`, then closes the transport with it. Goodbye without a cause if it
  // is null.
  void shut_down(std::exception_ptr cause) noexcept;

  class Core;

 private:
  const std::unique_ptr<Core> core_;
};

// The await of a ticket: counts as waiting for it. In an operation it ends with the operation's failure.
class Ticket::Awaiter {
 public:
  enum class For : std::uint8_t { result, end, order };
  Awaiter(std::shared_ptr<detail::Submission> submission, For what)
      : submission_(std::move(submission)), for_(what) {}
  ~Awaiter();
  Awaiter(const Awaiter&) = delete;
  Awaiter& operator=(const Awaiter&) = delete;
  bool await_ready() const noexcept;
  template <class Promise>
  bool await_suspend(std::coroutine_handle<Promise> parent) {
    return enlist(parent, *parent.promise().executor, parent.promise().operation);
  }
  void await_resume() const;

  struct Record;

 private:
  bool enlist(std::coroutine_handle<> waiter, Executor& executor, Operation* operation);

  std::shared_ptr<detail::Submission> submission_;
  For for_;
  Record* record_ = nullptr;  // in the executor's arena, while it waits
};

}  // namespace weft
