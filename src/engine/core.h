// What an Engine (weft/engine.h) is a handle of: the operations in flight on one rank, their deadlines and
// their end.
//
// Thread: the engine's, except where weft/engine.h says any.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <string_view>
#include <vector>

#include "transports/endpoint.h"
#include "weft/engine.h"

namespace weft {

class Scheduler;

class Engine::Core {
 public:
  Core(Transport& transport, const EngineOptions& options, WorkerPool* pool);
  ~Core();
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  Comm world() const;
  Ticket submit(const Comm& comm, const SubmitOptions& options, Make make);
  Ticket settled();
  void hold(double predicted_seconds);
  void release();
  Time now() const { return executor_.now(); }
  void log_line(const std::string& line) const;
  void note(TraceEvent::Kind kind, std::string_view name, std::uint32_t step, Time started);
  void abandon(std::exception_ptr cause);
  bool poll() noexcept;
  Time next_deadline() const;
  std::exception_ptr failure() const { return failure_; }
  std::size_t in_flight() const { return running_.size(); }
  void shut_down(std::exception_ptr cause) noexcept;

  // For submissions and tickets (submission.h).
  Executor& executor() { return executor_; }
  Scheduler& scheduler() { return *scheduler_; }
  void accept(std::shared_ptr<detail::Submission> submission);
  void doubt(detail::Submission& submission);
  void look_at_deadline(detail::Submission& submission);

 private:
  void finish(detail::Submission& submission, std::exception_ptr error);
  Time own_progress(const detail::Submission& submission, int depth = 0) const;
  Time last_progress(const detail::Submission& submission) const;
  Time deadline_of(const detail::Submission& submission) const;
  void tell_log(const detail::Submission& submission, Time now) const;
  void expired(detail::Submission& submission);
  void fail(std::exception_ptr cause) noexcept;
  void close_when_empty() noexcept;

  Transport& transport_;
  EngineOptions options_;
  std::shared_ptr<Arena> arena_;
  Executor executor_;
  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<Endpoint> endpoint_;
  struct Identities;
  std::unique_ptr<Identities> identities_;  // of all that was submitted and has not ended
  std::vector<std::shared_ptr<detail::Submission>> running_;
  std::exception_ptr failure_;
  bool closed_ = false;

  struct Abandon : Remote {
    Core* engine = nullptr;
    std::exception_ptr cause;
  };
  std::atomic<bool> abandoned_{false};
  Abandon abandon_;  // of the first who abandons
};

}  // namespace weft
