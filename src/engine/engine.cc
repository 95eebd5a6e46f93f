#include "weft/engine.h"

#include <algorithm>
#include <string>
#include <thread>
#include <utility>

#include "base/log.h"
#include "base/mutex.h"
#include "engine/core.h"
#include "engine/scheduler.h"
#include "engine/submission.h"
#include "transports/match_table.h"
#include "transports/records.h"
#include "weft/error.h"
#include "weft/transport.h"

namespace weft {

using detail::Submission;

namespace {

// The root of every operation: awaits it and reports its end. Destroys its own frame.
struct Root {
  struct promise_type : detail::PromiseBase {
    template <class End>
    promise_type(Executor& runs_on, Submission& submission, End&) {
      executor = &runs_on;
      operation = &submission.operation;
    }
    Root get_return_object() noexcept { return {}; }
    std::suspend_never initial_suspend() noexcept { return {}; }
    std::suspend_never final_suspend() noexcept { return {}; }
    void return_void() noexcept {}
    void unhandled_exception() noexcept { std::terminate(); }  // the body catches everything
  };
};

// REQUIRES: `submission` outlives the task, which the engine's list of running operations sees to; `end` is
// called last.
template <class End>
Root run_root(Executor& executor, Submission& submission, End end) {
  static_cast<void>(executor);
  std::exception_ptr error;
  try {
    co_await submission.task;
  } catch (...) {
    error = std::current_exception();
  }
  end(submission, error);
}

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an unknown error";
  }
}

bool is_usage_error(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const UsageError&) {
    return true;
  } catch (...) {
    return false;
  }
}

// "all_reduce (slot 3, step 12)"
std::string title(const Operation& operation) {
  if (operation.local) return std::string(operation.name);
  const bool unnamed = (operation.slot & kUnnamed) != 0;
  return std::string(operation.name) + (unnamed ? " (call " : " (slot ") +
         std::to_string(operation.slot & ~kUnnamed) + ", step " + std::to_string(operation.step) + ")";
}

// "1, 2, 5", or "1, 2, 3, 4 and 60 more"
std::string list_of(const std::vector<int>& ranks) {
  constexpr std::size_t kMost = 4;
  std::string out;
  for (std::size_t i = 0; i < std::min(ranks.size(), kMost); ++i)
    out += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  if (ranks.size() > kMost) out += " and " + std::to_string(ranks.size() - kMost) + " more";
  return out;
}

// Whom the operation waits for: the first receive that is pending, else the first send.
const TransferRecord* culprit(const Operation& operation) {
  const TransferRecord* found = nullptr;
  for (Wait* wait = operation.first_pending(); wait != nullptr; wait = Operation::next_pending(*wait)) {
    const auto* transfer = dynamic_cast<const TransferRecord*>(wait);
    if (transfer == nullptr) continue;
    if (dynamic_cast<const RecvRecord*>(transfer) != nullptr) return transfer;
    found = transfer;
  }
  return found;
}

// "; waiting for rank 2 at hop 3 for 1.5 s"
std::string waits_for(const TransferRecord* wait, Time now) {
  if (wait == nullptr) return "";
  const bool receive = dynamic_cast<const RecvRecord*>(wait) != nullptr;
  return (receive ? "; waiting for rank " : "; not taken by rank ") + std::to_string(wait->peer) +
         " at hop " + std::to_string(wait->id.hop) + " for " + std::to_string(seconds(now - wait->posted)) +
         " s";
}

// What is said to take longer takes this long: nobody is held back for hours.
constexpr double kLongestPrediction = 3600;

Time prediction(double predicted_seconds, const char* call) {
  if (!(predicted_seconds >= 0))
    throw UsageError(std::string(call) + ": predicted_seconds is negative or no number");
  return from_seconds(std::min(predicted_seconds, kLongestPrediction));
}

Task<void> all_ended(Comm, std::vector<Ticket> tickets) {
  for (const Ticket& ticket : tickets) co_await ticket.ended();
}

