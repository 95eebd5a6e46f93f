// World: what a program starts with.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <fstream>
#include <latch>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "files.h"
#include "weft/error.h"
#include "weft/weft.h"
#include "world/mesh.h"

namespace weft {
namespace {

TEST(World, FourRanksSum) {
  std::atomic<int> right{0};
  run_ranks(4, [&](World& world) {
    std::vector<float> gradient(100'000, static_cast<float>(world.rank()));
    world.all_reduce(std::span(gradient));
    bool all = true;
    for (const float g : gradient) all &= g == 6.0F;
    right += all ? 1 : 0;
    world.barrier();
  });
  EXPECT_EQ(right.load(), 4);
}

TEST(World, AllRanksGoByTheSameFigures) {
  std::vector<std::size_t> micro_ops(5);
  std::vector<double> hops(5);
  run_ranks(5, [&](World& world) {
    world.barrier();
    const auto r = static_cast<std::size_t>(world.rank());
    micro_ops[r] = world.comm().micro_op_bytes();
    hops[r] = world.comm().cost().hop_seconds;
  });
  for (std::size_t r = 1; r < 5; ++r) {
    EXPECT_EQ(micro_ops[r], micro_ops[0]);
    EXPECT_EQ(hops[r], hops[0]);
  }
  EXPECT_GT(micro_ops[0], 0u);
}

// Sums of five ranks whose order of additions shows.
std::vector<float> sums_by(World& world) {
  std::vector<float> values(1000);
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = std::sin(static_cast<float>(i * 7 + static_cast<std::size_t>(world.rank()) * 1001));
  world.all_reduce(std::span(values));
  return values;
}

constexpr LinkCost kSlowToStart{.hop_seconds = 0.1, .seconds_per_byte = 1e-12, .fold_seconds_per_byte = 0};
constexpr LinkCost kSlowToCarry{.hop_seconds = 1e-7, .seconds_per_byte = 1e-6, .fold_seconds_per_byte = 0};

struct Summed {
  std::vector<float> sums;
  LinkCost figures;
};

Summed summed_with(const std::string& figures, const std::optional<LinkCost>& planned = {}) {
  RunOptions options;
  options.config.figures = figures;
  Summed out;
  run_ranks(5, options, [&](World& world) {
    if (planned) world.plan_by(*planned);
    const std::vector<float> sums = sums_by(world);
    const LinkCost by = world.figures();
    if (world.rank() == 0) out = {sums, by};
  });
  return out;
}

TEST(World, FiguresThatAreGivenDecideTheBits) {
  const Summed start = summed_with(text_of(kSlowToStart)), carry = summed_with(text_of(kSlowToCarry));
  EXPECT_EQ(text_of(start.figures), text_of(kSlowToStart));
  EXPECT_NE(start.sums, carry.sums) << "control: with others another algorithm is chosen";
  EXPECT_EQ(start.sums, summed_with(text_of(kSlowToStart)).sums);
  EXPECT_EQ(start.sums, summed_with(text_of(kSlowToCarry), kSlowToStart).sums) << "plan_by counts later";
}

TEST(World, AFileKeepsFiguresThatWereMeasured) {
  const testing::Folder folder;
  const std::string file = folder / "figures";
  const Summed measured = summed_with(file);
  const Summed again = summed_with(file);
  EXPECT_EQ(text_of(again.figures), text_of(measured.figures));
  EXPECT_NE(text_of(again.figures), text_of(summed_with("").figures)) << "control: measured anew they differ";
  std::ofstream(file) << "hop_seconds=1\n";
  EXPECT_THROW(summed_with(file), UsageError);
  EXPECT_THROW(summed_with(folder.path() / "no" / "such" / "folder"), UsageError);
}

TEST(World, FiguresAsTextComeBackToTheBit) {
  const LinkCost odd{
      .hop_seconds = 0.1 + 0.2, .seconds_per_byte = 4.9e-324, .fold_seconds_per_byte = 1e308 / 3};
  const LinkCost back = parse_figures(text_of(odd));
  EXPECT_EQ(back.hop_seconds, odd.hop_seconds);
  EXPECT_NE(back.hop_seconds, 0.3) << "control: six digits would give this";
  EXPECT_EQ(back.seconds_per_byte, odd.seconds_per_byte);
  EXPECT_EQ(back.fold_seconds_per_byte, odd.fold_seconds_per_byte);
  const std::string sound = text_of(LinkCost{});
  for (const std::string& bad :
       {std::string(), sound + ",", sound + "0x", "," + sound, sound + ",more=1", sound.substr(1),
        std::string("hop_seconds=0,seconds_per_byte=1,fold_seconds_per_byte=1"),
        std::string("hop_seconds=inf,seconds_per_byte=1,fold_seconds_per_byte=1"),
        std::string("hop_seconds=1,seconds_per_byte=-1,fold_seconds_per_byte=1"),
        std::string("seconds_per_byte=1,hop_seconds=1,fold_seconds_per_byte=1")})
    EXPECT_THROW(parse_figures(bad), UsageError) << bad;
}

TEST(World, FiguresOfTwoLevelsAsTextComeBackToTheBit) {
  LinkCost levels{.hop_seconds = 0.1 + 0.2, .seconds_per_byte = 1e-9 / 3};
  levels.node_ranks = 4;
  levels.scale_up_hop_seconds = 1e-6 / 7;
  levels.scale_up_seconds_per_byte = 1e-10 / 3;
  const LinkCost back = parse_figures(text_of(levels));
  EXPECT_EQ(back.node_ranks, 4);
  EXPECT_EQ(back.scale_up_hop_seconds, levels.scale_up_hop_seconds);
  EXPECT_EQ(back.scale_up_seconds_per_byte, levels.scale_up_seconds_per_byte);
  EXPECT_EQ(text_of(back), text_of(levels));
  EXPECT_EQ(text_of(LinkCost{}).find("node"), std::string::npos) << "one level says nothing of nodes";
  const std::string flat = text_of(LinkCost{});
  for (const char* bad : {",node_ranks=4", ",node_ranks=1,scale_up_hop_seconds=1,scale_up_seconds_per_byte=1",
                          ",node_ranks=2.5,scale_up_hop_seconds=1,scale_up_seconds_per_byte=1",
                          ",node_ranks=4,scale_up_hop_seconds=0,scale_up_seconds_per_byte=1",
                          ",node_ranks=4,scale_up_hop_seconds=1,scale_up_seconds_per_byte=1,"})
    EXPECT_THROW(parse_figures(flat + bad), UsageError) << bad;
}

// What a network with nodes says of itself, and what is measured where it says no rate.
TEST(World, KnowsItsNodes) {
  for (const double rate : {1e9, 0.0}) {
    RunOptions options;
    options.link = EmulatedLink{.bytes_per_second = rate, .nodes = 2, .scale_up_bytes_per_second = 10e9};
    run_ranks(4, options, [](World& world) {
      EXPECT_EQ(world.figures().node_ranks, 2);
      EXPECT_EQ(world.comm().node_size(), 2);
      const int other = (world.rank() + 2) % 4;
      const std::vector<int> apart{std::min(world.rank(), other), std::max(world.rank(), other)};
      EXPECT_EQ(world.subgroup(apart).node_size(), 1);
    });
  }
  run_ranks(4, {}, [](World& world) { EXPECT_EQ(world.comm().node_size(), 1) << "one host, one level"; });
}

TEST(World, AFailingRankStopsTheOthersAndItsErrorIsTheOneSeen) {
  std::atomic<int> stopped{0};
  try {
    run_ranks(3, [&](World& world) {
      if (world.rank() == 1) {
        world.barrier();  // all have started: one that has not would end there, and not in the call below
        throw std::runtime_error("the data loader of rank 1 broke");
      }
      std::vector<float> gradient(10);
      try {
        world.barrier();
        world.all_reduce(std::span(gradient));
      } catch (const TransportError& e) {
        if (std::string(e.what()).find("the data loader of rank 1 broke") != std::string::npos) ++stopped;
        throw;
      }
    });
    FAIL() << "must throw";
  } catch (const std::exception& e) {
    EXPECT_STREQ(e.what(), "the data loader of rank 1 broke");
  }
  EXPECT_EQ(stopped.load(), 2) << "both others are told why";
}

TEST(World, SubgroupsHaveTheirOwnRanksAndNumbers) {
  std::atomic<int> right{0};
  run_ranks(5, [&](World& world) {
    const std::vector<int> even = {0, 2, 4};
    const std::vector<int> odd = {3, 1};
    const bool is_even = world.rank() % 2 == 0;
    const Comm group = world.subgroup(is_even ? even : odd);
    std::vector<std::int64_t> value(1, world.rank());
    world.engine()
        .submit(group, {.name = "group sum"},
                [&](Comm comm) { return all_reduce(comm, Dense(std::span(value))); })
        .wait();
    if (value[0] == (is_even ? 6 : 4)) ++right;
    if (world.rank() == 3) right += group.rank() == 0 ? 1 : 0;  // the order of the list counts
    world.barrier();
  });
  EXPECT_EQ(right.load(), 6);
}

// Every axis at once, each rank in an order of its own; all with the same slot.
TEST(World, GroupsOfAMeshDoNotMeet) {
  const Mesh mesh = parse_mesh("dp=4,pp=2,ep=2", 8);
  run_ranks(8, [&](World& world) {
    std::vector<Axis> axes(kAxes.begin(), kAxes.end());
    std::rotate(axes.begin(), axes.begin() + world.rank() % 5, axes.end());
    std::vector<std::vector<std::int64_t>> sums(axes.size(), std::vector<std::int64_t>(1, 1 << world.rank()));
    std::vector<Ticket> tickets;
    for (std::size_t i = 0; i < axes.size(); ++i) {
      const Comm group = axis_group(world, mesh, axes[i]);
      tickets.push_back(world.engine().submit(
          group, {.name = "axis sum", .slot = 3},
          [&sum = sums[i]](Comm comm) { return all_reduce(comm, Dense(std::span(sum))); }));
    }
    for (const Ticket& ticket : tickets) ticket.wait();
    for (std::size_t i = 0; i < axes.size(); ++i) {
      std::int64_t expected = 0;
      for (const int member : mesh.members(axes[i], world.rank())) expected += 1 << member;
      EXPECT_EQ(sums[i][0], expected) << name_of(axes[i]) << " of rank " << world.rank();
    }
    world.barrier();
  });
  run_ranks(2, [&](World& world) { EXPECT_THROW(axis_group(world, mesh, Axis::dp), UsageError); });
}

TEST(World, AGroupThatLeavesItsCallerOutIsRefused) {
  run_ranks(2, [](World& world) {
    EXPECT_THROW(world.subgroup({1 - world.rank()}), UsageError);
    EXPECT_THROW(world.subgroup({0, 7}), UsageError);
    world.barrier();  // the job goes on
  });
}

TEST(World, BadRankCounts) {
  EXPECT_THROW(run_ranks(0, [](World&) {}), UsageError);
  EXPECT_THROW(run_ranks(-3, [](World&) {}), UsageError);
}

// What a job of two ranks writes while rank 1 comes late to an operation.
std::string logged(const std::string& level) {
  RunOptions options;
  options.config.log = level;
  ::testing::internal::CaptureStderr();
  run_ranks(2, options, [](World& world) {
    const auto late = [](Comm comm) -> Task<void> {
      if (comm.rank() == 1) co_await comm.sleep_until(comm.now() + 1400ms);
      co_await barrier(comm);
    };
    world.run({.name = "late", .slot = 1, .timeout = 2s}, late);
  });
  return ::testing::internal::GetCapturedStderr();
}

TEST(World, LogsWhatItIsAskedTo) {
  const std::string info = logged("info");
  for (const char* part : {"[rank 0] connected: rank 0 of 2 over threads", "[rank 1] connected: rank 1 of 2",
                           "[rank 0] late (slot 1, step 0) has taken 1.", "waiting for rank 1"})
    EXPECT_NE(info.find(part), std::string::npos) << part << " in: " << info;
  const std::string warning = logged("warning");
  EXPECT_EQ(warning.find("connected"), std::string::npos) << warning;
  EXPECT_NE(warning.find("and stands still"), std::string::npos) << warning;
  EXPECT_EQ(logged("off"), "");
}

TEST(World, TrafficCountsPayloadAndFrames) {
  run_ranks(2, [](World& world) {
    world.barrier();
    const TrafficCounters before = world.traffic();
    std::vector<float> gradient(1000);
    world.all_reduce(std::span(gradient), {.algorithm = "ring"});
    const TrafficCounters after = world.traffic();
    EXPECT_EQ(after.payload_bytes_sent - before.payload_bytes_sent, 4000u);  // 2 n (P-1)/P
    const std::uint64_t messages = after.messages_sent - before.messages_sent;
    EXPECT_EQ(after.wire_bytes_sent - before.wire_bytes_sent, 4000u + 64 * messages);
    world.barrier();
  });
}

// Rank 0 submits and goes, rank 1 comes later: what rank 0 left in flight ends well on both.
TEST(World, ARankThatGoesFinishesWhatItHasInFlight) {
  for (const bool throws : {false, true}) {  // true: control
    std::vector<std::vector<float>> sums(2, std::vector<float>(100'000, 1.0F));
    std::vector<Ticket> tickets(2);
    std::latch both_started(2);
    const auto body = [&](World& world) {
      const auto r = static_cast<std::size_t>(world.rank());
      both_started.arrive_and_wait();
      if (r == 1) std::this_thread::sleep_for(100ms);
      const Dense data(std::span<float>{sums[r]});
      tickets[r] = world.engine().submit(world.comm(), {.slot = 1},
                                         [data](Comm comm) { return all_reduce(comm, data); });
      if (throws && r == 0) throw std::runtime_error("rank 0 cannot go on");
    };
    if (throws) {
      EXPECT_THROW(run_ranks(2, body), std::runtime_error);
      EXPECT_THROW(tickets[1].wait(), TransportError);
      continue;
    }
    run_ranks(2, body);
    for (const Ticket& t : tickets) t.wait();
    EXPECT_EQ(sums, std::vector(2, std::vector<float>(100'000, 2.0F)));
  }
}

TEST(World, AloneWithoutALauncher) {
  Config config;
  config.transport = "threads";
  const std::unique_ptr<World> world = join_world(config);
  EXPECT_EQ(world->size(), 1);
  std::vector<double> x(3, 1.5);
  world->all_reduce(std::span(x));
  EXPECT_EQ(x[2], 1.5);
}

TEST(World, ATracedRunOnAShapedLink) {
  RunOptions options;
  options.link = EmulatedLink{.bytes_per_second = 125e6, .latency_seconds = 50e-6};
  std::vector<Trace> traces;
  options.traces = &traces;
  run_ranks(3, options, [](World& world) {
    std::vector<float> gradient(300'000);
    world.all_reduce(std::span(gradient), {.algorithm = "ring"});
  });
  ASSERT_EQ(traces.size(), 3u);
  std::uint64_t bytes = 0;
  for (const TraceEvent& e : traces[1].events()) {
    if (e.kind == TraceEvent::Kind::micro_op && e.name == "all_reduce") bytes += e.bytes;
  }
  EXPECT_EQ(bytes, 2u * 300'000 * 4 * 2 / 3);
}

}  // namespace
}  // namespace weft
