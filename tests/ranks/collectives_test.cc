// Every row of every table against the reference, on `threads`, in both eager modes.
#include <gtest/gtest.h>

#include <atomic>
#include <tuple>

#include "ranks/suite.h"

namespace weft::test {
namespace {

class Collectives : public testing::TestWithParam<std::tuple<int, std::size_t>> {
 protected:
  ThreadsOptions options() const {
    return {.ranks = std::get<0>(GetParam()), .eager_limit = std::get<1>(GetParam())};
  }
};
INSTANTIATE_TEST_SUITE_P(Threads, Collectives,
                         testing::Combine(testing::Values(1, 2, 3, 5, 8), testing::Values(8192u, 0u)),
                         [](const auto& test) {
                           return "size" + std::to_string(std::get<0>(test.param)) +
                                  (std::get<1>(test.param) == 0 ? "zero_eager" : "eager");
                         });

TEST_P(Collectives, AllReduceEqualsTheReferenceToTheBit) { with_ranks(options(), run_all_reduce_suite); }
TEST_P(Collectives, ScatterGatherAndBroadcastEqualTheReference) { with_ranks(options(), run_block_suite); }
TEST_P(Collectives, AllToAllEqualsTheReference) { with_ranks(options(), run_all_to_all_suite); }

TEST_P(Collectives, NobodyLeavesABarrierBeforeAllHaveEntered) {
  constexpr int kRounds = 20;
  std::atomic<int> entered{0};
  with_ranks(options(), [&](TestRank& rank) {
    for (int round = 1; round <= kRounds; ++round) {
      entered.fetch_add(1);
      rank.run([](Comm comm) { return barrier(comm); });
      EXPECT_GE(entered.load(), round * rank.comm().size());
    }
  });
}

TEST_P(Collectives, MessagesGoRoundARing) {
  with_ranks(options(), [](TestRank& rank) {
    for (const std::int64_t length : {0, 1, 5000}) {
      std::vector<std::int64_t> mine(static_cast<std::size_t>(length), rank.comm().rank());
      std::vector<std::int64_t> theirs(mine.size(), -1);
      const auto exchange = [&](Comm comm) -> Task<void> {
        if (comm.size() == 1) co_return;
        std::vector<Task<void>> both;
        both.push_back(send(comm, comm.after(1), dense(mine), {.micro_op_bytes = 1000}));
        both.push_back(recv(comm, comm.before(1), dense(theirs), {.micro_op_bytes = 1000}));
        co_await when_all(both);
      };
      rank.run(exchange);
      const std::int64_t source = rank.comm().size() == 1 ? -1 : rank.comm().before(1);
      EXPECT_EQ(theirs, std::vector<std::int64_t>(mine.size(), source));
    }
  });
}

TEST_P(Collectives, SplitMakesGroupsThatWork) {
  with_ranks(options(), [](TestRank& rank) {
    const int me = rank.comm().rank();
    const int size = rank.comm().size();
    Comm half;
    const auto divide = [&half, me](Comm comm) -> Task<void> {
      half = co_await split(comm, me == 4 ? -1 : me % 2,
                            -me);  // keys turn the order around; rank 4 is in no group
    };
    rank.run(divide);
    if (me == 4) {
      EXPECT_FALSE(half.valid());
      return;
    }
    std::vector<int> expected;
    for (int r = size - 1; r >= 0; --r) {
      if (r % 2 == me % 2 && r != 4) expected.push_back(r);
    }
    ASSERT_EQ(half.size(), static_cast<int>(expected.size()));
    for (int r = 0; r < half.size(); ++r)
      EXPECT_EQ(half.world_rank(r), expected[static_cast<std::size_t>(r)]);
    std::vector<std::int32_t> sum{1 << me};
    rank.run([&](Comm comm) { return all_reduce(half.bound(comm.operation()), dense(sum)); });
    std::int32_t bits = 0;
    for (const int r : expected) bits |= 1 << r;
    EXPECT_EQ(sum[0], bits);
  });
}

TEST(CollectiveMemory, LongVectorsInManyPieces) {  // above the eager limit, several receives ahead
  with_ranks({.ranks = 4}, [](TestRank& rank) {
    for (const Algorithm& row : algorithms(Family::all_reduce)) {
      const int node_size = node_sizes_of(row, 4).size() > 1 ? 2 : 0;
      check_all_reduce<float>(rank,
                              {row.name, DType::float32, Reduction::sum, 50'001, 9000, false, 7, node_size});
      check_all_reduce<bfloat16>(rank,
                                 {row.name, DType::bfloat16, Reduction::sum, 50'001, 0, false, 8, node_size});
    }
  });
}

TEST(CollectiveMemory, OfOneOperationServesTheNext) {
  std::atomic<std::uint64_t> fresh{0};
  std::atomic<std::uint64_t> messages{0};
  with_ranks({.ranks = 4}, [&](TestRank& rank) {
    std::vector<float> data(10'000, 1.0f);
    for (int i = 0; i < 220; ++i) {
      const std::uint64_t before = rank.comm().arena().fresh();
      rank.run([&](Comm comm) {
        return all_reduce(comm, dense(data), {.algorithm = "ring", .micro_op_bytes = 1000});
      });
      if (i < 20) continue;
      fresh += rank.comm().arena().fresh() - before;
      messages += rank.traffic().messages_sent;
    }
  });
  // Not exactly none: how many messages wait at the same time depends on timing.
  EXPECT_LT(fresh.load(), messages.load() / 500);
}

// A ring that folds the last block of the first trip twice: what the reference must not let pass.
Task<void> broken_ring(Comm comm, Dense data, Reduction reduction) {
  AllReduceRun* ring = std::get<AllReduceRun*>(find_algorithm(Family::all_reduce, "ring").run);
  const Shape shape{.size = comm.size(), .count = data.count, .micro_op_bytes = 1000};
  co_await ring(comm, data, reduction, shape);
  const std::vector<std::byte> copy(data.data, data.data + data.size_bytes() / 2);
  const Dense half = data.sub(0, data.count / 2);
  scalar::fold_two(half, half.bytes(), std::span(copy).first(half.size_bytes()), reduction);
}

TEST(CollectiveControl, ABrokenAlgorithmFailsTheComparison) {
  with_ranks({.ranks = 3}, [](TestRank& rank) {
    const auto inputs = reference::make_inputs<float>(3, 100, 1, false);
    std::vector<float> data = inputs[static_cast<std::size_t>(rank.comm().rank())];
    rank.run([&](Comm comm) { return broken_ring(comm, dense(data), Reduction::sum); });
    EXPECT_FALSE(reference::same_bits(data, reference::all_reduce("ring", inputs, Reduction::sum)));
  });
}

TEST(CollectiveControl, TheReferencesTellOrdersOfAdditionApart) {
  const auto inputs = reference::make_inputs<float>(8, 1000, 3, false);
  std::vector<std::vector<float>> results;
  for (const Algorithm& row : algorithms(Family::all_reduce)) {
    results.push_back(reference::all_reduce(row.name, inputs, Reduction::sum, 4));
  }
  results.push_back(reference::all_reduce("two_level", inputs, Reduction::sum, 2));
  for (std::size_t a = 0; a < results.size(); ++a) {
    for (std::size_t b = a + 1; b < results.size(); ++b)
      EXPECT_FALSE(reference::same_bits(results[a], results[b]));
  }
}

}  // namespace
}  // namespace weft::test