// How much of its timeout an operation uses before its ranks tell each other how they stand, how often they
// do, and how often each looks at what it was told.
constexpr int kTellsAfter = 2, kTells = 4, kListens = 16;
// Of tickets that await tickets; a longer chain only loses the progress of its end.
constexpr int kDeepest = 8;

// "made no progress for 60 s, 75.2 s after its start"
std::string what_passed(const Submission& s, Time now) {
  const auto text = [](Time t) { return std::to_string(seconds(t)) + " s"; };
  if (now >= later(s.started, s.time_limit)) return "did not end within " + text(s.time_limit);
  if (now - s.started < s.timeout + s.timeout / kListens) return "did not end within " + text(s.timeout);
  return "made no progress for " + text(s.timeout) + ", " + text(now - s.started) + " after its start";
}

}  // namespace

// Submissions come from any thread and end on the engine's.
struct Engine::Core::Identities {
  void enter(Submission& s) {
    const Lock lock(mutex);
    if (const Submission* other = table.front(s.key)) {
      throw UsageError("submit: " + title(s.operation) + " has the slot and step of " +
                       std::string(other->operation.name) +
                       ", which is still in flight in this group: wait for its ticket, or give each its own");
    }
    table.push(s);
  }
  void leave(Submission& s) {
    const Lock lock(mutex);
    table.erase(s);
  }
  Mutex mutex;
  MatchTable<Submission> table WEFT_GUARDED_BY(mutex);
};

void Submission::somebody_waits() {
  operation.waited_for = true;
  engine.scheduler().look_again();
}

Engine::Core::Core(Transport& transport, const EngineOptions& options, WorkerPool* pool)
    : transport_(transport),
      options_(options),
      arena_(std::make_shared<Arena>()),
      executor_(*arena_, transport.clock()),
      scheduler_(std::make_unique<Scheduler>(transport, options_)),
      endpoint_(std::make_unique<Endpoint>(*scheduler_, executor_, pool)),
      identities_(std::make_unique<Identities>()) {
  if (options.hold_limit < Time{0} || options.stall_limit <= Time{0} ||
      options.operation_timeout <= Time{0} || options.time_limit <= Time{0}) {
    throw UsageError("engine: hold_limit, stall_limit, operation_timeout and time_limit must be positive");
  }
  scheduler_->set_endpoint(*endpoint_);
  executor_.set_wake([&transport] { transport.wake(); });
}

Engine::Core::~Core() = default;

Comm Engine::Core::world() const { return Comm(endpoint_->world()); }

Ticket Engine::Core::submit(const Comm& comm, const SubmitOptions& options, Make make) {
  if (!comm.valid() || &comm.endpoint() != endpoint_.get()) {
    throw UsageError("submit: the Comm belongs to another engine");
  }
  if (options.slot && (*options.slot & kUnnamed) != 0) {
    throw UsageError("submit: a slot must be below " + std::to_string(kUnnamed));
  }
  if (options.timeout < Time{0} || options.time_limit < Time{0})
    throw UsageError("submit: the timeout or the time limit is negative");
  if (options.holds && options.traffic != TrafficClass::blocking)
    throw UsageError("submit: only a blocking operation holds the others back");
  const Time predicted = prediction(options.predicted_seconds, "submit");
  auto submission = std::allocate_shared<Submission>(detail::ArenaAllocator<Submission>(arena_), *this, comm,
                                                     options, std::move(make));
  submission->timeout = options.timeout == Time{0} ? options_.operation_timeout : options.timeout;
  submission->time_limit = options.time_limit == Time{0} ? options_.time_limit : options.time_limit;
  submission->predicted = predicted;
  submission->submitted = executor_.now();
  if (!options.local) identities_->enter(*submission);
  submission->keep = submission;
  // From here on, so that nothing starts between an announcement's release and the engine's taking note.
  if (options.holds) scheduler_->announcements().begin(predicted);
  Ticket ticket(submission);
  executor_.post(submission->accept);
  return ticket;
}

