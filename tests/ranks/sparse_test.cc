// Every row of the sparse all-reduces on real transports: ranks are threads, or processes over tcp and mpi
// (tests/launch, mpirun). The operations of a step are in flight together, and the bits are those of the
// simulator, which runs beside them in every process.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "collectives/sparse_allreduce/call.h"
#include "sim/sparse_job.h"
#include "weft/error.h"
#include "weft/weft.h"

namespace weft {
namespace {

using sparse_test::SparseJob;

constexpr std::int64_t kLength = 20'000;
constexpr std::uint32_t kSteps = 4;

// One vector with its method: a plan row.
struct Row {
  std::string_view algorithm;
  std::string_view codec;
  SparseOptions options() const {
    SparseOptions o = sparse_test::options_of(400, ResidualRule::gres, 1, "auto", codec);
    o.algorithm = algorithm;
    return o;
  }
  // Which dense algorithm runs depends on the link, and so does the order of additions: these get numbers
  // that sum exactly.
  bool whole() const { return algorithm.starts_with("dense"); }
};

std::vector<Row> all_rows() {
  std::vector<Row> rows;
  for (const SparseAlgorithm& row : sparse_algorithms()) {
    for (const std::string_view codec : {"coo", "packed", "packed-bf16"}) rows.push_back({row.name, codec});
  }
  return rows;
}

void fill(const Row& row, int rank, std::uint32_t step, std::span<float> gradient) {
  Random random(11, 5, static_cast<std::uint32_t>(rank), step);
  for (float& g : gradient) {
    g = static_cast<float>(static_cast<int>(random.below(41)) - 20);
    if (!row.whole()) g *= random.uniform() < 0.05 ? 0.7F : 0.013F;
  }
}

// What the simulator says.
struct Expected {
  std::vector<std::vector<float>> sums;                  // of each step
  std::vector<std::vector<float>> residuals;             // of each rank, at the end
  std::vector<std::vector<std::uint64_t>> entries_sent;  // of each step and rank
};

Expected simulate(const Row& row, int ranks) {
  Expected expected;
  SparseJob job(ranks, kLength, row.options());
  for (std::uint32_t t = 0; t < kSteps; ++t) {
    for (int r = 0; r < ranks; ++r) fill(row, r, t, job.gradient(r));
    job.step();
    expected.sums.push_back(job.dense(0));
    expected.entries_sent.emplace_back();
    for (int r = 0; r < ranks; ++r) expected.entries_sent.back().push_back(job.result(r).entries_sent());
  }
  for (int r = 0; r < ranks; ++r)
    expected.residuals.emplace_back(job.state(r).residual().begin(), job.state(r).residual().end());
  return expected;
}

std::vector<Expected> simulate_all(int ranks) {
  std::vector<Expected> all;
  for (const Row& row : all_rows()) all.push_back(simulate(row, ranks));
  return all;
}

// All rows at once, step after step, on one rank. Ranks submit them in different orders.
void check_rank(World& world, const std::vector<Expected>& expected) {
  const std::vector<Row> rows = all_rows();
  const auto me = static_cast<std::size_t>(world.rank());
  std::vector<SparseState> states;
  std::vector<SparseResult> results(rows.size());
  std::vector<std::vector<float>> gradients(rows.size(), std::vector<float>(kLength));
  for (std::size_t i = 0; i < rows.size(); ++i) states.emplace_back(kLength);
  for (std::uint32_t t = 0; t < kSteps; ++t) {
    std::vector<Ticket> tickets;
    for (std::size_t n = 0; n < rows.size(); ++n) {
      const std::size_t i = (n + 3 * me) % rows.size();
      fill(rows[i], world.rank(), t, gradients[i]);
      const SubmitOptions submit{.name = rows[i].algorithm, .slot = static_cast<std::uint32_t>(i), .step = t};
      tickets.push_back(world.engine().submit(world.comm(), submit, [&, i](Comm comm) {
        return sparse_all_reduce(comm, gradients[i], states[i], results[i], rows[i].options());
      }));
    }
    for (const Ticket& ticket : tickets) ticket.wait();
    for (std::size_t i = 0; i < rows.size(); ++i) {
      std::vector<float> sum(kLength);
      results[i].add_to(sum);
      EXPECT_TRUE(sum == expected[i].sums[t]) << rows[i].algorithm << ", " << rows[i].codec << ", step " << t;
      if (!rows[i].whole()) {
        EXPECT_EQ(results[i].entries_sent(), expected[i].entries_sent[t][me])
            << rows[i].algorithm << ", " << rows[i].codec;
      }
      states[i].commit();
    }
  }
  for (std::size_t i = 0; i < rows.size(); ++i) {
    EXPECT_TRUE(std::ranges::equal(states[i].residual(), expected[i].residuals[me]))
        << rows[i].algorithm << ", " << rows[i].codec;
  }
}

TEST(SparseRanks, EqualTheSimulationOnThreads) {
  for (const int ranks : {1, 3, 4}) {
    const std::vector<Expected> expected = simulate_all(ranks);
    for (const std::size_t eager_limit : {std::size_t{0}, std::size_t{8192}}) {
      for (const std::size_t micro_op_bytes : {std::size_t{1000}, std::size_t{1} << 20}) {
        RunOptions options;
        options.config.eager_limit = eager_limit;
        options.config.micro_op_bytes = micro_op_bytes;
        run_ranks(ranks, options, [&](World& world) { check_rank(world, expected); });
      }
    }
  }
}

TEST(SparseRanks, ANonFiniteGradientIsToldToAll) {
  run_ranks(4, [](World& world) {
    for (const SparseAlgorithm& row : sparse_algorithms()) {
      SparseState state(1000);
      SparseResult result;
      std::vector<float> gradient(1000, 1.0F);
      if (world.rank() == 2) gradient[17] = HUGE_VALF;
      SparseOptions options = sparse_test::options_of(10);
      options.algorithm = row.name;
      world.run({.name = "sparse"},
                [&](Comm comm) { return sparse_all_reduce(comm, gradient, state, result, options); });
      EXPECT_FALSE(result.finite()) << row.name;
      EXPECT_THROW(state.commit(), UsageError) << row.name;
    }
  });
}

TEST(SparseRanks, RanksThatDisagreeFindOut) {
  EXPECT_THROW(run_ranks(2,
                         [](World& world) {
                           SparseState state(1000);
                           SparseResult result;
                           const std::vector<float> gradient(1000, 1.0F);
                           SparseOptions options = sparse_test::options_of(10 + world.rank());
                           options.algorithm = "topka";
                           world.run({.name = "sparse"}, [&](Comm comm) {
                             return sparse_all_reduce(comm, gradient, state, result, options);
                           });
                         }),
               TransportError);
}

// Ranks with vectors of these lengths; how many ended with an error that is not the caller's own.
int failures(std::string_view algorithm, const std::vector<std::int64_t>& lengths) {
  std::atomic<int> failed = 0;
  const auto body = [&](World& world) {
    const std::int64_t n = lengths[static_cast<std::size_t>(world.rank())];
    SparseState state(n);
    SparseResult result;
    const std::vector<float> gradient(static_cast<std::size_t>(n), 1.0F);
    SparseOptions options = sparse_test::options_of(10);
    options.algorithm = algorithm;
    try {
      world.barrier();  // nobody fails before all are here
      world.run({.name = "sparse", .timeout = 10s},
                [&](Comm comm) { return sparse_all_reduce(comm, gradient, state, result, options); });
    } catch (const TransportError&) {
      ++failed;
      throw;
    }
  };
  try {
    run_ranks(static_cast<int>(lengths.size()), body);
  } catch (const TransportError&) {
    EXPECT_GT(failed, 0);
  }
  return failed;
}

TEST(SparseRanks, OtherLengthsAndAnEmptyVectorOnOneRankFailEverywhere) {
  for (const SparseAlgorithm& row : sparse_algorithms()) {
    EXPECT_EQ(failures(row.name, {1000, 1000, 1000}), 0) << row.name << ": control";
    EXPECT_EQ(failures(row.name, {1000, 999, 1000}), 3) << row.name;
    EXPECT_EQ(failures(row.name, {1000, 1000, 0}), 3) << row.name;
    EXPECT_EQ(failures(row.name, {0, 0, 0}), 0) << row.name << ": nothing anywhere is normal";
  }
}

// Under a launcher: one rank a process.
TEST(SparseProcesses, EqualTheSimulation) {
  const std::unique_ptr<World> world = join_world(Config::from_environment());
  ASSERT_GT(world->size(), 1) << "needs a launcher";
  ASSERT_NE(world->transport(), "threads");
  check_rank(*world, simulate_all(world->size()));
  world->barrier();
}

}  // namespace
}  // namespace weft
