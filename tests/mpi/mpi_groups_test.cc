// Groups, slots and steps without number over mpi: all of them meet on one communicator and are told apart by
// their identity alone.
#include <numeric>

#include "engine/communication_thread.h"
#include "mpi/mpi_fixture.h"
#include "weft/collective.h"
#include "weft/engine.h"

namespace weft {
namespace {

// An engine that runs, on a transport of its own.
class Running {
 public:
  Running()
      : transport_(open_mpi({.job = 11})),
        engine_(*transport_, {.operation_timeout = 30s}, nullptr),
        thread_(engine_) {}
  Engine* operator->() { return &engine_; }
  Ticket sum(const Comm& comm, std::vector<std::int64_t>& data, std::uint32_t slot, std::uint32_t step = 0) {
    return engine_.submit(comm, {.name = "sum", .slot = slot, .step = step}, [&data](Comm bound) {
      return all_reduce(bound, Dense(std::span(data)), {.algorithm = "ring"});
    });
  }

 private:
  std::unique_ptr<Transport> transport_;
  Engine engine_;
  CommunicationThread thread_;
};

constexpr std::uint32_t kGroups = 8;

// Group g: all ranks, in another order for each; every other one leaves out the last rank where there are
// three or more.
std::vector<int> members_of(std::uint32_t g, int size) {
  std::vector<int> ranks(static_cast<std::size_t>(g % 2 == 1 && size > 2 ? size - 1 : size));
  std::iota(ranks.begin(), ranks.end(), 0);
  std::rotate(ranks.begin(), ranks.begin() + static_cast<std::ptrdiff_t>(g / 2 % ranks.size()), ranks.end());
  return ranks;
}

std::int64_t value(int rank, std::uint32_t g) { return (std::int64_t{1} << (4 * rank)) * (g + 1); }

// Sums in eight groups, each rank making them in an order of its own, all with one slot and step. Gives the
// number of wrong sums of this rank.
int wrong_sums(Running& engine, int rank, int size, bool labelled) {
  std::vector<std::vector<std::int64_t>> sums;
  for (std::uint32_t g = 0; g < kGroups; ++g) sums.emplace_back(3000, value(rank, g));
  std::vector<Ticket> tickets;
  const auto member = [&](std::uint32_t g) {
    const std::vector<int> ranks = members_of(labelled ? g : 0, size);
    return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
  };
  for (std::uint32_t i = 0; i < kGroups; ++i) {
    const std::uint32_t g =
        rank % 2 == 0 ? (i + static_cast<std::uint32_t>(rank)) % kGroups : kGroups - 1 - i;
    if (!member(g)) continue;
    const Comm group = engine->world().subgroup(members_of(labelled ? g : 0, size), labelled ? g : 0);
    try {
      tickets.push_back(engine.sum(group, sums[g], 5));
    } catch (const UsageError&) {  // the identity is in flight: this sum stays wrong
    }
  }
  for (const Ticket& ticket : tickets) ticket.wait();
  int wrong = 0;
  for (std::uint32_t g = 0; g < kGroups; ++g) {
    if (!member(g)) continue;
    std::int64_t expected = 0;
    for (const int other : members_of(labelled ? g : 0, size)) expected += value(other, g);
    wrong += sums[g] == std::vector<std::int64_t>(3000, expected) ? 0 : 1;
  }
  return wrong;
}

TEST_F(Mpi, EightGroupsAtOnceInAnyOrderBesideALongSum) {
  Running engine;
  std::vector<std::int64_t> large(std::size_t{1} << 21, 1 + rank());
  // Rank 0 joins the long sum last, so that it is under way on all others until the groups are done.
  Ticket sum;
  if (rank() != 0) sum = engine.sum(engine->world(), large, 5);
  EXPECT_EQ(wrong_sums(engine, rank(), size(), true), 0);
  if (rank() == 0) sum = engine.sum(engine->world(), large, 5);
  sum.wait();
  EXPECT_EQ(large, std::vector<std::int64_t>(large.size(), size() * (size() + 1) / 2));
  // Control: without labels the eight are one group, of which one sum at a time is taken, on each rank
  // another.
  EXPECT_GT(wrong_sums(engine, rank(), size(), false), 0);
}

TEST_F(Mpi, FortyStepsOfASlotInFlight) {
  Running engine;
  constexpr std::uint32_t kSteps = 40;
  for (const std::uint32_t slot : {5u, (1u << 12) + 5, 1u << 20}) {
    std::vector<std::vector<std::int64_t>> sums;
    for (std::uint32_t step = 0; step < kSteps; ++step)
      sums.emplace_back(step % 2 == 0 ? 30 : 5000, value(rank(), step));
    std::vector<Ticket> tickets;
    for (std::uint32_t i = 0; i < kSteps; ++i) {
      const std::uint32_t step = rank() == 0 ? i : kSteps - 1 - i;
      tickets.push_back(engine.sum(engine->world(), sums[step], slot, step));
    }
    for (const Ticket& ticket : tickets) ticket.wait();
    for (std::uint32_t step = 0; step < kSteps; ++step) {
      std::int64_t expected = 0;
      for (int r = 0; r < size(); ++r) expected += value(r, step);
      EXPECT_EQ(sums[step], std::vector<std::int64_t>(sums[step].size(), expected)) << step;
    }
  }
}

}  // namespace
}  // namespace weft