Ticket Engine::Core::settled() {
  // What it waits for has deadlines.
  const SubmitOptions options{.name = "settle", .local = true, .timeout = kNever};
  return submit(world(), options, [this](Comm comm) {
    std::vector<Ticket> before;
    for (const std::shared_ptr<Submission>& other : running_) {
      if (other == running_.back()) continue;  // this one
      other->somebody_waits();
      before.emplace_back(other);
    }
    return all_ended(comm, std::move(before));
  });
}

void Engine::Core::hold(double predicted_seconds) {
  scheduler_->announcements().begin(prediction(predicted_seconds, "hold"));
  transport_.wake();
}

void Engine::Core::release() {
  scheduler_->announcements().end();
  transport_.wake();
}

void Engine::Core::note(TraceEvent::Kind kind, std::string_view name, std::uint32_t step, Time started) {
  if (options_.trace == nullptr) return;
  options_.trace->add({.kind = kind,
                       .name = std::string(name),
                       .step = step,
                       .ready = started,
                       .started = started,
                       .finished = now()});
}

void Engine::Core::abandon(std::exception_ptr cause) {
  if (abandoned_.exchange(true)) return;
  abandon_.engine = this;
  abandon_.cause = std::move(cause);
  abandon_.run = [](Remote& remote) {
    auto& self = static_cast<Abandon&>(remote);
    self.engine->fail(self.cause);
  };
  executor_.post(abandon_);
}

void Engine::Core::accept(std::shared_ptr<Submission> submission) {
  Submission& s = *submission;
  s.operation.executor = &executor_;
  s.operation.pool = endpoint_->pool();
  s.started = s.operation.started = executor_.now();
  s.position = running_.size();
  running_.push_back(std::move(submission));
  if (!s.operation.local) endpoint_->communication().begin(s.started);
  if (s.holds) scheduler_->look_at_hold();
  if (failure_ || closed_) {
    finish(s, failure_ ? failure_
                       : std::make_exception_ptr(
                             TransportError(TransportError::Kind::closed, -1, "the engine is shut down")));
    return;
  }
  if (const Time due = deadline_of(s); due != kNever) executor_.arm(s.deadline, due);
  if (s.timeout != kNever && !s.operation.local)
    executor_.arm(s.doubts, later(s.started, s.timeout / kTellsAfter));
  try {
    s.task = s.make(s.comm.bound(s.operation));
  } catch (...) {
    finish(s, std::current_exception());
    return;
  }
  run_root(executor_, s, [this](Submission& done, const std::exception_ptr& error) { finish(done, error); });
}

void Engine::Core::finish(Submission& s, std::exception_ptr error) {
  std::swap(running_[s.position], running_.back());
  running_[s.position]->position = s.position;
  const std::shared_ptr<Submission> keep = std::move(running_.back());
  running_.pop_back();
  executor_.disarm(s.deadline);
  executor_.disarm(s.doubts);
  s.inquiry.reset();
  s.task = Task<void>();
  s.make.reset();
  if (!s.operation.local) identities_->leave(s);  // whoever sees the ticket done may use it again
  if (s.holds) scheduler_->announcements().end();
  s.finished = executor_.now();
  if (!s.operation.local) endpoint_->communication().end(s.finished);
  if (options_.trace != nullptr) {
    options_.trace->add({.kind = TraceEvent::Kind::operation,
                         .name = std::string(s.operation.name),
                         .traffic = s.operation.traffic,
                         .priority = s.operation.priority,
                         .slot = s.operation.slot,
                         .step = s.operation.step,
                         .bytes = s.operation.bytes_sent,
                         .ready = s.started,
                         .started = s.started,
                         .finished = s.finished,
                         .failed = static_cast<bool>(error),
                         .holds = s.holds});
  }
  std::vector<std::function<void()>> continuations;
  Ticket::Awaiter::Record* awaiters = nullptr;
  {
    const Lock lock(s.mutex);
    s.error = error;
    continuations.swap(s.continuations);
    awaiters = std::exchange(s.awaiters, nullptr);
    s.done.store(true, std::memory_order_release);
    s.changed.notify_all();
  }
  while (awaiters != nullptr) {
    Ticket::Awaiter::Record& awaiter = *awaiters;
    awaiters = awaiter.next_awaiter;
    awaiter.executor.post(awaiter);
  }
  for (const std::function<void()>& f : continuations) {
    try {
      f();
    } catch (...) {
      fail(std::current_exception());
    }
  }
  if (error && !failure_ && !is_usage_error(error)) fail(error);
}

