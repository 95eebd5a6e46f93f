// Ranks that disagree, and calls that cannot be right: each a clear error, and nothing hangs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ranks/suite.h"

namespace weft::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  }
}

// Ranks of which rank 1 calls something else. At least one rank finds out and says what differs; those that
// fail otherwise were told so by it.
void expect_mismatch(const std::function<Task<void>(Comm, bool odd)>& call, const std::string& what,
                     ThreadsOptions options) {
  const auto errors = with_ranks_catching(options, [&](TestRank& rank) {
    const bool odd = rank.comm().rank() == 1;
    rank.run([&](Comm comm) { return call(comm, odd); });
    rank.run([](Comm comm) { return barrier(comm); });  // nobody gets past the others
  });
  int mismatches = 0;
  for (const std::exception_ptr& error : errors) {
    if (!error) continue;
    try {
      std::rethrow_exception(error);
    } catch (const TransportError& e) {
      if (e.kind() != TransportError::Kind::mismatch) continue;
      ++mismatches;
      EXPECT_THAT(e.what(), HasSubstr(what));
      EXPECT_GE(e.peer(), 0);
    } catch (const std::exception& e) {
      ADD_FAILURE() << "not a TransportError: " << e.what();
    }
  }
  EXPECT_GE(mismatches, 1) << what;
  for (const std::exception_ptr& error : errors) EXPECT_TRUE(error) << "a rank went on: " << what;
}

class Disagreement : public testing::TestWithParam<std::size_t> {
 protected:
  ThreadsOptions ranks(int n) const { return {.ranks = n, .eager_limit = GetParam()}; }
};
INSTANTIATE_TEST_SUITE_P(Eager, Disagreement, testing::Values(8192u, 0u));

TEST_P(Disagreement, OnLengthIsAnError) {
  std::vector<std::vector<float>> data(3, std::vector<float>(1000));
  for (const Algorithm& row : algorithms(Family::all_reduce)) {
    for (const std::int64_t shorter : {999, 0}) {
      expect_mismatch(
          [&](Comm comm, bool odd) {
            const Dense whole = dense(data[static_cast<std::size_t>(comm.rank())]);
            return all_reduce(comm, odd ? whole.sub(0, shorter) : whole, {.algorithm = row.name});
          },
          "number of elements", ranks(3));
    }
  }
}

TEST_P(Disagreement, OnElementTypeOrReductionIsAnError) {
  std::vector<std::vector<float>> data(3, std::vector<float>(60));
  const auto mine = [&](Comm comm) { return dense(data[static_cast<std::size_t>(comm.rank())]); };
  for (const Algorithm& row : algorithms(Family::all_reduce)) {
    expect_mismatch(
        [&](Comm comm, bool odd) {
          const Dense d = mine(comm);
          return all_reduce(comm, Dense(d.data, d.count, odd ? DType::int32 : DType::float32),
                            {.algorithm = row.name});
        },
        "element type", ranks(3));
    expect_mismatch(
        [&](Comm comm, bool odd) {
          return all_reduce(comm, mine(comm),
                            {.reduction = odd ? Reduction::max : Reduction::sum, .algorithm = row.name});
        },
        "reduction", ranks(3));
  }
}

// Two ranks: among more, other algorithms may wait for other peers, and only the deadline ends that.
TEST_P(Disagreement, OnAlgorithmOrFamilyIsAnError) {
  std::vector<std::vector<float>> data(2, std::vector<float>(60));
  const auto mine = [&](Comm comm) { return dense(data[static_cast<std::size_t>(comm.rank())]); };
  expect_mismatch(
      [&](Comm comm, bool odd) {
        return all_reduce(comm, mine(comm), {.algorithm = odd ? "rabenseifner" : "ring"});
      },
      "algorithm", ranks(2));
  expect_mismatch(
      [&](Comm comm, bool odd) {
        if (odd) return all_gather(comm, mine(comm), {.algorithm = "ring"});
        return reduce_scatter(comm, mine(comm), {.algorithm = "ring"});
      },
      "family", ranks(2));
}

TEST_P(Disagreement, OnCountsIsAnError) {
  std::vector<std::vector<float>> data(3, std::vector<float>(60));
  const std::vector<std::int64_t> counts{10, 20, 30};
  const std::vector<std::int64_t> others{10, 30, 20};
  expect_mismatch(
      [&](Comm comm, bool odd) {
        return all_gather_v(comm, dense(data[static_cast<std::size_t>(comm.rank())]), odd ? others : counts);
      },
      "number of elements", ranks(3));
  // All-to-all counts are agreed between pairs only, so the message itself has the wrong length. Rank 1 wants
  // 20 from rank 2, which has 10 for it.
  const std::vector<std::int64_t> tens{10, 10, 10};
  const std::vector<std::int64_t> wants{10, 10, 20};
  std::vector<std::vector<float>> in(3, std::vector<float>(60));
  expect_mismatch(
      [&](Comm comm, bool odd) {
        const auto me = static_cast<std::size_t>(comm.rank());
        return all_to_all_v(comm, {dense(data[me]).sub(0, 30), tens},
                            {dense(in[me]).sub(0, odd ? 40 : 30), odd ? wants : tens},
                            {.algorithm = "pairwise"});
      },
      "length of a message", ranks(3));
}

