// Computation in virtual time: what operations take with given costs of kernels, against sums by hand.
#include <gtest/gtest.h>

#include <string_view>
#include <utility>
#include <vector>

#include "transports/sim_workers.h"
#include "weft/collective.h"
#include "weft/error.h"
#include "weft/sparse.h"
#include "world/sim_ranks.h"

namespace weft {
namespace {

constexpr double kLatency = 50e-6;
constexpr double kRate = 1e9;

SimRanksOptions job_of(int ranks, const KernelCosts& kernels, int workers = 0) {
  SimRanksOptions options;
  options.sim.link.ranks = ranks;
  options.sim.link.latency_seconds = kLatency;
  options.sim.link.bytes_per_second = kRate;
  options.sim.workers = workers;
  options.config.micro_op_bytes = std::size_t{1} << 30;  // a message is one piece
  options.kernels = kernels;
  return options;
}

double all_reduce_seconds(const SimRanksOptions& options, std::string_view algorithm, std::size_t n) {
  SimRanks ranks(options);
  std::vector<std::vector<float>> data(static_cast<std::size_t>(ranks.size()), std::vector<float>(n, 1.0F));
  const AllReduceOptions how{.algorithm = algorithm};
  const Time taken = ranks.run({.name = "sum"}, [&](Comm comm, int r) {
    return all_reduce(comm, Dense(std::span<float>{data[static_cast<std::size_t>(r)]}), how);
  });
  for (const std::vector<float>& sum : data) EXPECT_EQ(sum.back(), static_cast<float>(ranks.size()));
  return seconds(taken);
}

TEST(KernelCosts, AFoldOfARing) {
  constexpr std::size_t kCount = 100'000;
  const double half = 4.0 * kCount / 2;  // bytes of a block
  const double link = 2 * (kLatency + half / kRate);
  const KernelCosts costs{.fold_byte = 1e-9};
  EXPECT_NEAR(all_reduce_seconds(job_of(2, costs), "ring", kCount), link + half * 1e-9, 1e-8);
  // Control: without costs it is the link alone.
  EXPECT_NEAR(all_reduce_seconds(job_of(2, {}), "ring", kCount), link, 1e-8);
  // A byte that stands for ten costs as much as ten.
  SimRanksOptions scaled = job_of(2, costs);
  scaled.sim.link.byte_scale = 10;
  EXPECT_NEAR(all_reduce_seconds(scaled, "ring", kCount),
              2 * (kLatency + 10 * half / kRate) + 10 * half * 1e-9, 1e-8);
}

TEST(KernelCosts, EveryDenseAllReducePaysForItsAdditions) {
  constexpr std::size_t kCount = 120'000;
  const KernelCosts costs{.copy_byte = 1e-9, .fold_byte = 1e-8};
  for (const int size : {2, 3, 4, 5}) {
    for (const std::string_view algorithm : {"ring", "recursive_doubling", "rabenseifner", "direct"}) {
      const double with = all_reduce_seconds(job_of(size, costs), algorithm, kCount);
      const double without = all_reduce_seconds(job_of(size, {}), algorithm, kCount);
      // Somebody adds up size - 1 values of a block.
      const double least = 4.0 * kCount * (size - 1) / size * 1e-8;
      EXPECT_GE(with - without, 0.999 * least) << algorithm << " of " << size;
      EXPECT_LE(with - without, 4 * least) << algorithm << " of " << size;
    }
  }
}

// What arrives at a rank at the same time is folded one after the other.
TEST(KernelCosts, AConsumerAtATime) {
  constexpr std::size_t kCount = 30'000;
  const KernelCosts costs{.fold_byte = 1e-6};  // much slower than the link
  const double block = 4.0 * kCount / 3 * 1e-6;
  const double with = all_reduce_seconds(job_of(3, costs), "direct", kCount);
  EXPECT_NEAR(with, 2 * block, 0.01 * block);
}

double topka_seconds(const KernelCosts& kernels, std::size_t n, std::int64_t k) {
  SimRanks ranks(job_of(2, kernels));
  std::vector<std::vector<float>> gradients(2, std::vector<float>(n));
  for (std::size_t i = 0; i < n; ++i) {
    gradients[0][i] = static_cast<float>(1 + i);
    gradients[1][i] = static_cast<float>(n - i);
  }
  std::vector<SparseState> states;
  std::vector<SparseResult> results(2);
  for (int r = 0; r < 2; ++r) states.emplace_back(static_cast<std::int64_t>(n));
  const SparseOptions options{.k = k, .algorithm = "topka", .codec = "coo", .residual = ResidualRule::drop};
  const Time taken = ranks.run({.name = "topka"}, [&](Comm comm, int r) {
    const auto i = static_cast<std::size_t>(r);
    return sparse_all_reduce(comm, gradients[i], states[i], results[i], options);
  });
  EXPECT_EQ(results[0].num_entries(), 2 * k);
  return seconds(taken);
}

TEST(KernelCosts, TopkaOfTwoRanks) {
  constexpr std::size_t kCount = 50'000;
  constexpr std::int64_t kEntries = 500;
  const double bytes = 4 + 8.0 * kEntries;
  const double link = kLatency + bytes / kRate;
  KernelCosts costs{.copy_byte = 1e-9, .scan_element = 3e-9, .sum_entry = 5e-9};
  costs.encode_entry[0] = 7e-9;
  costs.decode_entry[0] = 11e-9;
  // The pass; the own list coded; the other's list put together, decoded and kept coded; both summed.
  const double computed = 3e-9 * kCount + 7e-9 * kEntries + 1e-9 * bytes + (11e-9 * kEntries + 1e-9 * bytes) +
                          5e-9 * 2 * kEntries;
  EXPECT_NEAR(topka_seconds(costs, kCount, kEntries), link + computed, 1e-8);
  EXPECT_NEAR(topka_seconds({}, kCount, kEntries), link, 1e-8);
  // The pass is charged once, and to nobody but the pass.
  KernelCosts other = costs;
  other.scan_element *= 2;
  EXPECT_NEAR(topka_seconds(other, kCount, kEntries), link + computed + 3e-9 * kCount, 1e-8);
}

Task<void> one_second(Comm comm) {
  auto work = [] { return 1.0; };
  co_await comm.compute(work);
}

TEST(SimWorkers, SharedOnesServeFirstComeFirstServed) {
  for (const auto& [workers, expected] :
       {std::pair(0, 1.0), std::pair(1, 4.0), std::pair(2, 2.0), std::pair(3, 2.0), std::pair(4, 1.0)}) {
    SimRanks ranks(job_of(4, {}, workers));
    const Time taken = ranks.run({.name = "work"}, [](Comm comm, int) { return one_second(comm); });
    EXPECT_DOUBLE_EQ(seconds(taken), expected) << workers;
    for (int r = 0; r < 4; ++r) {
      EXPECT_EQ(ranks.workers(r).taken(), 1s);
      EXPECT_EQ(ranks.workers(r).taken_until(), 1s);
    }
  }
  EXPECT_THROW(SimRanks(job_of(4, {}, -1)), UsageError);
}

TEST(SimWorkers, OwnOnesHandleWhatArrivesBesideWork) {
  SimWorkers own;
  EXPECT_EQ(own.compute(0s, 2), 2s);
  EXPECT_EQ(own.handle(1s, 1), 2s);
  EXPECT_EQ(own.handle(1s, 1), 3s);
  EXPECT_EQ(own.taken(), 4s);
  EXPECT_EQ(own.taken_until(), 4s);
  // Where cores are shared there is nothing beside them.
  SimWorkers shared(std::make_shared<SimWorkers::Threads>(1));
  EXPECT_EQ(shared.compute(0s, 2), 2s);
  EXPECT_EQ(shared.handle(1s, 1), 3s);
}

TEST(KernelCosts, ATicketHasTheSecondsThatItsOperationComputed) {
  SimRanks ranks(job_of(1, {}));
  const Ticket ticket = ranks.engine(0).submit(ranks.engine(0).world(), {.name = "work"},
                                               [](Comm comm) { return one_second(comm); });
  ranks.world().run();
  ASSERT_TRUE(ticket.done());
  EXPECT_DOUBLE_EQ(ticket.computed_seconds(), 1.0);
}

// An operation whose time is over while a consumer is at work ends like any other.
TEST(KernelCosts, AnOperationMayFailWhileAMessageIsHandled) {
  const KernelCosts slow{.fold_byte = 1};
  for (const bool dies : {false, true}) {
    SimRanksOptions options = job_of(3, slow);
    if (dies) options.sim.deaths = {{.rank = 1, .at = 500ms}};
    SimRanks ranks(options);
    std::vector<std::vector<float>> data(3, std::vector<float>(3000, 1.0F));
    std::vector<Ticket> tickets;
    for (int r = 0; r < 3; ++r) {
      const Dense mine(std::span<float>{data[static_cast<std::size_t>(r)]});
      tickets.push_back(ranks.engine(r).submit(ranks.engine(r).world(),
                                               {.name = "sum", .slot = 1, .timeout = dies ? kNever : 1s},
                                               [mine](Comm comm) { return all_reduce(comm, mine); }));
    }
    ranks.world().run();
    for (int r = 0; r < 3; ++r) {
      if (dies && r == 1) continue;
      ASSERT_TRUE(tickets[static_cast<std::size_t>(r)].done()) << r;
      EXPECT_TRUE(tickets[static_cast<std::size_t>(r)].error()) << r;
    }
    EXPECT_LT(seconds(ranks.world().now()), 20'000);
  }
}

}  // namespace
}  // namespace weft
