// Engines in virtual time: the same object that a communication thread drives, on hundreds of seeds and every
// schedule.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "collectives/registry.h"
#include "transports/sim.h"
#include "weft/collective.h"
#include "weft/engine.h"
#include "weft/error.h"
#include "weft/random.h"

namespace weft {
namespace {

class SimEngines {
 public:
  SimEngines(const SimOptions& options, const EngineOptions& engine_options) : world_(options) {
    for (int r = 0; r < world_.size(); ++r) {
      engines_.push_back(std::make_unique<Engine>(world_.transport(r), engine_options, nullptr));
      world_.attach(r, *engines_.back());
    }
  }
  ~SimEngines() {
    for (int r = 0; r < world_.size(); ++r) world_.detach(r);
  }
  Engine& operator[](int r) { return *engines_[static_cast<std::size_t>(r)]; }
  SimWorld& world() { return world_; }
  bool run_until_done(const std::vector<Ticket>& tickets) {
    auto done = [&] {
      return std::all_of(tickets.begin(), tickets.end(), [](const Ticket& t) { return t.done(); });
    };
    return world_.run_until(done);
  }

 private:
  SimWorld world_;
  std::vector<std::unique_ptr<Engine>> engines_;
};

SimOptions sim_options(int ranks, std::uint64_t seed = 0, std::size_t eager_limit = 0) {
  SimOptions options;
  options.link.ranks = ranks;
  options.link.latency_seconds = 50e-6;
  options.link.bytes_per_second = 125e6;
  options.eager_limit = eager_limit;
  options.seed = seed;
  return options;
}

std::string text_of(const std::exception_ptr& error) {
  if (!error) return "";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  }
}

bool is_timeout(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const TimeoutError&) {
    return true;
  } catch (...) {
    return false;
  }
  return false;
}

// One operation of a mix: what each rank puts in and must get out. Values are small integers, so every sum is
// exact.
struct Job {
  Family family = Family::all_reduce;
  std::string_view algorithm;
  std::int64_t count = 0;
  std::uint32_t slot = 0;
  TrafficClass traffic = TrafficClass::gradient;
  int priority = 0;
  std::vector<std::vector<float>> data;  // of each rank
  std::vector<std::vector<float>> out;   // all_to_all only
};

float value(int rank, std::uint32_t slot, std::int64_t i) {
  return static_cast<float>((rank * 7 + static_cast<int>(slot) * 3 + i) % 13);
}

void fill(Job& job, int ranks) {
  job.data.assign(static_cast<std::size_t>(ranks), std::vector<float>(static_cast<std::size_t>(job.count)));
  job.out = job.data;
  for (int r = 0; r < ranks; ++r) {
    auto& mine = job.data[static_cast<std::size_t>(r)];
    for (std::int64_t i = 0; i < job.count; ++i) mine[static_cast<std::size_t>(i)] = value(r, job.slot, i);
  }
}

Task<void> run_job(Comm comm, Job& job, std::size_t micro_op_bytes) {
  const auto r = static_cast<std::size_t>(comm.rank());
  const Dense data(std::span<float>(job.data[r]));
  switch (job.family) {
    case Family::all_reduce: {
      const AllReduceOptions options{.algorithm = job.algorithm, .micro_op_bytes = micro_op_bytes};
      return all_reduce(comm, data, options);
    }
    case Family::reduce_scatter: {
      const ReduceScatterOptions options{.algorithm = job.algorithm, .micro_op_bytes = micro_op_bytes};
      return reduce_scatter(comm, data, options);
    }
    case Family::all_gather: {
      const AllGatherOptions options{.algorithm = job.algorithm, .micro_op_bytes = micro_op_bytes};
      return all_gather(comm, data, options);
    }
    case Family::broadcast: {
      const BroadcastOptions options{.root = 0, .algorithm = job.algorithm, .micro_op_bytes = micro_op_bytes};
      return broadcast(comm, data, options);
    }
    case Family::all_to_all: {
      const AllToAllOptions options{.algorithm = job.algorithm, .micro_op_bytes = micro_op_bytes};
      return all_to_all(comm, data, Dense(std::span<float>(job.out[r])), options);
    }
    default:
      return barrier(comm);
  }
}

