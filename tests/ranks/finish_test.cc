// An all-reduce that is finished piece by piece: every element passes once, on every rank, and the owner of a
// sum makes the result.
#include "collectives/dense/finish.h"

#include <gtest/gtest.h>

#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "weft/world.h"

namespace weft {
namespace {

// Sums are divided by 4; `again`: results of others, too, which is wrong.
class Quarter final : public Finish {
 public:
  Quarter(std::span<float> all, bool again) : all_(all), again_(again), times(all.size()) {}
  double sum(Dense piece) override { return divide(piece, true); }
  double result(Dense piece) override {
    results += piece.count;
    return divide(piece, again_);
  }

 private:
  double divide(const Dense& piece, bool divides) {
    auto* const first = reinterpret_cast<float*>(piece.data);
    for (std::int64_t i = 0; i < piece.count; ++i) {
      ++times.at(static_cast<std::size_t>(first + i - all_.data()));
      if (divides) first[i] /= 4;
    }
    return 0;
  }
  std::span<float> all_;
  bool again_;

 public:
  std::vector<int> times;
  std::int64_t results = 0;
};

struct Case {
  int ranks;
  std::size_t length;
};

class Finishing : public ::testing::TestWithParam<Case> {};

TEST_P(Finishing, EveryElementOnce) {
  const auto [ranks, length] = GetParam();
  for (const auto& [name, again] :
       {std::pair("ring", false), std::pair("ring", true), std::pair("recursive_doubling", false),
        std::pair("rabenseifner", false), std::pair("direct", false), std::pair("two_level", false),
        std::pair("two_level", true)}) {
    run_ranks(ranks, [&, algorithm = std::string_view(name), again = again](World& world) {
      std::vector<float> data(length);
      for (std::size_t i = 0; i < length; ++i)  // whole numbers: any order of additions gives the same
        data[i] = static_cast<float>((i * 7 + static_cast<std::size_t>(world.rank()) * 13) % 1001);
      Quarter quarter(data, again);
      const bool is_ring = algorithm == "ring", by_nodes = algorithm == "two_level";
      const int node_size = by_nodes && ranks % 2 == 0 ? 2 : 1;
      const AllReduceOptions options{.algorithm = algorithm, .node_size = node_size};
      world.run({.name = "sum"}, [&](Comm comm) {
        return all_reduce_and_finish(comm, Dense(std::span(data)), &quarter, options);
      });
      bool equal = true;
      for (std::size_t i = 0; i < length; ++i) {
        double expected = 0;
        for (std::size_t r = 0; r < static_cast<std::size_t>(ranks); ++r)
          expected += static_cast<double>((i * 7 + r * 13) % 1001);
        equal = equal && data[i] == expected / 4;
        ASSERT_EQ(quarter.times[i], 1) << i;
      }
      // Control: a result that is divided again is seen, where others make some of the results.
      EXPECT_EQ(equal, !again || quarter.results == 0);
      // Of a ring, a rank makes its own block; of two levels, that of its node in its place's block.
      const auto all = static_cast<std::int64_t>(length);
      const std::int64_t of_place = block_of(all, node_size, world.rank() % node_size).count;
      const std::int64_t owned = is_ring
                                     ? block_of(all, ranks, world.rank()).count
                                     : block_of(of_place, ranks / node_size, world.rank() / node_size).count;
      EXPECT_EQ(quarter.results, is_ring || by_nodes ? all - owned : 0);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, Finishing,
                         ::testing::Values(Case{1, 1000}, Case{2, 3}, Case{2, 2'000'001}, Case{3, 0},
                                           Case{3, 1'500'007}, Case{4, 17}, Case{4, 2'000'000},
                                           Case{5, 1'100'003}),
                         [](const auto& c) {
                           return std::to_string(c.param.ranks) + "of" + std::to_string(c.param.length);
                         });

}  // namespace
}  // namespace weft
