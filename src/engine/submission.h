// One submitted operation: what its ticket shows and what the engine runs.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/mutex.h"
#include "engine/core.h"
#include "engine/inquiry.h"
#include "transports/match_key.h"
#include "transports/operation.h"
#include "weft/engine.h"

namespace weft::detail {

// Hands pieces of an arena to std::allocate_shared and keeps the arena alive as long as the last ticket.
template <class T>
struct ArenaAllocator {
  using value_type = T;
  explicit ArenaAllocator(std::shared_ptr<Arena> a) : arena(std::move(a)) {}
  template <class U>
  ArenaAllocator(const ArenaAllocator<U>& other)
      : arena(other.arena) {}  // NOLINT(google-explicit-constructor)
  T* allocate(std::size_t n) { return static_cast<T*>(arena->allocate(n * sizeof(T))); }
  void deallocate(T* p, std::size_t n) noexcept { arena->deallocate(p, n * sizeof(T)); }
  template <class U>
  friend bool operator==(const ArenaAllocator& a, const ArenaAllocator<U>& b) {
    return a.arena == b.arena;
  }
  std::shared_ptr<Arena> arena;
};

struct Submission {
  Submission(Engine::Core& owner, const Comm& group_comm, const SubmitOptions& options,
             Engine::Make&& make_task)
      : engine(owner), comm(group_comm), make(std::move(make_task)), deadline(*this), doubts(*this) {
    const std::size_t length = std::min(options.name.size(), name.size());
    std::copy_n(options.name.begin(), length, name.begin());
    operation.name = std::string_view(name.data(), length);
    operation.traffic = options.traffic;
    operation.priority = options.priority;
    operation.group = comm.group_id();
    operation.local = options.local;
    operation.is_whole = options.slot && comm.endpoint().is_whole(operation.group, *options.slot);
    if (!options.local) operation.slot = options.slot ? *options.slot : comm.next_unnamed_slot();
    operation.step = options.step;
    key.id = {operation.group, operation.slot, operation.step, 0};
    holds = options.holds;
    accept.run = [](Remote& remote) {
      Submission& self = *static_cast<Handover&>(remote).submission;
      self.engine.accept(std::move(self.keep));
    };
    accept.submission = this;
    waited.run = [](Remote& remote) {
      Submission& self = *static_cast<Handover&>(remote).submission;
      const std::shared_ptr<Submission> alive = std::move(self.keep_waited);
      self.somebody_waits();
    };
    waited.submission = this;
  }

  struct Handover : Remote {
    Submission* submission = nullptr;
  };
  struct Deadline : Timer {
    explicit Deadline(Submission& s)
        : Timer([](Timer& timer) {
            Submission& self = static_cast<Deadline&>(timer).submission;
            self.engine.look_at_deadline(self);
          }),
          submission(s) {}
    Submission& submission;
  };

  struct Doubts : Timer {
    explicit Doubts(Submission& s)
        : Timer([](Timer& timer) {
            Submission& self = static_cast<Doubts&>(timer).submission;
            self.engine.doubt(self);
          }),
          submission(s) {}
    Submission& submission;
  };

  void somebody_waits();  // the engine's thread

  Engine::Core& engine;  // REQUIRES: not touched once done
  Comm comm;
  Engine::Make make;
  Operation operation;
  std::array<char, 64> name{};
  MatchKey key;  // its identity, and its place among those in flight (transports/match_table.h)
  Submission* match_next = nullptr;
  Submission* match_previous = nullptr;
  Task<void> task;
  Deadline deadline;
  Doubts doubts;
  std::optional<Inquiry> inquiry;  // from half of its time on
  Time told{};                     // when a note of it last went out
  Time timeout{}, time_limit{};
  Time predicted{};
  bool holds = false;
  Time submitted{}, started{}, finished{};
  std::size_t position = 0;  // among the engine's running operations

  Handover accept, waited;
  std::shared_ptr<Submission> keep;         // while the engine does not know of it yet
  std::shared_ptr<Submission> keep_waited;  // while the engine does not know that somebody waits

  // Shared with other threads.
  Mutex mutex;
  std::condition_variable changed;
  std::atomic<bool> done{false};
  bool said_waiting WEFT_GUARDED_BY(mutex) = false;
  std::exception_ptr error WEFT_GUARDED_BY(mutex);
  std::vector<std::function<void()>> continuations WEFT_GUARDED_BY(mutex);
  Ticket::Awaiter::Record* awaiters WEFT_GUARDED_BY(mutex) = nullptr;
};

}  // namespace weft::detail

namespace weft {

// A coroutine that awaits a ticket, in the ticket's list. Posted to its executor when the ticket is done.
struct Ticket::Awaiter::Record final : Remote {
  // As the operation that awaits sees it.
  struct Link final : Wait {
    Link(Operation& op, Record& owner) : Wait(op), record(owner) {}
    bool abandon() noexcept override { return record.withdraw(); }
    bool is_progress() const override { return false; }  // unless the ticket's operation makes some
    Record& record;
  };
  Record(detail::Submission& awaited, Executor& runs_on, std::coroutine_handle<> coroutine);
  bool withdraw() noexcept;  // false if the ticket has told of its end

  detail::Submission& submission;
  Executor& executor;
  std::coroutine_handle<> waiter;
  std::optional<Link> link;
  Record* next_awaiter = nullptr;
};

}  // namespace weft
