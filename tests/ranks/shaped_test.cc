// `shaped` in wall time. What the link forbids is exact and checked on every run: nothing is faster than its
// ports (less what a rank may catch up). What it allows depends on a noisy machine, so the best of a few
// tries is compared with the model.
#include "transports/shaped.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "instrumented.h"
#include "transports/bare_rank.h"
#include "transports/link_spec.h"
#include "transports/threads.h"
#include "weft/error.h"

namespace weft {
namespace {

constexpr Time kCatchUp = 500us;
constexpr int kAttempts = 30;  // short ones: other processes may be running

LinkOptions link(int ranks, std::string_view text) {
  const LinkSpec spec = parse_link(text);
  LinkOptions options;
  options.ranks = ranks;
  options.bytes_per_second = spec.bytes_per_second;
  options.latency_seconds = spec.latency_seconds;
  return options;
}

std::span<const std::byte> view(const std::vector<std::byte>& bytes) { return bytes; }

Time now() { return SteadyClock().now(); }

// How much slower than the model the best of a few tries may be.
constexpr double at_most(double factor) { return kInstrumented ? 100 : factor; }

// The share of a core that the calling thread has used.
class CoreShare {
 public:
  double operator()() const { return (cpu_seconds() - cpu_) / seconds(now() - begin_); }

