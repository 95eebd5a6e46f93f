// A running job asks the system for no memory per message. This binary counts every call of operator new.
#include <gtest/gtest.h>

#include <vector>

#include "counted_new.h"
#include "weft/weft.h"

namespace weft {
namespace {

struct Counted {
  std::uint64_t allocations = 0;
  std::uint64_t messages = 0;
};

// Many ring all-reduces of many micro-ops: the first half warms up, the second is counted.
Counted count(std::size_t eager_limit) {
  constexpr int kOperations = 60;
  RunOptions options;
  options.config.eager_limit = eager_limit;
  options.config.micro_op_bytes = 1024;
  Counted counted;
  run_ranks(3, options, [&](World& world) {
    std::vector<float> gradient(30'000);
    std::uint64_t before = 0;
    std::uint64_t sent = 0;
    for (int i = 0; i < 2 * kOperations; ++i) {
      if (i == kOperations) {
        sent = world.traffic().messages_sent;
        world.barrier();
        before = testing::allocations();
      }
      world.all_reduce(std::span(gradient), {.algorithm = "ring"});
    }
    world.barrier();
    if (world.rank() == 0) {
      counted.allocations = testing::allocations() - before;
      counted.messages = 3 * (world.traffic().messages_sent - sent);
    }
    world.barrier();
  });
  return counted;
}

TEST(Allocation, NothingPerMessageInSteadyState) {
  if (!testing::kCountsAllocations) GTEST_SKIP() << "this build cannot count allocations";
  for (const std::size_t eager_limit : {std::size_t{0}, std::size_t{8192}}) {
    const Counted counted = count(eager_limit);
    EXPECT_GT(counted.messages, 20'000u);
    // A list that grows once more than it ever had to is no allocation per message.
    EXPECT_LT(counted.allocations, 200u) << counted.messages << " messages, eager limit " << eager_limit;
  }
}

Task<void> nap(Comm comm) {
  Sleep sleep = comm.sleep_until(comm.now() + 1us);
  co_await sleep;
}

// Everything beside transfers that an operation may await.
Task<void> await_all_kinds(Comm comm, Engine& engine, std::uint32_t step, int rounds) {
  auto work = [] {};
  for (int i = 0; i < rounds; ++i) {
    co_await comm.compute(work);
    co_await nap(comm);
    const SubmitOptions options{.name = "nap", .step = step, .local = true};
    const Ticket other = engine.submit(engine.world(), options, [](Comm inner) { return nap(inner); });
    co_await other;
  }
}

TEST(Allocation, NothingPerComputationSleepAndAwaitedTicket) {
  if (!testing::kCountsAllocations) GTEST_SKIP() << "this build cannot count allocations";
  constexpr int kRounds = 1000;
  std::uint64_t allocations = 0;
  run_ranks(1, [&](World& world) {
    for (std::uint32_t step = 0; step < 2; ++step) {  // the first warms up
      const std::uint64_t before = testing::allocations();
      world.run({.name = "all kinds"},
                [&world, step](Comm comm) { return await_all_kinds(comm, world.engine(), step, kRounds); });
      allocations = testing::allocations() - before;
    }
  });
  EXPECT_LT(allocations, 200u) << 3 * kRounds << " awaits";
}

TEST(Allocation, ControlTheCounterCounts) {
  if (!testing::kCountsAllocations) GTEST_SKIP() << "this build cannot count allocations";
  const std::uint64_t before = testing::allocations();
  std::vector<std::unique_ptr<int>> many;
  for (int i = 0; i < 1000; ++i) many.push_back(std::make_unique<int>(i));
  EXPECT_GE(testing::allocations() - before, 1000u);
}

}  // namespace
}  // namespace weft