// "" or the first wrong element.
std::string wrong(const Job& job, int ranks) {
  if (job.family == Family::barrier) return "";  // moves nothing
  for (int r = 0; r < ranks; ++r) {
    const auto rank = static_cast<std::size_t>(r);
    const BlockRange own = block_of(job.count, ranks, r);
    for (std::int64_t i = 0; i < job.count; ++i) {
      float expected = 0;
      float got = job.data[rank][static_cast<std::size_t>(i)];
      if (job.family == Family::all_reduce || job.family == Family::reduce_scatter) {
        if (job.family == Family::reduce_scatter && (i < own.first || i >= own.first + own.count)) continue;
        for (int s = 0; s < ranks; ++s) expected += value(s, job.slot, i);
      } else if (job.family == Family::all_gather) {
        for (int s = 0; s < ranks; ++s) {
          const BlockRange block = block_of(job.count, ranks, s);
          if (i >= block.first && i < block.first + block.count) expected = value(s, job.slot, i);
        }
      } else if (job.family == Family::broadcast) {
        expected = value(0, job.slot, i);
      } else if (job.family == Family::all_to_all) {
        const std::int64_t part = job.count / ranks;
        expected = value(static_cast<int>(i / part), job.slot, r * part + i % part);
        got = job.out[rank][static_cast<std::size_t>(i)];
      }
      if (got != expected) {
        return std::string(name_of(job.family)) + "/" + std::string(job.algorithm) + " rank " +
               std::to_string(r) + " element " + std::to_string(i) + ": " + std::to_string(got) +
               " instead of " + std::to_string(expected);
      }
    }
  }
  return "";
}

bool can_run(Family family, const Algorithm& row, int ranks, std::int64_t count) {
  const Shape shape{.size = ranks, .count = count, .element_bytes = 4};
  return family != Family::barrier && row.supports(shape);
}

TEST(Schedules, EveryAlgorithmRunsWithoutBufferingAtEverySize) {
  int runs = 0;
  for (int ranks = 1; ranks <= 33; ++ranks) {
    for (const Family family : kFamilies) {
      for (const Algorithm& row : algorithms(family)) {
        Job job;
        job.family = family;
        job.algorithm = row.name;
        job.count = family == Family::all_to_all ? 3 * ranks : 3 * ranks + 1;
        const Shape shape{.size = ranks, .count = job.count, .element_bytes = 4};
        if (!row.supports(shape)) continue;
        fill(job, ranks);
        SimEngines engines(sim_options(ranks), {.operation_timeout = 10s});
        std::vector<Ticket> tickets;
        for (int r = 0; r < ranks; ++r) {
          tickets.push_back(engines[r].submit(engines[r].world(), {.name = row.name, .slot = 1},
                                              [&job](Comm comm) { return run_job(comm, job, 8); }));
        }
        ASSERT_TRUE(engines.run_until_done(tickets))
            << row.name << " at " << ranks << " ranks waits for ever";
        for (const Ticket& t : tickets) ASSERT_EQ(text_of(t.error()), "") << row.name << " at " << ranks;
        ASSERT_EQ(wrong(job, ranks), "") << "at " << ranks;
        ++runs;
      }
    }
  }
  EXPECT_GT(runs, 33 * 10);
}

// 2 to 8 operations on 2 to 6 ranks, each rank in an order of its own, one message in flight, no buffering,
// random delays.
struct Mix {
  explicit Mix(std::uint64_t seed) : random(seed, 77), ranks(2 + static_cast<int>(random.below(5))) {
    std::vector<std::pair<Family, const Algorithm*>> rows;
    for (const Family family : kFamilies) {
      for (const Algorithm& row : algorithms(family)) {
        if (can_run(family, row, ranks, ranks * 8)) rows.emplace_back(family, &row);
      }
    }
    const std::uint32_t num_jobs = 2 + random.below(7);
    for (std::uint32_t slot = 0; slot < num_jobs; ++slot) {
      const auto& [family, row] = rows[random.below(static_cast<std::uint32_t>(rows.size()))];
      Job job;
      job.family = family;
      job.algorithm = row->name;
      job.count = ranks * (1 + static_cast<std::int64_t>(random.below(40)));
      job.slot = slot;
      job.traffic = static_cast<TrafficClass>(random.below(4));
      job.priority = static_cast<int>(random.below(3));
      fill(job, ranks);
      jobs.push_back(std::move(job));
    }
    for (int r = 0; r < ranks; ++r) {
      std::vector<std::size_t> order(jobs.size());
      std::iota(order.begin(), order.end(), 0u);
      for (std::size_t i = order.size() - 1; i > 0; --i)
        std::swap(order[i], order[random.below(static_cast<std::uint32_t>(i + 1))]);
      orders.push_back(order);
    }
  }

