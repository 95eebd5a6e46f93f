// The simulator: times by formula, order, determinism.
#include "transports/sim.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <set>
#include <vector>

#include "sim/sim_job.h"
#include "weft/error.h"

namespace weft {
namespace {

using namespace sim_test;  // NOLINT(google-build-using-namespace): this file's fixture

TEST(Sim, PingPongTakesExactlyItsFormula) {
  constexpr int kRounds = 10;
  for (const std::size_t bytes : {0u, 8u, 1000u, 1'000'000u}) {
    for (const std::size_t eager_limit : {std::size_t{0}, std::numeric_limits<std::size_t>::max()}) {
      SimOptions options = world_of(2);
      options.eager_limit = eager_limit;
      options.link.overhead_seconds = 1e-6;
      Job job(options);
      job.run([&](Comm comm) -> Task<void> {
        std::vector<std::byte> mine(bytes), theirs(bytes);
        for (std::uint32_t round = 0; round < kRounds; ++round) {
          Transfer received = comm.recv(1 - comm.rank(), round, theirs);
          if (comm.rank() == 1) co_await received;
          Transfer sent = comm.send(1 - comm.rank(), round, view(mine));
          co_await received;
          co_await sent;
        }
      });
      const Time one_way = 1us + 5us + Time(bytes);
      EXPECT_EQ(job.world.now(), 2 * kRounds * one_way) << bytes << " bytes, eager limit " << eager_limit;
      EXPECT_EQ(job.world.statistics().alive, 0u);
    }
  }
}

TEST(Sim, ARingOfHopsTakesAHopEach) {
  constexpr std::size_t kBytes = 4096;
  for (const int size : {2, 3, 8, 64}) {
    Job job(world_of(size));
    job.run([&](Comm comm) -> Task<void> {
      std::vector<std::byte> mine = bytes_of(kBytes, static_cast<unsigned>(comm.rank()));
      std::vector<std::byte> theirs(kBytes);
      for (int hop = 0; hop + 1 < comm.size(); ++hop) {
        Transfer received = comm.recv(comm.before(1), static_cast<std::uint32_t>(hop), theirs);
        Transfer sent = comm.send(comm.after(1), static_cast<std::uint32_t>(hop), view(mine));
        co_await received;
        co_await sent;
        mine.swap(theirs);
        EXPECT_EQ(mine, bytes_of(kBytes, static_cast<unsigned>(comm.before(hop + 1))));
      }
    });
    EXPECT_EQ(job.world.now(), (size - 1) * (5us + Time(kBytes)));
    const TrafficCounters counters = job.world.transport(0).counters();
    EXPECT_EQ(counters.messages_sent, static_cast<std::uint64_t>(size - 1));
    EXPECT_EQ(counters.payload_bytes_received, kBytes * static_cast<std::uint64_t>(size - 1));
    EXPECT_EQ(counters.wire_bytes_sent, (kBytes + 64) * static_cast<std::uint64_t>(size - 1));
  }
}

TEST(Sim, ComputationTakesVirtualTime) {
  Job job(world_of(2));
  job.run([](Comm comm) -> Task<void> {
    co_await comm.sleep_until(comm.now() + 3ms);
    EXPECT_EQ(comm.now(), 3ms);
    co_await comm.sleep_until(comm.now() + (comm.rank() == 0 ? 1ms : 2ms));
  });
  EXPECT_EQ(job.world.now(), 5ms);
}

TEST(Sim, AByteScaleNeedsNoMemory) {
  SimOptions options = world_of(2);
  options.link.byte_scale = 1e6;
  Job job(options);
  std::vector<std::byte> from(1000), to(1000);
  job.run([&](Comm comm) -> Task<void> {
    Transfer transfer = comm.rank() == 0 ? comm.send(1, 0, view(from)) : comm.recv(0, 0, to);
    co_await transfer;
  });
  EXPECT_EQ(job.world.now(), 5us + 1s);
}

TEST(Sim, WithoutEagerSendsATransferBeginsWhenItsReceiveIsPosted) {
  for (const bool eager : {false, true}) {
    SimOptions options = world_of(2);
    options.eager_limit = eager ? 1 << 20 : 0;
    Job job(options);
    std::vector<std::byte> from = bytes_of(1000, 3), to(1000);
    Time sent_at{}, received_at{};
    job.run([&](Comm comm) -> Task<void> {
      if (comm.rank() == 0) {
        Transfer sent = comm.send(1, 0, view(from));
        co_await sent;
        sent_at = comm.now();
        std::fill(from.begin(), from.end(), std::byte{0});  // the memory is the sender's again
      } else {
        co_await comm.sleep_until(1ms);
        Transfer received = comm.recv(0, 0, to);
        co_await received;
        received_at = comm.now();
      }
    });
    EXPECT_EQ(to, bytes_of(1000, 3));
    EXPECT_EQ(sent_at, eager ? 1us : 1ms + 6us);
    EXPECT_EQ(received_at, eager ? 1ms : 1ms + 6us);
  }
}

TEST(Sim, SendingFirstDeadlocksOnlyWithoutEagerSends) {
  for (const bool eager : {false, true}) {
    SimOptions options = world_of(2);
    options.eager_limit = eager ? 1 << 20 : 0;
    Job job(options);
    std::vector<std::byte> from(10), to[2] = {std::vector<std::byte>(10), std::vector<std::byte>(10)};
    job.start([&](Comm comm) -> Task<void> {
      Transfer sent = comm.send(1 - comm.rank(), 0, view(from));
      co_await sent;
      Transfer received = comm.recv(1 - comm.rank(), 0, to[comm.rank()]);
      co_await received;
    });
    job.world.run();
    EXPECT_EQ(job.ranks[0]->done(), eager);
    EXPECT_EQ(job.ranks[1]->done(), eager);
  }
}

// Every rank sends `kEach` numbered messages in each of two flows to its neighbour, of sizes that would
// overtake each other.
struct Traffic {
  std::uint64_t hash = 0;
  Time end{};
  bool in_order = true;      // within each flow
  bool flows_mixed = false;  // a flow got ahead of the other although it was posted behind
};

Traffic random_traffic(std::uint64_t seed, double jitter_seconds, std::size_t eager_limit = 1 << 20) {
  constexpr int kRanks = 4;
  constexpr std::uint32_t kEach = 12;
  SimOptions options = world_of(kRanks);
  options.seed = seed;
  options.jitter_seconds = jitter_seconds;
  options.eager_limit = eager_limit;
  options.link.quantum_bytes = 256;
  Job job(options);
  Traffic traffic;
  std::vector<std::uint32_t> arrivals;  // at rank 0: flow * kEach + number
  job.run([&](Comm comm) -> Task<void> {
    std::vector<std::vector<std::byte>> payloads;
    std::vector<Transfer> sends, receives;
    for (std::uint32_t i = 0; i < kEach; ++i) {
      const std::size_t bytes = i % 3 == 0 ? 5000 : 1;
      payloads.push_back(bytes_of(bytes, i));
      receives.push_back(comm.recv_any(comm.before(1), 0, 8192));
      receives.push_back(comm.recv_any(comm.before(1), 1, 8192));
    }
    for (std::uint32_t i = 0; i < kEach; ++i) {
      sends.push_back(comm.send(comm.after(1), 0, view(payloads[i])));
      sends.push_back(comm.send(comm.after(1), 1, view(payloads[i])));
    }
    for (std::uint32_t flow = 0; flow < 2; ++flow) {
      for (std::uint32_t i = 0; i < kEach; ++i) {
        Transfer& received = receives[2 * i + flow];
        co_await received;
        // First in, first out also of completion: whatever was posted before in this flow is done.
        for (std::uint32_t j = 0; j < i; ++j) traffic.in_order &= receives[2 * j + flow].done();
        if (flow == 0 && i == 0 && receives[1].done()) traffic.flows_mixed = true;
        const Buffer got = received.take();
        const std::size_t bytes = i % 3 == 0 ? 5000 : 1;
        traffic.in_order &= got.size() == bytes && got.data()[0] == static_cast<std::byte>(i);
      }
    }
    for (Transfer& sent : sends) co_await sent;
  });
  traffic.hash = job.world.event_hash();
  traffic.end = job.world.now();
  return traffic;
}

TEST(Sim, TheSameSeedGivesTheSameEvents) {
  std::set<std::uint64_t> hashes;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const Traffic once = random_traffic(seed, 1e-3);
    const Traffic again = random_traffic(seed, 1e-3);
    EXPECT_EQ(once.hash, again.hash);
    EXPECT_EQ(once.end, again.end);
    hashes.insert(once.hash);
  }
  EXPECT_EQ(hashes.size(), 20u) << "different seeds must differ";
  EXPECT_EQ(random_traffic(1, 0).hash, random_traffic(2, 0).hash) << "without jitter nothing is random";
}

TEST(Sim, AFlowIsFirstInFirstOutAndFlowsAreNot) {
  int mixed = 0;
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    for (const std::size_t eager_limit : {std::size_t{0}, std::size_t{100}, std::size_t{1} << 20}) {
      const Traffic traffic = random_traffic(seed, 1e-3, eager_limit);
      EXPECT_TRUE(traffic.in_order) << "seed " << seed << ", eager limit " << eager_limit;
      mixed += traffic.flows_mixed ? 1 : 0;
    }
  }
  EXPECT_GT(mixed, 0) << "control: jitter must reorder different identities";
  EXPECT_LT(mixed, 300);
}

