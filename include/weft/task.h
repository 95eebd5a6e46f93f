// Task<T>: a lazy coroutine. It starts when it is awaited (or spawned by an engine), runs on one thread, and
// gives its value or its exception to whoever awaits it.
//
// An await never grows the stack, in no build mode: a child is started inside await_suspend and, if it
// completed at once, the parent simply goes on; a child that completes later puts its parent into the
// executor's ready list. (Symmetric transfer would be shorter and overflows the stack with g++ 12 below -O2
// and under the sanitizers.)
//
// Cancellation: a suspended frame is never destroyed. An operation that fails makes every await of it throw,
// so the frames unwind in order and buffers are released only when the transport has let go of them.
//
// Frames come from the arena of the first parameter that has one (a Comm, an Executor), otherwise from the
// heap.
//
// Rules for writing coroutines (g++ 12 breaks the others silently; CONTRIBUTING.md has the reasons,
// tools/lint checks them):
//   - one co_await a statement; no co_await inside ?: or inside braces
//   - no aggregate temporaries and no capturing lambdas in the arguments of an awaited call: name them first
//   - no co_await of a call that returns a reference to an awaiter: name the reference first
//   - parameters by value; a reference only if the task is awaited in the same full expression
#pragma once

#include <coroutine>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <new>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "weft/arena.h"

namespace weft {

class Executor;
struct Operation;
template <class T = void>
class Task;

namespace detail {

template <class T>
concept HasArena = requires(T& t) {
  { t.arena() } -> std::convertible_to<Arena&>;
};

inline Arena* find_arena() { return nullptr; }
template <class First, class... Rest>
Arena* find_arena(First& first, Rest&... rest) {
  if constexpr (HasArena<First>)
    return &first.arena();
  else
    return find_arena(rest...);
}

// In front of every frame, so that it finds its way back.
struct alignas(16) FrameOrigin {
  Arena* arena;
};

class PromiseBase {
 public:
  template <class... Args>
  static void* operator new(std::size_t bytes, Args&... args) {
    Arena* arena = find_arena(args...);
    const std::size_t total = bytes + sizeof(FrameOrigin);
    void* piece = arena != nullptr ? arena->allocate(total) : ::operator new(total);
    return new (piece) FrameOrigin{arena} + 1;
  }
  static void operator delete(void* frame, std::size_t bytes) noexcept {
    FrameOrigin* origin = static_cast<FrameOrigin*>(frame) - 1;
    if (origin->arena != nullptr)
      origin->arena->deallocate(origin, bytes + sizeof(FrameOrigin));
    else
      ::operator delete(origin);
  }

  std::suspend_always initial_suspend() noexcept { return {}; }

  struct Final {
    bool await_ready() noexcept { return false; }
    template <class Promise>
    void await_suspend(std::coroutine_handle<Promise> self) noexcept {
      PromiseBase& promise = self.promise();
      if (promise.started_inline) return;  // the starter looks at done() itself
      if (promise.siblings != nullptr && --*promise.siblings > 0) return;
      if (promise.continuation) promise.resume_later();
    }
    void await_resume() noexcept {}
  };
  Final final_suspend() noexcept { return {}; }
  void unhandled_exception() noexcept { error = std::current_exception(); }

  void resume_later() noexcept;  // the continuation, through the executor

  Executor* executor = nullptr;
  Operation* operation = nullptr;  // that it is part of, where an engine runs it
  std::coroutine_handle<> continuation;
  std::size_t* siblings = nullptr;  // when_all: how many children still run
  bool started_inline = false;      // inside the resume() that started it
  std::exception_ptr error;
};

template <class T>
class Promise : public PromiseBase {
 public:
  Task<T> get_return_object() noexcept;
  template <class U>
  void return_value(U&& value) {
    value_.emplace(std::forward<U>(value));
  }
  T take() { return std::move(*value_); }

 private:
  std::optional<T> value_;
};

template <>
class Promise<void> : public PromiseBase {
 public:
  Task<void> get_return_object() noexcept;
  void return_void() noexcept {}
  void take() {}
};

}  // namespace detail

template <class T>
class [[nodiscard]] Task {
 public:
  using promise_type = detail::Promise<T>;
  using Handle = std::coroutine_handle<promise_type>;

  Task() = default;
  explicit Task(Handle handle) : handle_(handle) {}
  Task(Task&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Task& operator=(Task&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Task() {  // REQUIRES: not started, or done
    if (handle_) handle_.destroy();
  }

  bool valid() const { return static_cast<bool>(handle_); }
  bool done() const { return handle_.done(); }

  // Runs the task up to its first suspension. When it ends later, `continuation` (if any) becomes ready on
  // `executor`; when it ends inside this call, done() is true and nothing is resumed.
  void start(Executor& executor, std::coroutine_handle<> continuation = {}, std::size_t* siblings = nullptr) {
    detail::PromiseBase& promise = handle_.promise();
    promise.executor = &executor;
    promise.continuation = continuation;
    promise.siblings = siblings;
    promise.started_inline = true;
    handle_.resume();
    if (!handle_.done()) promise.started_inline = false;
  }
  std::exception_ptr error() const { return handle_.promise().error; }
  // The value or the exception. REQUIRES: done().
  T result() {
    if (handle_.promise().error) std::rethrow_exception(handle_.promise().error);
    return handle_.promise().take();
  }

  // The same, as a part of what `parent` is part of.
  void start_below(const detail::PromiseBase& parent, std::coroutine_handle<> continuation,
                   std::size_t* siblings = nullptr) {
    handle_.promise().operation = parent.operation;
    start(*parent.executor, continuation, siblings);
  }

  bool await_ready() const noexcept { return false; }
  template <class Promise>
  bool await_suspend(std::coroutine_handle<Promise> parent) {
    start_below(parent.promise(), parent);
    return !handle_.done();
  }
  T await_resume() { return result(); }

 private:
  Handle handle_;
};

namespace detail {
template <class T>
Task<T> Promise<T>::get_return_object() noexcept {
  return Task<T>(std::coroutine_handle<Promise<T>>::from_promise(*this));
}
inline Task<void> Promise<void>::get_return_object() noexcept {
  return Task<void>(std::coroutine_handle<Promise<void>>::from_promise(*this));
}
}  // namespace detail

// Runs all tasks at once and ends when ALL of them have ended; then rethrows the exception of the first in
// order that failed. The tasks must stay alive until the await is over, so they are named: `co_await
// when_all(tasks)`.
class WhenAll {
 public:
  explicit WhenAll(std::span<Task<void>> tasks) : tasks_(tasks) {}
  bool await_ready() const noexcept { return tasks_.empty(); }
  template <class Promise>
  bool await_suspend(std::coroutine_handle<Promise> parent) {
    // One for this call, so that no child resumes the parent before all are started.
    running_ = tasks_.size() + 1;
    for (Task<void>& task : tasks_) {
      task.start_below(parent.promise(), parent, &running_);
      if (task.done()) --running_;
    }
    return --running_ > 0;
  }
  void await_resume() {
    for (Task<void>& task : tasks_) task.result();
  }

 private:
  std::span<Task<void>> tasks_;
  std::size_t running_ = 0;
};

inline WhenAll when_all(std::vector<Task<void>>& tasks) { return WhenAll(tasks); }
inline WhenAll when_all(std::span<Task<void>> tasks) { return WhenAll(tasks); }

}  // namespace weft
