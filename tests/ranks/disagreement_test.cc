// Ranks that call different operations, on engines: found out before the deadline, and the one that calls
// something else is named, also where no message of one ever meets a receive of the other.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "base/worker_pool.h"
#include "engine/communication_thread.h"
#include "instrumented.h"
#include "ranks/suite.h"
#include "transports/threads.h"
#include "weft/collective.h"
#include "weft/error.h"
#include "weft/weft.h"
#include "world/sim_ranks.h"

namespace weft::test {
namespace {

using testing::HasSubstr;

constexpr Time kTimeout = kInstrumented ? 4s : 1s;

struct Call {
  const char* name;
  std::function<Task<void>(Comm, Dense data, Dense other)> run;
};

// Each waits for every rank, or for messages that only the same call sends.
const std::vector<Call>& calls() {
  static const std::vector<Call> all = {
      {"ring", [](Comm c, Dense d, Dense) { return all_reduce(c, d, {.algorithm = "ring"}); }},
      {"doubling",
       [](Comm c, Dense d, Dense) { return all_reduce(c, d, {.algorithm = "recursive_doubling"}); }},
      {"rabenseifner",
       [](Comm c, Dense d, Dense) { return all_reduce(c, d, {.algorithm = "rabenseifner"}); }},
      {"gather", [](Comm c, Dense d, Dense) { return all_gather(c, d, {.algorithm = "bruck"}); }},
      {"alltoall", [](Comm c, Dense d, Dense o) { return all_to_all(c, d, o, {.algorithm = "pairwise"}); }},
      {"barrier", [](Comm c, Dense, Dense) { return barrier(c); }},
  };
  return all;
}

// What each rank got: rank `odd` calls `theirs`, the others `ours`.
std::vector<std::exception_ptr> errors_of(int ranks, std::size_t eager_limit, int odd, const Call& ours,
                                          const Call& theirs) {
  ThreadsWorld world({.ranks = ranks, .eager_limit = eager_limit, .tamper = {}});
  WorkerPool pool(1);
  return spawn_catching(ranks, [&](int r) {
    Engine engine(world.transport(r), {.operation_timeout = kTimeout}, &pool);
    const CommunicationThread thread(engine);
    std::vector<float> data(60), other(60);
    const Call& call = r == odd ? theirs : ours;
    engine.submit(engine.world(), {}, [&](Comm c) { return call.run(c, dense(data), dense(other)); }).wait();
    engine.submit(engine.world(), {}, [](Comm c) { return barrier(c); }).wait();
  });
}

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  }
}

bool is_mismatch(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const TransportError& e) {
    return e.kind() == TransportError::Kind::mismatch;
  } catch (...) {
    return false;
  }
}

class Disagreements : public testing::TestWithParam<std::tuple<int, std::size_t>> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Disagreements,
                         testing::Combine(testing::Values(2, 3, 5), testing::Values(8192u, 0u)));

TEST_P(Disagreements, NamesTheRankThatCallsSomethingElse) {
  const auto [ranks, eager_limit] = GetParam();
  const std::size_t n = calls().size();
  for (std::size_t i = 0; i < n; ++i) {
    const Call& ours = calls()[i];
    const Call& theirs = calls()[(i + 1 + static_cast<std::size_t>(ranks) % (n - 1)) % n];
    SCOPED_TRACE(std::string(ours.name) + " on all, " + theirs.name + " on rank 1");
    int mismatches = 0;
    for (const std::exception_ptr& error : errors_of(ranks, eager_limit, 1, ours, theirs)) {
      ASSERT_TRUE(error) << "a rank went on";
      EXPECT_THAT(text_of(error), HasSubstr("disagree about an operation"));
      EXPECT_THAT(text_of(error), HasSubstr("rank 1"));
      mismatches += is_mismatch(error) ? 1 : 0;
    }
    EXPECT_GE(mismatches, 1);
  }
}