TEST(Sim, RanksThatDisagreeGetAnErrorAndNotWrongData) {
  Job job(world_of(2));
  std::vector<std::byte> from(64), to(32);
  job.start([&](Comm comm) -> Task<void> {
    Transfer transfer = comm.rank() == 0 ? comm.send(1, 0, view(from)) : comm.recv(0, 0, to);
    co_await transfer;
  });
  job.world.run();
  ASSERT_TRUE(job.ranks[1]->done());
  EXPECT_THROW(job.ranks[1]->rethrow(), TransportError);
}

TEST(Sim, RunUntilStopsAndGoesOn) {
  Job job(world_of(2));
  job.start(exchange_for_ever);
  const auto after_1ms = [&] { return job.world.now() >= 1ms; };
  EXPECT_TRUE(job.world.run_until(after_1ms));
  EXPECT_LT(job.world.now(), 1ms + 6us);
  const auto after_2ms = [&] { return job.world.now() >= 2ms; };
  EXPECT_TRUE(job.world.run_until(after_2ms));
  EXPECT_FALSE(job.ranks[0]->done());
}

TEST(SimDeathTest, WaitIsAnErrorOfTheProgram) {
  SimWorld world(world_of(1));
  EXPECT_DEATH(world.transport(0).wait(kNever), "event loop");
}

TEST(Sim, RefusesOptionsThatMakeNoSense) {
  SimOptions options = world_of(2);
  options.jitter_seconds = -1;
  EXPECT_THROW(SimWorld{options}, UsageError);
  options = world_of(2);
  options.deaths.push_back({.rank = 2});
  EXPECT_THROW(SimWorld{options}, UsageError);
  options = world_of(0);
  EXPECT_THROW(SimWorld{options}, UsageError);
}

}  // namespace
}  // namespace weft