// What one rank alone gets for a wrong call.
std::string refused(const std::function<Task<void>(Comm)>& call) {
  std::string text;
  with_ranks({.ranks = 1}, [&](TestRank& rank) {
    try {
      rank.run(call);
    } catch (const UsageError& error) {
      text = error.what();
    }
  });
  return text;
}

TEST(BadCall, IsRefusedBeforeAnythingIsSent) {
  std::vector<float> data(10);
  const std::vector<std::int64_t> wrong{9};
  const std::vector<std::int64_t> two{5, 5};
  const std::vector<std::int64_t> negative{-1};
  EXPECT_THAT(refused([&](Comm c) { return all_reduce(c, dense(data), {.algorithm = "rign"}); }),
              AllOf(HasSubstr("rign"), HasSubstr("auto"), HasSubstr("ring"), HasSubstr("direct")));
  EXPECT_THAT(refused([&](Comm c) { return all_reduce(c, Dense(nullptr, 1, DType::float32)); }),
              HasSubstr("memory"));
  EXPECT_THAT(refused([&](Comm c) { return all_reduce(c, Dense(nullptr, -1, DType::float32)); }),
              HasSubstr("-1"));
  EXPECT_THAT(refused([&](Comm c) { return all_reduce(c, Dense(dense(data).data, 1, DType::bytes)); }),
              HasSubstr("bytes"));
  EXPECT_THAT(
      refused([&](Comm c) { return all_reduce(c, dense(data), {.reduction = static_cast<Reduction>(7)}); }),
      HasSubstr("reduction"));
  EXPECT_THAT(refused([&](Comm c) { return broadcast(c, dense(data), {.root = 1}); }), HasSubstr("root"));
  EXPECT_THAT(refused([&](Comm c) { return all_gather_v(c, dense(data), wrong); }), HasSubstr("add up"));
  EXPECT_THAT(refused([&](Comm c) { return all_gather_v(c, dense(data), two); }),
              HasSubstr("2 counts for 1 ranks"));
  EXPECT_THAT(refused([&](Comm c) { return reduce_scatter_v(c, dense(data), negative); }), HasSubstr("fit"));
  EXPECT_THAT(refused([&](Comm c) { return all_to_all(c, dense(data), dense(data).sub(0, 5)); }),
              HasSubstr("differ"));
  EXPECT_THAT(refused([&](Comm c) { return all_to_all(c, dense(data), dense(data), {.node_size = 2}); }),
              HasSubstr("divide"));
  EXPECT_THAT(refused([&](Comm c) { return send(c, 1, dense(data)); }), HasSubstr("outside the group"));
}

TEST(BadCall, OnOneRankDoesNotHangTheOthers) {
  const auto errors = with_ranks_catching({.ranks = 3}, [](TestRank& rank) {
    std::vector<float> data(10);
    rank.run(
        [&](Comm c) { return all_reduce(c, dense(data), {.algorithm = c.rank() == 2 ? "none" : "ring"}); });
  });
  for (const std::exception_ptr& error : errors) ASSERT_TRUE(error);
  EXPECT_THAT(text_of(errors[0]), HasSubstr("rank 2"));
  EXPECT_THAT(text_of(errors[2]), HasSubstr("none"));
}

TEST(BadCall, HierarchicalCountsFromTheWireAreChecked) {
  std::vector<std::vector<float>> out(4, std::vector<float>(16));
  std::vector<std::vector<float>> in(4, std::vector<float>(16));
  const std::vector<std::int64_t> fours{4, 4, 4, 4};
  const std::vector<std::int64_t> skewed{4, 8, 2, 2};
  const auto errors = with_ranks_catching({.ranks = 4}, [&](TestRank& rank) {
    const auto me = static_cast<std::size_t>(rank.comm().rank());
    rank.run([&](Comm comm) {
      return all_to_all_v(comm, {dense(out[me]), me == 0 ? skewed : fours}, {dense(in[me]), fours},
                          {.algorithm = "hierarchical", .node_size = 2});
    });
  });
  ASSERT_TRUE(errors[1]);
  EXPECT_THAT(text_of(errors[1]), HasSubstr("announces 8 elements, but 4 are expected"));
}

}  // namespace
}  // namespace weft::test
