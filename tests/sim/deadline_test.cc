// Deadlines in virtual time: they count from the last progress of an operation, on whatever rank it was made.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <span>
#include <string>
#include <vector>

#include "weft/collective.h"
#include "weft/engine.h"
#include "weft/error.h"
#include "world/sim_ranks.h"

namespace weft {
namespace {

using testing::HasSubstr;
using testing::Not;

constexpr Time kTimeout = 1s;
constexpr Time kHop = 400ms;  // well below the timeout, and a few of them are above it

SimRanksOptions slow_ranks(int ranks) {
  SimRanksOptions options;
  options.sim.link = {.ranks = ranks, .latency_seconds = 50e-6, .bytes_per_second = 1e6};
  return options;
}

struct Outcome {
  std::string error;  // empty if there was none
  bool timed_out = false;
  Time took{};
};

Outcome run(SimRanks& ranks, const SubmitOptions& options,
            const std::function<Task<void>(Comm, int rank)>& make) {
  Outcome outcome;
  const Time start = ranks.world().now();
  try {
    ranks.run(options, make);
  } catch (const TimeoutError& e) {
    outcome.error = e.what();
    outcome.timed_out = true;
  } catch (const Error& e) {
    outcome.error = e.what();
  }
  outcome.took = ranks.world().now() - start;
  return outcome;
}

// Ranks 0 and 1 exchange `hops` messages that take kHop each.
Task<void> talk(Comm comm, std::uint32_t hops) {
  std::vector<std::byte> out(400'000), in(400'000);
  for (std::uint32_t hop = 0; hop < hops; ++hop) {
    Transfer received = comm.recv(1 - comm.rank(), hop, std::span(in));
    Transfer sent = comm.send(1 - comm.rank(), hop, std::span(out));
    co_await received;
    co_await sent;
  }
}

// Ranks 0 and 1 talk; then, after a pause, rank 0 tells rank 2, which waits for that alone.
Task<void> talk_and_tell(Comm comm, std::uint32_t hops, Time pause) {
  std::byte word{1};
  if (comm.rank() == 2) {
    Transfer received = comm.recv(0, 99, std::span(&word, 1));
    co_await received;
    co_return;
  }
  co_await talk(comm, hops);
  co_await comm.sleep_until(comm.now() + pause);
  if (comm.rank() != 0) co_return;
  Transfer sent = comm.send(2, 99, std::span(&word, 1));
  co_await sent;
}

TEST(Deadline, CountsFromTheLastBytes) {
  SimRanks ranks(slow_ranks(2));
  const auto make = [](Comm comm, int) { return talk(comm, 10); };
  const Outcome moving = run(ranks, {.slot = 1, .timeout = kTimeout}, make);
  EXPECT_EQ(moving.error, "");
  EXPECT_GE(moving.took, 4s);
  // Control: a limit on the whole is kept.
  const Outcome limited = run(ranks, {.slot = 2, .timeout = kTimeout, .time_limit = 2s}, make);
  EXPECT_TRUE(limited.timed_out) << limited.error;
  EXPECT_THAT(limited.error, HasSubstr("did not end within 2.0"));
  EXPECT_EQ(limited.took, 2s);
}

TEST(Deadline, ARankThatOnlyWaitsHearsThatOthersMove) {
  SimRanks ranks(slow_ranks(3));
  const Outcome told =
      run(ranks, {.slot = 1, .timeout = kTimeout}, [](Comm c, int) { return talk_and_tell(c, 10, 0s); });
  EXPECT_EQ(told.error, "");
  EXPECT_GE(told.took, 4s);
}

// The control of both: where nothing moves any more, the deadline is what it was, from the last progress on.
TEST(Deadline, NobodyIsKeptAliveByNotes) {
  SimRanks ranks(slow_ranks(3));
  const Outcome stuck =
      run(ranks, {.slot = 1, .timeout = kTimeout}, [](Comm c, int) { return talk_and_tell(c, 4, 100s); });
  EXPECT_TRUE(stuck.timed_out) << stuck.error;
  EXPECT_THAT(stuck.error, HasSubstr("made no progress for 1.0"));
  const Time last = 4 * kHop;
  EXPECT_GE(stuck.took, last + kTimeout);
  EXPECT_LE(stuck.took, last + kTimeout + kTimeout / 8);
}

// Two operations; the messages of the second stand behind those of the first in this rank's own queue.
TEST(Deadline, WhatStandsInAQueueThatMovesIsNotLate) {
  SimRanksOptions options = slow_ranks(2);
  options.config.window_bytes = 1;  // one message at a time
  options.config.stall_limit = kNever;
  SimRanks ranks(options);
  std::vector<std::byte> out(400'000), in(400'000 * 20);
  const auto all_at_once = [&](Comm comm, std::uint32_t count) -> Task<void> {
    std::vector<Transfer> transfers;
    for (std::uint32_t i = 0; i < count; ++i) {
      transfers.push_back(comm.recv(1 - comm.rank(), i, std::span(in).subspan(400'000 * i, 400'000)));
      transfers.push_back(comm.send(1 - comm.rank(), i, std::span<const std::byte>(out)));
    }
    for (Transfer& transfer : transfers) co_await transfer;
  };
  std::vector<Ticket> tickets;
  for (int r = 0; r < 2; ++r) {
    Engine& engine = ranks.engine(r);
    tickets.push_back(engine.submit(engine.world(), {.priority = 0, .slot = 1, .timeout = kTimeout},
                                    [&](Comm c) { return all_at_once(c, 10); }));
    tickets.push_back(engine.submit(engine.world(), {.priority = 1, .slot = 2, .timeout = kTimeout},
                                    [&](Comm c) { return all_at_once(c, 1); }));
  }
  const auto done = [&] {
    for (const Ticket& t : tickets) {
      if (!t.done()) return false;
    }
    return true;
  };
  ASSERT_TRUE(ranks.world().run_until(done));
  for (const Ticket& ticket : tickets) EXPECT_NO_THROW(ticket.wait());
  EXPECT_GE(ranks.world().now(), 4s);
}

Task<void> await(Comm, Ticket ticket) { co_await ticket; }

TEST(Deadline, WhoAwaitsATicketLivesAsLongAsThatMoves) {
  for (const bool moves : {true, false}) {
    SimRanks ranks(slow_ranks(2));
    std::vector<Ticket> tickets;
    for (int r = 0; r < 2; ++r) {
      Engine& engine = ranks.engine(r);
      const auto work = [moves](Comm c) -> Task<void> {
        if (moves) co_await talk(c, 10);
        if (!moves) co_await c.sleep_until(c.now() + 10s);
      };
      tickets.push_back(engine.submit(engine.world(), {.name = "work", .slot = 1, .timeout = 20s}, work));
      const Ticket awaited = tickets.back();
      const SubmitOptions options{.name = "waiter", .local = true, .timeout = kTimeout};
      tickets.push_back(
          engine.submit(engine.world(), options, [awaited](Comm c) { return await(c, awaited); }));
    }
    const auto done = [&] { return tickets[1].done() && tickets[3].done(); };
    ASSERT_TRUE(ranks.world().run_until(done));
    if (moves) {
      EXPECT_NO_THROW(tickets[1].wait());
    } else {
      EXPECT_THROW(tickets[1].wait(), TimeoutError);
      EXPECT_EQ(ranks.world().now(), kTimeout) << "its own deadline, not that of what it awaits";
    }
  }
}

// Rank 1 does something else first: when the ranks compare what they run, it has declared nothing.
Task<void> declare_late(Comm comm, std::span<float> data, Time pause, const char* late) {
  AllReduceOptions options;
  options.algorithm = comm.rank() == 1 ? late : "ring";
  if (comm.rank() == 1) co_await comm.sleep_until(comm.now() + pause);
  co_await all_reduce(comm, Dense(data), options);
}

TEST(Inquiry, WhoHasDeclaredNothingIsNotAccused) {
  SimRanksOptions options = slow_ranks(3);
  SimRanks ranks(options);
  std::vector<std::vector<float>> data(3, std::vector<float>(60, 1));
  const auto make = [&](const char* late) {
    return [&, late](Comm c, int r) {
      return declare_late(c, data[static_cast<std::size_t>(r)], kTimeout * 3 / 4, late);
    };
  };
  const Outcome same = run(ranks, {.slot = 1, .timeout = kTimeout}, make("ring"));
  EXPECT_EQ(same.error, "");
  EXPECT_EQ(data[1][0], 3);
  // Control: one that declares something else is found, late as it is.
  const Outcome other = run(ranks, {.slot = 2, .timeout = kTimeout}, make("recursive_doubling"));
  EXPECT_THAT(other.error, HasSubstr("disagree about an operation"));
  EXPECT_THAT(other.error, HasSubstr("rank 1"));
}

}  // namespace
}  // namespace weft
