// The executor of one rank: coroutines that can go on, timers, and a box into which other threads put work.
// It waits for nothing by itself: whoever owns it calls run() (a communication thread, or the event loop of
// `sim`).
//
// Thread: everything on the owner's thread, except post().
#pragma once

#include <atomic>
#include <coroutine>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "weft/arena.h"
#include "weft/clock.h"

namespace weft {

// Fires once at a point in time, on the executor's thread. Removed by its destructor.
class Timer {
 public:
  using Fire = void (*)(Timer&);
  explicit Timer(Fire fire) : fire_(fire) {}
  ~Timer();
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;
  bool armed() const { return position_ >= 0; }

 private:
  friend class Executor;
  Fire fire_;
  class Executor* executor_ = nullptr;
  Time at_{};
  std::uint64_t sequence_ = 0;
  std::ptrdiff_t position_ = -1;  // in the executor's heap
};

// Work handed over from another thread. Intrusive: the owner keeps it alive until it has run.
struct Remote {
  void (*run)(Remote&) = nullptr;
  Remote* next = nullptr;
};

class Executor {
 public:
  Executor(Arena& arena, const Clock& clock) : arena_(arena), clock_(clock) {}
  ~Executor();  // waits for threads that are inside post()
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  Arena& arena() const { return arena_; }
  Time now() const { return clock_.now(); }
  bool simulated() const { return clock_.simulated(); }

  // Resumes `coroutine` in the next run(), after everything that is already ready. Never resumes it here: a
  // chain of completions must not grow the stack.
  void ready(std::coroutine_handle<> coroutine) { ready_.push_back(coroutine); }

  // Any thread. `work.run` is called on the executor's thread; `wake` (below) is called after it was put in.
  // The work may be the last thing that the executor's owner waits for: it ends after this has returned.
  void post(Remote& work) noexcept;
  void set_wake(std::function<void()> wake) { wake_ = std::move(wake); }

  void arm(Timer& timer, Time at);
  void disarm(Timer& timer) noexcept;
  Time next_timer() const { return heap_.empty() ? kNever : heap_.front()->at_; }

  // Runs posted work, due timers and ready coroutines, each that is there at the call. True if anything ran.
  bool run();
  bool idle() const { return ready_.empty() && inbox_.load(std::memory_order_acquire) == nullptr; }

 private:
  bool earlier(const Timer* a, const Timer* b) const;
  void place(Timer* timer, std::size_t position);
  void sift_up(std::size_t position);
  void sift_down(std::size_t position);

  Arena& arena_;
  const Clock& clock_;
  std::vector<std::coroutine_handle<>> ready_;
  std::vector<std::coroutine_handle<>> running_;
  std::vector<Timer*> heap_;
  std::uint64_t sequence_ = 0;
  std::atomic<Remote*> inbox_{nullptr};
  std::atomic<int> posting_{0};  // threads inside post()
  std::function<void()> wake_;
};

}  // namespace weft