// Of this rank's part of the operation.
Time Engine::Core::own_progress(const Submission& s, int depth) const {
  Time last = std::max(s.started, s.operation.progressed);
  for (const Wait* wait = s.operation.first_pending(); wait != nullptr;
       wait = Operation::next_pending(*wait)) {
    if (const auto* send = dynamic_cast<const SendRecord*>(wait)) {
      if (send->schedule.stage == SendRecord::Stage::queued) last = std::max(last, scheduler_->last_start());
    } else if (const auto* link = dynamic_cast<const Ticket::Awaiter::Record::Link*>(wait)) {
      const Submission& awaited = link->record.submission;  // another engine's is its own thread's business
      if (&awaited.engine == this && depth < kDeepest)
        last = std::max(last, own_progress(awaited, depth + 1));
    }
  }
  return last;
}

// On any rank, as far as it is known here.
Time Engine::Core::last_progress(const Submission& s) const {
  return std::max(own_progress(s), s.inquiry ? s.inquiry->progressed() : Time{0});
}

Time Engine::Core::deadline_of(const Submission& s) const {
  return std::min(later(last_progress(s), s.timeout), later(s.started, s.time_limit));
}

// Tells the others how this rank stands, and looks at what they tell.
void Engine::Core::doubt(Submission& s) {
  if (failure_) return;
  const Time now = executor_.now();
  if (!s.inquiry) s.inquiry.emplace(s.comm, s.operation);
  if (s.told == Time{0} || now >= s.told + s.timeout / kTells) {
    s.inquiry->tell(now, own_progress(s));
    s.inquiry->listen(now);
    tell_log(s, now);
    s.told = now;
  } else {
    s.inquiry->listen(now);
  }
  if (std::exception_ptr disagreement = s.inquiry->disagreement()) {
    fail(std::move(disagreement));
    return;
  }
  executor_.arm(s.doubts, later(now, std::max(s.timeout / kListens, Time{1ms})));
}

void Engine::Core::log_line(const std::string& line) const {
  if (options_.log != nullptr) options_.log->warning(line);
}

// A slow operation that moves is worth a line to those who ask; one that stands still, to everybody.
void Engine::Core::tell_log(const Submission& s, Time now) const {
  if (options_.log == nullptr) return;
  const bool moves = now - last_progress(s) < s.timeout / kTells;
  const LogLevel level = moves ? LogLevel::info : LogLevel::warning;
  if (!options_.log->enabled(level)) return;
  // The first note of this rank may have come before those of the others.
  const std::vector<int> silent = s.told == Time{0} ? std::vector<int>() : s.inquiry->silent();
  options_.log->write(
      level, title(s.operation) + " has taken " + std::to_string(seconds(now - s.started)) + " s" +
                 (moves ? " and moves" : " and stands still") + waits_for(culprit(s.operation), now) +
                 (silent.empty() ? "" : "; nothing heard of it from rank " + list_of(silent)));
}

void Engine::Core::look_at_deadline(Submission& s) {
  const Time now = executor_.now();
  if (s.inquiry) s.inquiry->listen(now);
  if (const Time due = deadline_of(s); due > now)
    executor_.arm(s.deadline, due);
  else
    expired(s);
}