 private:
  static double cpu_seconds() {
    rusage usage{};
    getrusage(RUSAGE_THREAD, &usage);
    const auto of = [](const timeval& t) {
      return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
    };
    return of(usage.ru_utime) + of(usage.ru_stime);
  }
  double cpu_ = cpu_seconds();
  Time begin_ = now();
};

// One program on every rank, each a thread over a shaped link.
class Job {
 public:
  explicit Job(const LinkOptions& options, std::size_t eager_limit = 8192, Time catch_up = kCatchUp)
      : threads_({.ranks = options.ranks, .eager_limit = eager_limit, .tamper = {}}),
        network_(options, catch_up) {
    for (int r = 0; r < options.ranks; ++r) {
      transports_.push_back(std::make_unique<ShapedTransport>(threads_.transport(r), network_));
    }
  }
  // Rethrows the error of the first rank that has one.
  void run(const std::function<Task<void>(Comm)>& program) {
    std::vector<std::exception_ptr> errors(transports_.size());
    std::vector<std::thread> threads;
    for (std::size_t r = 0; r < transports_.size(); ++r) {
      threads.emplace_back([&, r] {
        BareRank rank(*transports_[r]);
        try {
          rank.start(program);
          rank.run();
        } catch (...) {
          errors[r] = std::current_exception();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::exception_ptr& error : errors) {
      if (error) std::rethrow_exception(error);
    }
  }
  ShapedTransport& transport(int rank) { return *transports_[static_cast<std::size_t>(rank)]; }

 private:
  ThreadsWorld threads_;
  ShapedNetwork network_;
  std::vector<std::unique_ptr<ShapedTransport>> transports_;
};

// Rank 0 sends `count` messages to rank 1, `window` of them at a time. Seconds from the first post to the
// last delivery.
double stream_seconds(const LinkOptions& options, std::size_t bytes, std::uint32_t count,
                      std::uint32_t window, double* core_share = nullptr, Time catch_up = kCatchUp) {
  Job job(options, 8192, catch_up);
  Time begin{}, end{};
  double share[2] = {};
  job.run([&](Comm comm) -> Task<void> {
    std::vector<std::byte> memory(bytes);
    std::vector<Transfer> transfers(count);
    const auto post = [&](std::uint32_t i) {
      transfers[i] = comm.rank() == 0 ? comm.send(1, i, view(memory)) : comm.recv(0, i, std::span(memory));
    };
    if (comm.rank() == 0) co_await comm.sleep_until(comm.now() + 1ms);  // until the other is ready
    const CoreShare used;
    if (comm.rank() == 0) begin = now();
    for (std::uint32_t i = 0; i < std::min(window, count); ++i) post(i);
    for (std::uint32_t i = 0; i < count; ++i) {
      Transfer& next = transfers[i];
      co_await next;
      if (i + window < count) post(i + window);
    }
    if (comm.rank() == 1) end = now();
    share[comm.rank()] = used();
  });
  if (core_share != nullptr) *core_share = std::max(share[0], share[1]);
  return seconds(end - begin);
}

TEST(Shaped, AStreamHasTheRateOfTheLink) {
  constexpr std::size_t kBytes = 256 << 10;
  constexpr std::uint32_t kCount = 16;
  const double ideal = kCount * kBytes / 125e6;
  for (const std::uint32_t window : {1u, 4u}) {
    double best = 1e9;
    for (int attempt = 0; attempt < kAttempts && best > 1.02 * ideal; ++attempt) {
      const double taken = stream_seconds(link(2, "1gbit"), kBytes, kCount, window);
      EXPECT_GT(taken, ideal - seconds(kCatchUp)) << "faster than the link";
      best = std::min(best, taken);
    }
    std::printf("1 Gbit/s, %u x 256 KiB, %u in flight: %.2f %% of nominal\n", kCount, window,
                100 * ideal / best);
    EXPECT_LT(best, at_most(1.02) * ideal) << window << " in flight";
  }
  // Control: when nobody catches up, each message pays for three threads that wake up.
  const double uncorrected = stream_seconds(link(2, "1gbit"), kBytes, kCount, 1, nullptr, Time{0});
  std::printf("one in flight without catching up: %.2f %% of nominal\n", 100 * ideal / uncorrected);
  EXPECT_GT(uncorrected, ideal + kCount * 10e-6);
}

TEST(Shaped, WaitingTakesLittleOfACore) {
  constexpr std::size_t kBytes = 256 << 10;
  constexpr std::uint32_t kCount = 64;
  double best = 1;
  for (int attempt = 0; attempt < kAttempts && best > 0.05; ++attempt) {
    double share = 0;
    stream_seconds(link(2, "1gbit,50us"), kBytes, kCount, 4, &share);
    best = std::min(best, share);
  }
  std::printf("busier of the two threads: %.1f %% of a core\n", 100 * best);
  EXPECT_LT(best, at_most(0.10));
}

TEST(Shaped, LatencyIsPaidOnce) {
  constexpr int kRounds = 10;
  const double ideal = 2 * kRounds * 2e-3;
  double best = 1e9;
  for (int attempt = 0; attempt < kAttempts && best > 1.03 * ideal; ++attempt) {
    Job job(link(2, "1gbit,2ms"));
    Time begin{}, end{};
    job.run([&](Comm comm) -> Task<void> {
      std::vector<std::byte> mine(8), theirs(8);
      if (comm.rank() == 0) co_await comm.sleep_until(comm.now() + 1ms);
      if (comm.rank() == 0) begin = now();
      for (std::uint32_t round = 0; round < kRounds; ++round) {
        Transfer received = comm.recv(1 - comm.rank(), round, std::span(theirs));
        if (comm.rank() == 1) co_await received;
        Transfer sent = comm.send(1 - comm.rank(), round, view(mine));
        co_await received;
        co_await sent;
      }
      if (comm.rank() == 0) end = now();
    });
    const double taken = seconds(end - begin);
    EXPECT_GT(taken, ideal - seconds(kCatchUp));
    best = std::min(best, taken);
  }
  std::printf("a hop of 2 ms took %.3f ms\n", 1e3 * best / (2 * kRounds));
  EXPECT_LT(best, at_most(1.03) * ideal);
}

TEST(Shaped, TwoFlowsShareAPort) {
  constexpr std::size_t kBytes = 1 << 20;  // 8.4 ms alone
  const double alone = kBytes / 125e6;
  double best_spread = 1e9, best_last = 1e9;
  for (int attempt = 0; attempt < kAttempts && (best_spread > 0.1 * alone || best_last > 2.1 * alone);
       ++attempt) {
    Job job(link(3, "1gbit"));
    Time begin{}, end[3] = {};
    std::vector<std::byte> memory[3];
    for (auto& m : memory) m.resize(kBytes);
    job.run([&](Comm comm) -> Task<void> {
      const auto me = static_cast<std::size_t>(comm.rank());
      if (me > 0) {
        Transfer received = comm.recv(0, 0, std::span(memory[me]));
        co_await received;
        end[me] = now();
        co_return;
      }
      co_await comm.sleep_until(comm.now() + 1ms);
      begin = now();
      Transfer first = comm.send(1, 0, view(memory[0]));
      Transfer second = comm.send(2, 0, view(memory[0]));
      co_await first;
      co_await second;
    });
    const double first = seconds(std::min(end[1], end[2]) - begin);
    const double last = seconds(std::max(end[1], end[2]) - begin);
    EXPECT_GT(last, 2 * alone);
    EXPECT_GT(first, 2 * alone - 65536 / 125e6 - 1e-6) << "one flow had more than its half";
    best_last = std::min(best_last, last);
    best_spread = std::min(best_spread, last - first);
  }
  EXPECT_LT(best_last, at_most(2.1) * alone);
  EXPECT_LT(best_spread, at_most(0.15) * alone);
}

TEST(Shaped, ANodeHasOneScaleOutPort) {
  constexpr std::size_t kBytes = 64 << 10;
  LinkOptions options = link(4, "100mbit,50us");
  options.nodes = 2;
  options.scale_up_bytes_per_second = 125e6;
  const double out = kBytes / 12.5e6;  // 5.2 ms
  const double up = kBytes / 125e6;
  double best_out = 1e9, best_up = 1e9;
  for (int attempt = 0; attempt < kAttempts && (best_out > 2.15 * out || best_up > 4 * up); ++attempt) {
    Job job(options);
    Time begin[2] = {}, end[4] = {}, end_up{};
    std::vector<std::byte> memory(kBytes), into[4], into_up(kBytes);
    for (auto& m : into) m.resize(kBytes);
    job.run([&](Comm comm) -> Task<void> {
      const auto me = static_cast<std::size_t>(comm.rank());
      if (me >= 2) {
        Transfer received = comm.recv(comm.rank() - 2, 0, std::span(into[me]));
        co_await received;
        end[me] = now();
        co_return;
      }
      Transfer up_received = me == 1 ? comm.recv(0, 1, std::span(into_up)) : Transfer();
      co_await comm.sleep_until(comm.now() + 1ms);
      begin[me] = now();
      Transfer sent = comm.send(comm.rank() + 2, 0, view(memory));
      Transfer up_sent = me == 0 ? comm.send(1, 1, view(memory)) : Transfer();
      co_await up_received;
      if (me == 1) end_up = now();
      co_await up_sent;
      co_await sent;
    });
    const double last = seconds(std::max(end[2], end[3]) - std::min(begin[0], begin[1]));
    EXPECT_GT(last, 2 * out + 50e-6);
    EXPECT_GT(seconds(end_up - begin[0]), up);
    best_out = std::min(best_out, last);
    best_up = std::min(best_up, seconds(end_up - begin[0]));
  }
  EXPECT_LT(best_out, at_most(2.15) * out);
  EXPECT_LT(best_up, at_most(4) * up) << "traffic inside a node waits for the slow port";
}

TEST(Shaped, RanksMayOutnumberCores) {
  constexpr std::size_t kBytes = 256 << 10;
  constexpr int kRanks = 8;
  const double ideal = 2 * (kRanks - 1) * (kBytes / 125e6 + 50e-6);
  double best = 1e9;
  for (int attempt = 0; attempt < kAttempts && best > 1.1 * ideal; ++attempt) {
    Job job(link(kRanks, "1gbit,50us"));
    std::vector<Time> begin(kRanks), end(kRanks);
    job.run([&](Comm comm) -> Task<void> {
      std::vector<std::byte> mine(kBytes), theirs(kBytes);
      const auto me = static_cast<std::size_t>(comm.rank());
      begin[me] = now();
      for (std::uint32_t hop = 0; hop < 2 * (kRanks - 1); ++hop) {
        Transfer received = comm.recv(comm.before(1), hop, std::span(theirs));
        Transfer sent = comm.send(comm.after(1), hop, view(mine));
        co_await received;
        co_await sent;
      }
      end[me] = now();
    });
    const double taken = seconds(*std::ranges::max_element(end) - *std::ranges::min_element(begin));
    EXPECT_GT(taken, ideal - seconds(kCatchUp));
    best = std::min(best, taken);
  }
  std::printf("ring of 8 ranks, 14 hops of 256 KiB: %.1f %% of ideal\n", 100 * ideal / best);
  EXPECT_LT(best, at_most(1.25) * ideal);
}

// Rank 0 posts a long and then a short message. Whether the long one was there when the short one had
// arrived.
bool long_message_is_first(bool one_flow, std::size_t eager_limit) {
  Job job(link(2, "100mbit"), eager_limit);
  bool long_was_first = false;
  job.run([&](Comm comm) -> Task<void> {
    std::vector<std::byte> large(256 << 10, std::byte{1}), small(8, std::byte{2});
    const std::uint32_t other = one_flow ? 0 : 1;
    if (comm.rank() == 0) {
      Transfer first = comm.send(1, 0, view(large));
      Transfer second = comm.send(1, other, view(small));
      co_await first;
      co_await second;
    } else {
      std::vector<std::byte> into(256 << 10), into_small(8);
      Transfer first = comm.recv(0, 0, std::span(into));
      Transfer second = comm.recv(0, other, std::span(into_small));
      co_await second;
      long_was_first = first.done();
      co_await first;
      EXPECT_EQ(into, large);
      EXPECT_EQ(into_small, small);
    }
  });
  return long_was_first;
}

TEST(Shaped, AFlowIsFirstInFirstOut) {
  for (const std::size_t eager_limit : {std::size_t{0}, std::size_t{8192}}) {
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(long_message_is_first(true, eager_limit));
    // Control: in a flow of its own the short one overtakes (unless its receiver overslept both).
    bool overtaken = false;
    for (int attempt = 0; attempt < kAttempts && !overtaken; ++attempt) {
      overtaken = !long_message_is_first(false, eager_limit);
    }
    EXPECT_TRUE(overtaken);
  }
}

TEST(Shaped, AHeldSendCanBeCancelled) {
  Job job(link(2, "100mbit"));
  Time begin{}, end{};
  job.run([&](Comm comm) -> Task<void> {
    std::vector<std::byte> small(1000, std::byte{7});
    if (comm.rank() == 0) {
      auto large = std::make_unique<std::vector<std::byte>>(10 << 20);  // 840 ms
      begin = now();
      {
        Transfer dropped = comm.send(1, 0, view(*large));
        Transfer behind = comm.send(1, 0, view(small));  // in the same flow: goes first now
        co_await comm.sleep_until(comm.now() + 5ms);
        dropped = Transfer();
        large.reset();
        co_await behind;
      }
      end = now();
    } else {
      std::vector<std::byte> into(1000);
      Transfer received = comm.recv(0, 0, std::span(into));
      co_await received;
      EXPECT_EQ(into, small);
    }
  });
  EXPECT_LT(seconds(end - begin), 0.4) << "the rest of a cancelled message must not occupy the port";
}

TEST(Shaped, ALostPeerIsNamedWhileSendsAreHeld) {
  Job job(link(3, "10mbit"));
  int named = 0;
  try {
    job.run([&](Comm comm) -> Task<void> {
      std::vector<std::byte> large(1 << 20), into(1 << 20);  // 840 ms
      if (comm.rank() == 2) {
        co_await comm.sleep_until(comm.now() + 5ms);
        job.transport(2).close("told to stop");
        co_return;
      }
      Transfer sent = comm.send(1 - comm.rank(), 0, view(large));
      Transfer received = comm.recv(1 - comm.rank(), 0, std::span(into));
      co_await received;
      co_await sent;
    });
  } catch (const TransportError& error) {
    EXPECT_EQ(error.peer(), 2);
    EXPECT_NE(std::string(error.what()).find("told to stop"), std::string::npos) << error.what();
    ++named;
  }
  EXPECT_EQ(named, 1);
}

TEST(Shaped, WhatIsHeldGoesAheadOfAGoodbye) {
  Job job(link(2, "10mbit"));
  job.run([&](Comm comm) -> Task<void> {
    std::vector<std::byte> bytes(4000, std::byte{5});
    if (comm.rank() == 0) {
      Transfer first = comm.send(1, 0, view(bytes));
      Transfer second = comm.send(1, 0, view(bytes));
      job.transport(0).close("");
      co_await first;
      co_await second;
    } else {
      for (int i = 0; i < 2; ++i) {
        std::vector<std::byte> into(4000);
        Transfer received = comm.recv(0, 0, std::span(into));
        co_await received;
        EXPECT_EQ(into, bytes);
      }
    }
  });
}

// Seconds until a message that waits behind urgent traffic has arrived. 10 kB at 100 Mbit/s are 0.8 ms.
double behind_urgent_traffic(TrafficClass traffic, Time holds, Time somebody_waits_after) {
  Job job(link(2, "100mbit"));
  Time begin{}, end{};
  job.run([&](Comm comm) -> Task<void> {
    std::vector<std::byte> bytes(10'000);
    comm.operation().traffic = traffic;
    if (comm.rank() == 1) {
      Transfer received = comm.recv(0, 0, std::span(bytes));
      co_await received;
      end = now();
      co_return;
    }
    begin = now();
    if (holds > 0ms) job.transport(0).give_way(begin + holds);
    Transfer sent = comm.send(1, 0, view(bytes));
    if (somebody_waits_after != kNever) {
      co_await comm.sleep_until(begin + somebody_waits_after);
      comm.operation().waited_for = true;
      job.transport(0).give_way(begin + holds);
    }
    co_await sent;
  });
  return seconds(end - begin);
}

TEST(Shaped, WhatHasNotBegunGivesWay) {
  EXPECT_GE(behind_urgent_traffic(TrafficClass::gradient, 300ms, kNever), 0.3);
  // Controls: nothing urgent, urgent itself, and somebody waits.
  EXPECT_LT(behind_urgent_traffic(TrafficClass::gradient, 0ms, kNever), 0.2);
  EXPECT_LT(behind_urgent_traffic(TrafficClass::blocking, 300ms, kNever), 0.2);
  EXPECT_LT(behind_urgent_traffic(TrafficClass::gradient, 300ms, 20ms), 0.2);
}

TEST(Shaped, ARankReachesItselfAtOnce) {
  Job job(link(1, "8bit"));
  job.run([](Comm comm) -> Task<void> {
    std::vector<std::byte> from(100'000, std::byte{3}), to(100'000);
    Transfer received = comm.recv(0, 0, std::span(to));
    Transfer sent = comm.send(0, 0, view(from));
    co_await received;
    co_await sent;
    EXPECT_EQ(from, to);
  });
}

}  // namespace
}  // namespace weft