// Control: the same wait without a disagreement is a time-out that names the rank which is missing.
TEST(Disagreement, AMissingRankIsATimeOutThatNamesIt) {
  constexpr int kRanks = 5;
  ThreadsWorld world({.ranks = kRanks, .tamper = {}});
  WorkerPool pool(1);
  const auto errors = spawn_catching(kRanks, [&](int r) {
    Engine engine(world.transport(r), {.operation_timeout = r == 3 ? 4 * kTimeout : kTimeout}, &pool);
    const CommunicationThread thread(engine);
    if (r == 3) {  // it does something of its own until the others give up
      engine
          .submit(engine.world(), {.slot = 7},
                  [](Comm c) -> Task<void> { co_await c.sleep_until(c.now() + 10 * kTimeout); })
          .wait();
    }
    engine.submit(engine.world(), {.slot = 1}, [](Comm c) { return barrier(c); }).wait();
  });
  int named = 0;
  for (int r = 0; r < kRanks; ++r) {
    if (r == 3) continue;
    try {
      ASSERT_TRUE(errors[static_cast<std::size_t>(r)]);
      std::rethrow_exception(errors[static_cast<std::size_t>(r)]);
    } catch (const TimeoutError& e) {
      EXPECT_EQ(e.peer(), 3) << e.what();
      EXPECT_THAT(e.what(), HasSubstr("nothing was heard of this operation from rank 3"));
      ++named;
    } catch (const TransportError& e) {  // told by the one that gave up first
      EXPECT_THAT(e.what(), HasSubstr("from rank 3"));
    }
  }
  EXPECT_GE(named, 1);
}

// Two all-reduces in one operation; rank 1 comes late, so that the ranks stand in different parts of it when
// they ask each other.
Task<void> two_parts(Comm comm, std::vector<float>& a, std::vector<std::int32_t>& b) {
  co_await all_reduce(comm, dense(a));
  if (comm.rank() == 1) co_await comm.sleep_until(comm.now() + kTimeout * 5 / 8);
  co_await all_reduce(comm.hops_from(64), Dense(std::span(b)));
}

TEST(Disagreement, SlowPartsOfOneOperationAreNone) {
  run_ranks(3, [&](World& world) {
    std::vector<float> a(10, 1);
    std::vector<std::int32_t> b(10, 2);
    world.run({.name = "two parts", .slot = 1, .timeout = kTimeout},
              [&](Comm c) { return two_parts(c, a, b); });
    EXPECT_EQ(a[0], 3);
    EXPECT_EQ(b[0], 6);
    world.barrier();
  });
}

TEST(Disagreement, IsFoundInVirtualTimeToo) {
  SimRanksOptions options;
  options.sim.link = {.ranks = 5, .latency_seconds = 50e-6, .bytes_per_second = 125e6};
  SimRanks ranks(options);
  std::vector<std::vector<float>> data(5, std::vector<float>(60)), other(5, std::vector<float>(60));
  try {
    ranks.run({.name = "call", .slot = 1, .timeout = kTimeout}, [&](Comm c, int r) {
      const Call& call = calls()[r == 1 ? 0 : 2];
      return call.run(c, dense(data[static_cast<std::size_t>(r)]), dense(other[static_cast<std::size_t>(r)]));
    });
    FAIL() << "must throw";
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), HasSubstr("disagree about an operation"));
    EXPECT_THAT(e.what(), HasSubstr("rank 1"));
  }
}

// Over tcp: one disagreement, after which the job is over. Run by a launcher. (mpi_test has it for mpi.)
TEST(DisagreementProcesses, IsNamedOnEveryRank) {
  const std::unique_ptr<World> world = join_world();
  ASSERT_GE(world->size(), 3) << "needs a launcher";
  std::vector<float> data(60), other(60);
  const Call& call = calls()[world->rank() == 1 ? 0 : 2];
  try {
    world->run({.name = "call", .slot = 1, .timeout = 2s},
               [&](Comm c) { return call.run(c, dense(data), dense(other)); });
    world->run({.name = "after", .slot = 2, .timeout = 2s}, [](Comm c) { return barrier(c); });
    FAIL() << "must throw";
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), HasSubstr("disagree about an operation"));
    EXPECT_THAT(e.what(), HasSubstr("rank 1"));
  }
}

}  // namespace
}  // namespace weft::test
