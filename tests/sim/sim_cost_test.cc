// The simulator's own cost: a million messages between 1,024 ranks, in seconds and within 2 GiB.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "base/thread_time.h"
#include "instrumented.h"
#include "sim/sim_job.h"

namespace weft {
namespace {

using namespace sim_test;  // NOLINT(google-build-using-namespace): this file's fixture

struct Cost {
  double seconds = 0;   // of a processor: what runs beside the test does not count
  double peak_gib = 0;  // of the process
};

Cost measure(const std::function<void()>& f) {
  const double begin = thread_seconds();
  f();
  Cost cost;
  cost.seconds = thread_seconds() - begin;
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  cost.peak_gib = static_cast<double>(usage.ru_maxrss) / (1 << 20);
  return cost;
}

constexpr int kLarge = kInstrumented ? 128 : 1024;

Task<void> bruck_all_gather(Comm comm, std::span<std::byte> blocks, std::size_t block) {
  std::uint32_t hop = 0;
  for (int have = 1; have < comm.size(); have *= 2, ++hop) {
    const auto count = static_cast<std::size_t>(std::min(have, comm.size() - have));
    Transfer received = comm.recv(comm.after(have), hop,
                                  blocks.subspan(static_cast<std::size_t>(have) * block, count * block));
    Transfer sent = comm.send(comm.before(have), hop, blocks.first(count * block));
    co_await received;
    co_await sent;
  }
}

TEST(SimCost, BruckAllGatherOfManyRanks) {
  constexpr std::size_t kBlock = 1024;
  std::uint64_t messages = 0;
  const Cost cost = measure([&] {
    Job job(world_of(kLarge));
    std::vector<std::vector<std::byte>> memory;
    for (int r = 0; r < kLarge; ++r) {
      memory.emplace_back(kBlock * kLarge);
      std::fill_n(memory.back().begin(), kBlock, static_cast<std::byte>(r % 251));
    }
    job.run([&](Comm comm) -> Task<void> {
      return bruck_all_gather(comm, memory[static_cast<std::size_t>(comm.rank())], kBlock);
    });
    for (int r = 0; r < kLarge; ++r) {
      for (int b = 0; b < kLarge; ++b) {
        const std::byte got =
            memory[static_cast<std::size_t>(r)][static_cast<std::size_t>(b) * kBlock + kBlock - 1];
        ASSERT_EQ(got, static_cast<std::byte>((r + b) % kLarge % 251));
      }
    }
    const int hops = kLarge == 1024 ? 10 : 7;
    EXPECT_EQ(job.world.now(), hops * 5us + Time((kLarge - 1) * kBlock));
    messages = job.world.statistics().messages;
  });
  RecordProperty("seconds", std::to_string(cost.seconds));
  std::printf("%d ranks, %llu messages: %.2f s, peak %.2f GiB\n", kLarge,
              static_cast<unsigned long long>(messages), cost.seconds, cost.peak_gib);
  EXPECT_LT(cost.seconds, 10);
  EXPECT_LT(cost.peak_gib, 2);
}

Task<void> pairwise_all_to_all(Comm comm, std::span<const std::byte> from, std::span<std::byte> to,
                               std::size_t block) {
  for (int gap = 1; gap < comm.size(); ++gap) {
    const auto hop = static_cast<std::uint32_t>(gap);
    const auto out = static_cast<std::size_t>(comm.after(gap)) * block;
    const auto in = static_cast<std::size_t>(comm.before(gap)) * block;
    Transfer received = comm.recv(comm.before(gap), hop, to.subspan(in, block));
    Transfer sent = comm.send(comm.after(gap), hop, from.subspan(out, block));
    co_await received;
    co_await sent;
  }
}

TEST(SimCost, PairwiseAllToAllOfManyRanks) {
  constexpr std::size_t kBlock = 64;
  const Cost cost = measure([&] {
    Job job(world_of(kLarge));
    std::vector<std::vector<std::byte>> from, to;
    for (int r = 0; r < kLarge; ++r) {
      from.emplace_back(kBlock * kLarge, static_cast<std::byte>(r % 251));
      to.emplace_back(kBlock * kLarge);
    }
    job.run([&](Comm comm) -> Task<void> {
      const auto r = static_cast<std::size_t>(comm.rank());
      return pairwise_all_to_all(comm, from[r], to[r], kBlock);
    });
    for (int r = 0; r < kLarge; ++r) {
      for (int b = 0; b < kLarge; ++b) {
        const std::byte got = to[static_cast<std::size_t>(r)][static_cast<std::size_t>(b) * kBlock];
        ASSERT_EQ(got, r == b ? std::byte{0} : static_cast<std::byte>(b % 251));
      }
    }
    EXPECT_EQ(job.world.now(), (kLarge - 1) * (5us + Time(kBlock)));
    EXPECT_EQ(job.world.statistics().deliveries, static_cast<std::uint64_t>(kLarge) * (kLarge - 1));
  });
  RecordProperty("seconds", std::to_string(cost.seconds));
  std::printf("%d ranks: %.2f s, peak %.2f GiB\n", kLarge, cost.seconds, cost.peak_gib);
  EXPECT_LT(cost.seconds, 10);
  EXPECT_LT(cost.peak_gib, 2);
}

// The same with every transfer of a rank posted at once: a million messages in flight.
TEST(SimCost, AMillionMessagesInFlight) {
  constexpr std::size_t kBlock = 64;
  const Cost cost = measure([&] {
    SimOptions options = world_of(kLarge);
    Job job(options);
    std::vector<std::byte> from(kBlock);
    std::vector<std::vector<std::byte>> to(kLarge, std::vector<std::byte>(kBlock));
    job.run([&](Comm comm) -> Task<void> {
      std::vector<Transfer> transfers;
      for (int gap = 1; gap < comm.size(); ++gap) {
        transfers.push_back(comm.recv(comm.before(gap), 0, to[static_cast<std::size_t>(comm.rank())]));
        transfers.push_back(comm.send(comm.after(gap), 0, view(from)));
      }
      for (Transfer& transfer : transfers) co_await transfer;
    });
    EXPECT_EQ(job.world.statistics().peak_alive, static_cast<std::uint64_t>(kLarge) * (kLarge - 1));
  });
  std::printf("%d ranks: %.2f s, peak %.2f GiB\n", kLarge, cost.seconds, cost.peak_gib);
  EXPECT_LT(cost.seconds, 20);
  EXPECT_LT(cost.peak_gib, 2);
}

}  // namespace
}  // namespace weft