void Engine::Core::expired(Submission& s) {
  if (s.inquiry) {
    if (std::exception_ptr disagreement = s.inquiry->disagreement()) {
      fail(std::move(disagreement));
      return;
    }
  }
  const TransferRecord* wait = culprit(s.operation);
  const Time now = executor_.now();
  const double waited = seconds(now - s.started);
  std::string what = "rank " + std::to_string(transport_.rank()) + ": " + title(s.operation) + " " +
                     what_passed(s, now) + waits_for(wait, now);
  int peer = wait != nullptr ? wait->peer : -1;
  const std::vector<int> silent = s.inquiry ? s.inquiry->silent() : std::vector<int>();
  if (!silent.empty()) {
    what += "; nothing was heard of this operation from rank " + list_of(silent);
    if (silent.size() == 1) peer = silent.front();
  }
  fail(std::make_exception_ptr(TimeoutError(peer, waited, what)));
}

void Engine::Core::fail(std::exception_ptr cause) noexcept {
  if (failure_) return;
  failure_ = std::move(cause);
  if (options_.log != nullptr && options_.log->enabled(LogLevel::info)) {
    options_.log->info("the job ends here, with " + std::to_string(running_.size()) +
                       " operations in flight: " + text_of(failure_));
  }
  for (const std::shared_ptr<Submission>& s : running_) s->operation.fail(failure_);
}

// Peers are told only when nothing of ours is in flight any more: their goodbye must not find us reading
// their memory.
void Engine::Core::close_when_empty() noexcept {
  if (closed_ || !failure_ || !running_.empty()) return;
  closed_ = true;
  transport_.close(text_of(failure_));
}

void Engine::Core::shut_down(std::exception_ptr cause) noexcept {
  if (closed_) {
    while (executor_.run()) continue;
    return;
  }
  if (cause) fail(std::move(cause));
  while (executor_.run()) continue;  // what was submitted before is known now
  if (!running_.empty()) {
    fail(std::make_exception_ptr(TransportError(TransportError::Kind::closed, -1,
                                                "rank " + std::to_string(transport_.rank()) +
                                                    " shut down with " + std::to_string(running_.size()) +
                                                    " operations in flight")));
  }
  while (!running_.empty()) {  // computations on the worker pool are waited for
    if (!executor_.run()) std::this_thread::yield();
  }
  scheduler_->look_at_hold();
  scheduler_->end_hold_span();
  if (failure_)
    close_when_empty();
  else
    transport_.close("");
  closed_ = true;
  while (executor_.run()) continue;
}

bool Engine::Core::poll() noexcept {
  scheduler_->look_at_hold();  // before the transport moves more of what is to wait
  bool any = transport_.poll();
  if (!failure_ && !closed_) {
    if (std::exception_ptr broken = transport_.failure()) fail(std::move(broken));
  }
  any |= executor_.run();
  any |= scheduler_->pump();
  close_when_empty();
  return any;
}

Time Engine::Core::next_deadline() const {
  if (!executor_.idle()) return Time{0};
  return std::min({transport_.next_event(), executor_.next_timer(), scheduler_->next_deadline()});
}

Engine::Engine(Transport& transport, const EngineOptions& options, WorkerPool* pool)
    : core_(std::make_unique<Core>(transport, options, pool)) {}
Engine::~Engine() { core_->shut_down(nullptr); }

Comm Engine::world() const { return core_->world(); }
Ticket Engine::submit(const Comm& comm, const SubmitOptions& options, Make make) {
  return core_->submit(comm, options, std::move(make));
}
Ticket Engine::settled() { return core_->settled(); }
void Engine::hold(double predicted_seconds) { core_->hold(predicted_seconds); }
void Engine::release() { core_->release(); }
Time Engine::now() const { return core_->now(); }
void Engine::log_line(const std::string& line) const { core_->log_line(line); }
void Engine::note(TraceEvent::Kind kind, std::string_view name, std::uint32_t step, Time started) {
  core_->note(kind, name, step, started);
}
void Engine::abandon(std::exception_ptr cause) { core_->abandon(std::move(cause)); }
bool Engine::poll() noexcept { return core_->poll(); }
Time Engine::next_deadline() const { return core_->next_deadline(); }
std::exception_ptr Engine::failure() const { return core_->failure(); }
std::size_t Engine::in_flight() const { return core_->in_flight(); }
void Engine::shut_down(std::exception_ptr cause) noexcept { core_->shut_down(std::move(cause)); }

}  // namespace weft