  // "" if all went well.
  std::string run(std::uint64_t seed, bool local_counter) {
    SimOptions options = sim_options(ranks, seed);
    options.jitter_seconds = 200e-6;
    SimEngines engines(options,
                       {.window_bytes = 1, .hold_limit = 5ms, .stall_limit = 1ms, .operation_timeout = 5s});
    std::vector<Ticket> tickets;
    for (int r = 0; r < ranks; ++r) {
      for (const std::size_t j : orders[static_cast<std::size_t>(r)]) {
        Job& job = jobs[j];
        SubmitOptions submit{
            .name = job.algorithm, .traffic = job.traffic, .priority = job.priority, .slot = job.slot};
        if (local_counter) submit.slot = std::nullopt;  // the number of the call on this rank
        tickets.push_back(engines[r].submit(engines[r].world(), submit,
                                            [&job](Comm comm) { return run_job(comm, job, 64); }));
      }
    }
    if (!engines.run_until_done(tickets)) return "waits for ever";
    for (const Ticket& t : tickets) {
      if (t.error()) return text_of(t.error());
    }
    for (const Job& job : jobs) {
      if (const std::string what = wrong(job, ranks); !what.empty()) return what;
    }
    return "";
  }

  bool orders_differ() const {
    return std::any_of(orders.begin(), orders.end(), [&](const auto& order) { return order != orders[0]; });
  }

  Random random;
  int ranks;
  std::vector<Job> jobs;
  std::vector<std::vector<std::size_t>> orders;
};

std::uint64_t num_seeds() {
  const char* grid = std::getenv("WEFT_TEST_GRID");
  return grid != nullptr && std::string(grid) == "full" ? 20'000 : 1'000;
}

std::uint64_t first_seed() {
  const char* round = std::getenv("WEFT_SOAK_ROUND");
  return round != nullptr ? std::strtoull(round, nullptr, 10) * 1'000'000 : 0;
}

TEST(Mixes, AnyOrderOnAnyRankEndsRight) {
  for (std::uint64_t seed = first_seed(); seed < first_seed() + num_seeds(); ++seed) {
    Mix mix(seed);
    ASSERT_EQ(mix.run(seed, false), "") << "seed " << seed;
  }
}

TEST(Mixes, ControlIdsFromALocalCounterFail) {
  int differ = 0;
  int failed = 0;
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    Mix mix(seed);
    if (!mix.orders_differ()) continue;
    ++differ;
    failed += mix.run(seed, true).empty() ? 0 : 1;
  }
  EXPECT_GT(differ, 40);
  EXPECT_GT(failed, differ / 2) << "the check above must be able to fail";
}

TEST(Mixes, TheSameSeedGivesTheSameEvents) {
  const auto hash = [](std::uint64_t seed) {
    SimOptions options = sim_options(5, seed);
    options.jitter_seconds = 100e-6;
    SimEngines engines(options, {});
    Job job;
    job.algorithm = "ring";
    job.count = 1000;
    fill(job, 5);
    std::vector<Ticket> tickets;
    for (int r = 0; r < 5; ++r) {
      tickets.push_back(engines[r].submit(engines[r].world(), {.slot = 1},
                                          [&job](Comm comm) { return run_job(comm, job, 256); }));
    }
    engines.run_until_done(tickets);
    return engines.world().event_hash();
  };
  EXPECT_EQ(hash(3), hash(3));
  EXPECT_NE(hash(3), hash(4));
}

// Rank 0 waits for its gradients before it enters the blocking all-to-all that the others are in already;
// they hold their gradients back for it.
Task<void> gradients_first(Engine& engine, Job& gradient, Job& blocking) {
  const Ticket first = engine.submit(engine.world(), {.name = "gradient", .slot = 1},
                                     [&gradient](Comm comm) { return run_job(comm, gradient, 64); });
  co_await first;
  const SubmitOptions urgent{
      .name = "all_to_all", .traffic = TrafficClass::blocking, .slot = 2, .holds = true};
  const Ticket second =
      engine.submit(engine.world(), urgent, [&blocking](Comm comm) { return run_job(comm, blocking, 64); });
  co_await second;
}

