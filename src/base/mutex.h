// A mutex that says what it guards: clang (-Wthread-safety, in every clang build and in `make lint`) refuses
// code that touches it without the lock. Other compilers see a std::mutex.
//
//   Mutex mutex_;
//   std::deque<Mail> mails_ WEFT_GUARDED_BY(mutex_);
//   void deliver() WEFT_REQUIRES(mutex_);             // the caller holds it
//
//   const Lock lock(mutex_);
//   while (mails_.empty()) lock.wait(changed_);       // no predicate: a lambda is a function that holds nothing
#pragma once

#include <condition_variable>
#include <mutex>

#if defined(__clang__)
#define WEFT_THREAD_SAFETY(x) __attribute__((x))
#else
#define WEFT_THREAD_SAFETY(x)
#endif
#define WEFT_GUARDED_BY(mutex) WEFT_THREAD_SAFETY(guarded_by(mutex))
#define WEFT_REQUIRES(mutex) WEFT_THREAD_SAFETY(requires_capability(mutex))

namespace weft {

class WEFT_THREAD_SAFETY(capability("mutex")) Mutex {
 public:
  void lock() WEFT_THREAD_SAFETY(acquire_capability()) { mutex_.lock(); }
  void unlock() WEFT_THREAD_SAFETY(release_capability()) { mutex_.unlock(); }

 private:
  friend class Lock;
  std::mutex mutex_;
};

// Holds it while it lives, but between unlock() and lock().
class WEFT_THREAD_SAFETY(scoped_lockable) Lock {
 public:
  explicit Lock(Mutex& mutex) WEFT_THREAD_SAFETY(acquire_capability(mutex)) : lock_(mutex.mutex_) {}
  ~Lock() WEFT_THREAD_SAFETY(release_capability()) = default;
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

  void lock() WEFT_THREAD_SAFETY(acquire_capability()) { lock_.lock(); }
  void unlock() WEFT_THREAD_SAFETY(release_capability()) { lock_.unlock(); }
  // They may return for no reason.
  void wait(std::condition_variable& changed) const { changed.wait(lock_); }
  template <class TimePoint>
  std::cv_status wait_until(std::condition_variable& changed, const TimePoint& end) const {
    return changed.wait_until(lock_, end);
  }

 private:
  mutable std::unique_lock<std::mutex> lock_;
};

}  // namespace weft
