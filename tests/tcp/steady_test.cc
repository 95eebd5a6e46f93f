// A tcp transport that runs: nothing is allocated per message, urgent messages overtake, idle ranks cost
// nothing.
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <time.h>

#include <atomic>
#include <barrier>

#include "counted_new.h"
#include "tcp/tcp_job.h"
#include "transports/endpoint.h"

namespace weft {
namespace {

using testing::job_options;
using testing::pattern;
using testing::run_ranks;
using testing::view;

// `rounds` exchanges of each length, in both directions at once; `mark` is called after each.
Task<void> exchange_rounds(Comm comm, std::span<std::byte> out, std::span<std::byte> in,
                           std::vector<std::size_t> lengths, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    for (std::uint32_t hop = 0; hop < lengths.size(); ++hop) {
      Transfer received = comm.recv(1 - comm.rank(), hop, in.first(lengths[hop]));
      Transfer sent = comm.send(1 - comm.rank(), hop, std::span<const std::byte>(out.first(lengths[hop])));
      co_await received;
      co_await sent;
    }
  }
}

TEST(TcpSteady, NothingIsAllocatedPerMessage) {
  if (!testing::kCountsAllocations) GTEST_SKIP() << "this build cannot count allocations";
  for (const std::size_t eager_limit : {std::size_t{64 << 10}, std::size_t{0}}) {
    TcpOptions options = job_options(2);
    options.eager_limit = eager_limit;
    std::barrier<> together(2);
    std::uint64_t before = 0;
    std::uint64_t after = 0;
    run_ranks(options, [&](Transport& transport, BareRank& bare) {
      std::vector<std::byte> out(1 << 20);
      std::vector<std::byte> in(1 << 20);
      const std::vector<std::size_t> lengths = {0, 8, 5000, 20'000, 65'536, 300'000, 1 << 20};
      bare.start([&](Comm comm) { return exchange_rounds(comm, out, in, lengths, 100); });
      bare.run();
      bare.start([&](Comm comm) { return exchange_rounds(comm, out, in, lengths, 200); }, 1);
      together.arrive_and_wait();
      if (transport.rank() == 0) before = testing::allocations();
      together.arrive_and_wait();
      testing::drive(transport, bare, 20s, [&] { return bare.done(); });
      together.arrive_and_wait();
      if (transport.rank() == 0) after = testing::allocations();
      together.arrive_and_wait();
      bare.rethrow();
    });
    // 2,800 messages. Growing a queue once more is not per message.
    EXPECT_LE(after - before, 8u) << "eager limit " << eager_limit;
  }
  const std::uint64_t control = testing::allocations();
  {
    const std::vector<int> one(1);
  }
  EXPECT_GT(testing::allocations(), control);  // the counter counts
}

// The place of one short message among 96 long ones that were posted before it, as the receiver sees them.
int place_of_late_message(TrafficClass traffic, int priority) {
  constexpr int kLong = 96;
  std::atomic<int> place{-1};
  TcpOptions options = job_options(2);
  run_ranks(options, [&](Transport&, BareRank& bare) {
    const std::vector<std::byte> data = pattern(1 << 20, 1);
    Operation urgent;
    std::uint32_t arrived = 0;
    auto count = [&](std::span<const std::byte>) { ++arrived; };
    auto note = [&](std::span<const std::byte>) { place = static_cast<int>(arrived); };
    bare.start([&](Comm comm) -> Task<void> {
      urgent.traffic = traffic;
      urgent.priority = priority;
      urgent.slot = 7;
      urgent.executor = &comm.endpoint().executor();
      const Comm fast = comm.bound(urgent);
      std::vector<Transfer> transfers;
      if (comm.rank() == 0) {
        for (std::uint32_t hop = 0; hop < kLong; ++hop) transfers.push_back(comm.send(1, hop, view(data)));
        for (Transfer& early : std::span(transfers).first(4)) co_await early;
        transfers.push_back(fast.send(1, 0, view(data).first(1000)));
      } else {
        transfers.push_back(fast.recv_with(0, 0, 1000, note));
        for (std::uint32_t hop = 0; hop < kLong; ++hop)
          transfers.push_back(comm.recv_with(0, hop, 1 << 20, count));
      }
      for (Transfer& transfer : transfers) co_await transfer;
    });
    bare.run();
  });
  return place;
}

TEST(TcpSteady, UrgentOvertakesWhatIsQueued) {
  const int by_class = place_of_late_message(TrafficClass::blocking, 0);
  const int by_priority = place_of_late_message(TrafficClass::gradient, -1);
  const int equal = place_of_late_message(TrafficClass::gradient, 0);
  const int behind = place_of_late_message(TrafficClass::delayed, 0);
  RecordProperty("by_class", by_class);
  RecordProperty("by_priority", by_priority);
  EXPECT_LT(by_class, 40);
  EXPECT_LT(by_priority, 40);
  EXPECT_EQ(equal, 96);  // control: without priority it waits for all of them
  EXPECT_EQ(behind, 96);
}

// Rank 0 gives way for `hold` and posts two messages; `waited` of them (counted from the younger one) are
// waited for once they lie there. Seconds until rank 1 has each.
struct GivingWay {
  TrafficClass traffic = TrafficClass::gradient;
  Time hold = 300ms;
  int waited = 0;
};
std::array<double, 2> seconds_while_giving_way(const GivingWay& way) {
  std::array<double, 2> took{};
  const std::vector<std::byte> data = pattern(1 << 20, 3);
  run_ranks(job_options(2), [&](Transport& transport, BareRank& bare) {
    std::array<Operation, 2> operations;
    std::array<std::vector<std::byte>, 2> in{std::vector<std::byte>(data.size()),
                                             std::vector<std::byte>(data.size())};
    bare.start([&](Comm comm) -> Task<void> {
      std::vector<Transfer> transfers;
      const Time start = transport.clock().now();
      if (comm.rank() == 0 && way.hold > 0ms) transport.give_way(start + way.hold);
      for (std::uint32_t i = 0; i < 2; ++i) {
        operations[i].traffic = way.traffic;
        operations[i].slot = 7 + i;
        operations[i].executor = &comm.endpoint().executor();
        const Comm bound = comm.bound(operations[i]);
        if (comm.rank() == 0)
          transfers.push_back(bound.send(1, 0, view(data)));
        else
          transfers.push_back(bound.recv(0, 0, std::span(in[i])));
      }
      if (comm.rank() == 0 && way.waited > 0) {
        co_await comm.sleep_until(start + 30ms);
        for (int i = 0; i < way.waited; ++i) operations[static_cast<std::size_t>(1 - i)].waited_for = true;
        transport.give_way(start + way.hold);  // looks again
      }
      for (std::size_t i = 2; i-- > 0;) {
        Transfer& transfer = transfers[i];
        co_await transfer;
        if (comm.rank() == 1) took[i] = seconds(transport.clock().now() - start);
      }
    });
    bare.run();
  });
  return took;
}

TEST(TcpSteady, WhatHasNotBegunGivesWayForABoundedTime) {
  const std::array<double, 2> held = seconds_while_giving_way({});
  EXPECT_GT(held[0], 0.25);
  EXPECT_LT(held[0], 0.45);  // to the point, whatever the heartbeat's beat
  const std::array<double, 2> urgent = seconds_while_giving_way({.traffic = TrafficClass::blocking});
  EXPECT_LT(urgent[1], 0.25);
  const std::array<double, 2> free = seconds_while_giving_way({.hold = 0ms});  // control
  EXPECT_LT(free[1], 0.25);
}

TEST(TcpSteady, WhatSomebodyWaitsForGoesAtOnceAlsoBehindOthers) {
  const std::array<double, 2> one = seconds_while_giving_way({.hold = 600ms, .waited = 1});
  EXPECT_LT(one[1], 0.4);
  EXPECT_GT(one[0], 0.55);  // nobody waits for the older one
  const std::array<double, 2> both = seconds_while_giving_way({.hold = 600ms, .waited = 2});
  EXPECT_LT(both[0], 0.4);
}

// Under one key: short, long, short. A long one asks first, and asking is no reason to hold back; but its
// request must not overtake the short one, which does not ask and gives way.
TEST(TcpSteady, WhatGivesWayIsNotOvertakenByItsOwnSuccessors) {
  const std::array<std::vector<std::byte>, 3> data{pattern(100, 1), pattern(1 << 20, 2), pattern(200, 3)};
  std::array<std::vector<std::byte>, 3> in;
  for (std::size_t i = 0; i < in.size(); ++i) in[i].resize(data[i].size());
  run_ranks(job_options(2), [&](Transport& transport, BareRank& bare) {
    Operation operation;
    bare.start([&](Comm comm) -> Task<void> {
      operation.traffic = TrafficClass::gradient;
      operation.executor = &comm.endpoint().executor();
      const Comm bound = comm.bound(operation);
      if (comm.rank() == 0) transport.give_way(transport.clock().now() + 100ms);
      std::vector<Transfer> transfers;
      for (std::size_t i = 0; i < in.size(); ++i) {
        if (comm.rank() == 0)
          transfers.push_back(bound.send(1, 0, view(data[i])));
        else
          transfers.push_back(bound.recv(0, 0, std::span(in[i])));
      }
      for (Transfer& transfer : transfers) co_await transfer;
    });
    bare.run();
  });
  EXPECT_EQ(in, data);
}

// Holding back is not silence: longer than a peer is given to answer.
TEST(TcpSteady, WhoGivesWayForLongIsNotTakenForDead) {
  EXPECT_GT(seconds_while_giving_way({.hold = 2500ms})[0], 2.4);
}

// Ranks may outnumber cores: who waits must sleep.
TEST(TcpSteady, IdleRanksTakeUnderOnePercentOfACore) {
  rusage before{};
  rusage after{};
  TcpOptions options = job_options(4);
  std::barrier<> together(4);
  run_ranks(options, [&](Transport& transport, BareRank& bare) {
    together.arrive_and_wait();
    if (transport.rank() == 0) ::getrusage(RUSAGE_SELF, &before);
    testing::drive(transport, bare, 1500ms, [] { return false; });
    if (transport.rank() == 0) ::getrusage(RUSAGE_SELF, &after);
    together.arrive_and_wait();
  });
  const auto cpu = [](const rusage& u) {
    return static_cast<double>(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           1e-6 * static_cast<double>(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
  };
  EXPECT_LT((cpu(after) - cpu(before)) / 1.5 / 4, 0.01);
}

// A sleeping rank is woken from another thread, and a wake() that comes first is not lost.
TEST(TcpSteady, WakeEndsAWait) {
  const auto transport = connect_tcp(job_options(1));
  const Time start = transport->clock().now();
  transport->wake();
  transport->wait(start + 5s);
  std::thread waker([&] {
    ::usleep(50'000);
    transport->wake();
  });
  transport->wait(start + 5s);
  waker.join();
  EXPECT_LT(seconds(transport->clock().now() - start), 2.0);
  const Time again = transport->clock().now();
  transport->wait(again + 3ms);  // control: without a wake it sleeps, and to the point
  const double slept = seconds(transport->clock().now() - again);
  EXPECT_GE(slept, 0.003);
  EXPECT_LT(slept, 0.5);
}

}  // namespace
}  // namespace weft