std::vector<std::exception_ptr> waiting_against_holding(Time hold_limit) {
  constexpr int kRanks = 4;
  Job gradient;
  gradient.algorithm = "ring";
  gradient.count = 400;
  gradient.slot = 1;
  fill(gradient, kRanks);
  Job blocking;
  blocking.family = Family::all_to_all;
  blocking.algorithm = "pairwise";
  blocking.count = 400;
  blocking.slot = 2;
  fill(blocking, kRanks);

  SimEngines engines(sim_options(kRanks), {.hold_limit = hold_limit, .operation_timeout = 2s});
  std::vector<Ticket> tickets;
  tickets.push_back(engines[0].submit(engines[0].world(), {.name = "driver", .slot = 9, .timeout = 10s},
                                      [&](Comm) { return gradients_first(engines[0], gradient, blocking); }));
  for (int r = 1; r < kRanks; ++r) {
    Engine& engine = engines[r];
    const SubmitOptions urgent{
        .name = "all_to_all", .traffic = TrafficClass::blocking, .slot = 2, .holds = true};
    tickets.push_back(
        engine.submit(engine.world(), urgent, [&](Comm comm) { return run_job(comm, blocking, 64); }));
    tickets.push_back(engine.submit(engine.world(), {.name = "gradient", .slot = 1},
                                    [&](Comm comm) { return run_job(comm, gradient, 64); }));
  }
  EXPECT_TRUE(engines.run_until_done(tickets)) << "nothing may wait for ever";
  std::vector<std::exception_ptr> errors;
  for (const Ticket& t : tickets) errors.push_back(t.error());
  if (std::none_of(errors.begin(), errors.end(),
                   [](const std::exception_ptr& e) { return static_cast<bool>(e); })) {
    EXPECT_EQ(wrong(gradient, kRanks), "");
    EXPECT_EQ(wrong(blocking, kRanks), "");
  }
  return errors;
}

TEST(Aging, ARankThatWaitsAndRanksThatHoldDoNotWaitForEachOther) {
  for (const std::exception_ptr& e : waiting_against_holding(50ms)) EXPECT_EQ(text_of(e), "");
  // Control: with aging off the same run ends in time-outs.
  int timeouts = 0;
  for (const std::exception_ptr& e : waiting_against_holding(kNever)) timeouts += is_timeout(e) ? 1 : 0;
  EXPECT_GT(timeouts, 0);
}

Task<void> computes(Comm comm, int& ran) {
  auto work = [&ran] {
    ++ran;
    return 0.25;
  };
  auto free_work = [&ran] { ++ran; };
  co_await comm.compute(work);
  co_await comm.compute(free_work);
}

TEST(Compute, RunsInlineAndCostsVirtualTime) {
  SimEngines engines(sim_options(1), {});
  int ran = 0;
  const Ticket t =
      engines[0].submit(engines[0].world(), {.slot = 1}, [&](Comm comm) { return computes(comm, ran); });
  ASSERT_TRUE(engines.run_until_done({t}));
  EXPECT_EQ(ran, 2);
  EXPECT_EQ(t.finished() - t.started(), 250ms);
}

TEST(Death, EverySurvivorIsToldWhoDied) {
  for (std::uint64_t message = 0; message < 12; ++message) {
    constexpr int kRanks = 5;
    SimOptions options = sim_options(kRanks);
    options.deaths.push_back({.rank = 3, .at_message = message});
    SimEngines engines(options, {.operation_timeout = 5s});
    Job job;
    job.algorithm = "ring";
    job.count = 1000;
    fill(job, kRanks);
    std::vector<Ticket> tickets;
    for (int r = 0; r < kRanks; ++r) {
      const Ticket t = engines[r].submit(engines[r].world(), {.name = "ring", .slot = 1},
                                         [&job](Comm comm) { return run_job(comm, job, 256); });
      if (r != 3) tickets.push_back(t);
    }
    ASSERT_TRUE(engines.run_until_done(tickets)) << "hangs when rank 3 dies at its message " << message;
    for (const Ticket& t : tickets)
      EXPECT_NE(text_of(t.error()).find("rank 3"), std::string::npos) << text_of(t.error());
    EXPECT_LT(seconds(engines.world().now()), 1.0) << "told by the transport, not by the deadline";
  }
}

}  // namespace
}  // namespace weft
