// Ranks as threads of a test. An exception is caught on its rank; the first one (by rank) is rethrown where
// the ranks were spawned.
#pragma once

#include <algorithm>
#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "transports/bare_rank.h"
#include "transports/recording.h"
#include "transports/threads.h"

namespace weft::test {

// What each rank threw, or null.
inline std::vector<std::exception_ptr> spawn_catching(int ranks, const std::function<void(int)>& body) {
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&errors, &body, r] {
      try {
        body(r);
      } catch (...) {
        errors[static_cast<std::size_t>(r)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

inline void spawn(int ranks, const std::function<void(int)>& body) {
  for (const std::exception_ptr& error : spawn_catching(ranks, body)) {
    if (error) std::rethrow_exception(error);
  }
}

// A rank of a threads world that runs operations one after the other, without an engine, and counts what they
// post.
class TestRank {
 public:
  explicit TestRank(Transport& transport) : recording_(transport), bare_(recording_) {}

  // Ranks call this alike: the n-th call of all ranks is one operation. If it fails, the other ranks are
  // told.
  void run(std::function<Task<void>(Comm)> make) {
    ++step_;
    try {
      bare_.start(std::move(make), 0, step_);
      bare_.run();
    } catch (const std::exception& error) {
      recording_.close(error.what());
      throw;
    }
  }
  OperationTraffic traffic() const { return recording_.traffic(0, step_); }  // of the last run
  BareRank& bare() { return bare_; }
  Comm comm() { return bare_.comm(); }

 private:
  RecordingTransport recording_;
  BareRank bare_;
  std::uint32_t step_ = 0;
};

// `body` on every rank of a threads world.
inline std::vector<std::exception_ptr> with_ranks_catching(const ThreadsOptions& options,
                                                           const std::function<void(TestRank&)>& body) {
  ThreadsWorld world(options);
  return spawn_catching(options.ranks, [&](int r) {
    TestRank rank(world.transport(r));
    body(rank);
  });
}

inline void with_ranks(const ThreadsOptions& options, const std::function<void(TestRank&)>& body) {
  for (const std::exception_ptr& error : with_ranks_catching(options, body)) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace weft::test
