// The link model against times computed by hand. Rates are 1 byte a nanosecond, so that bytes read as
// nanoseconds.
#include "transports/link_model.h"

#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "instrumented.h"
#include "transports/flow_order.h"
#include "transports/link_spec.h"
#include "weft/error.h"

namespace weft {
namespace {

constexpr double kByteANanosecond = 1e9;

LinkOptions links(int ranks) {
  LinkOptions options;
  options.ranks = ranks;
  options.bytes_per_second = kByteANanosecond;
  options.latency_seconds = 500e-9;
  options.quantum_bytes = 100;
  return options;
}

struct Seen {
  Time sent = kNever;
  Time arrived = kNever;
  int notices = 0;
};

// Runs the model event by event, as sim does.
std::map<std::uint32_t, Seen> run(LinkModel& model) {
  std::map<std::uint32_t, Seen> seen;
  while (model.next_event() != kNever) {
    const Time now = model.next_event();
    const auto notify = [&](std::uint32_t transfer, LinkNotice notice, Time at) {
      EXPECT_EQ(at, now);
      Seen& s = seen[transfer];
      ++s.notices;
      if (notice == LinkNotice::sent) {
        s.sent = at;
      } else {
        EXPECT_NE(s.sent, kNever) << "arrived before it was sent";
        s.arrived = at;
      }
    };
    model.advance(now, notify);
  }
  return seen;
}

TEST(LinkModel, ALoneMessageTakesLatencyPlusBytes) {
  for (const std::uint64_t bytes : {0u, 1u, 100u, 101u, 12345u}) {
    LinkModel model(links(2));
    const auto id = model.add(0, 1, bytes, 7ns);
    auto seen = run(model);
    EXPECT_EQ(seen[id].sent, 7ns + Time(bytes));
    EXPECT_EQ(seen[id].arrived, 7ns + 500ns + Time(bytes))
        << "cut-through: the bytes are paid once, not at both ports";
    EXPECT_EQ(seen[id].notices, 2);
  }
}

TEST(LinkModel, QuantaDoNotAddUpRoundingErrors) {
  LinkOptions options = links(2);
  options.bytes_per_second = 3e9;  // a quantum of 100 bytes takes 33.33 ns
  options.latency_seconds = 0;
  LinkModel model(options);
  const auto id = model.add(0, 1, 3'000'000, 0ns);
  EXPECT_EQ(run(model)[id].arrived, 1'000'000ns);
}

TEST(LinkModel, TwoSendersShareAReceivePort) {
  LinkModel model(links(3));
  const auto a = model.add(0, 2, 1000, 0ns);
  const auto b = model.add(1, 2, 1000, 0ns);
  auto seen = run(model);
  EXPECT_EQ(seen[a].sent, 1000ns);  // their own ports are free
  EXPECT_EQ(seen[b].sent, 1000ns);
  EXPECT_EQ(seen[a].arrived, 500ns + 1900ns);  // quanta alternate: a's last is the last but one
  EXPECT_EQ(seen[b].arrived, 500ns + 2000ns);
}

TEST(LinkModel, OneSenderTakesTurnsBetweenReceivers) {
  LinkModel model(links(3));
  const auto a = model.add(0, 1, 1000, 0ns);
  const auto b = model.add(0, 2, 300, 0ns);
  auto seen = run(model);
  EXPECT_EQ(seen[b].sent, 600ns);  // a b a b a b
  EXPECT_EQ(seen[b].arrived, 1100ns);
  EXPECT_EQ(seen[a].sent, 1300ns);
  EXPECT_EQ(seen[a].arrived, 1800ns);
}

// One with three peers and one with one take turns: each has half of the port until one has nothing left.
TEST(LinkModel, OperationsShareAPortHoweverManyPeersTheyHave) {
  LinkModel model(links(5));
  std::vector<std::uint32_t> many;
  for (const int peer : {1, 2, 3}) many.push_back(model.add(0, peer, 300, 0ns, 0ns, 7));
  const auto one = model.add(0, 4, 300, 0ns, 0ns, 9);
  auto seen = run(model);
  EXPECT_EQ(seen[one].sent, 600ns);  // 1 one 2 one 3 one 1 2 3 1 2 3
  EXPECT_EQ(seen[many[0]].sent, 1000ns);
  EXPECT_EQ(seen[many[2]].sent, 1200ns);
  // Control: without names each transfer is on its own.
  LinkModel apart(links(5));
  for (const int peer : {1, 2, 3}) apart.add(0, peer, 300, 0ns);
  const auto last = apart.add(0, 4, 300, 0ns);
  EXPECT_EQ(run(apart)[last].sent, 1200ns);
}

// What is cancelled, or may not begin yet, leaves the turns of the others as they are.
TEST(LinkModel, OperationsThatWaitOrEndLetOthersHaveTheirTurns) {
  LinkModel model(links(4));
  const auto nothing = [](std::uint32_t, LinkNotice, Time) {};
  const auto a = model.add(0, 1, 300, 0ns, 0ns, 7);
  const auto gone = model.add(0, 2, 300, 0ns, 0ns, 8);
  const auto late = model.add(0, 3, 100, 0ns, 5000ns, 9);
  const auto b = model.add(0, 2, 200, 0ns, 0ns, 7);
  model.advance(50ns, nothing);
  model.cancel(gone);
  auto seen = run(model);
  EXPECT_EQ(seen[b].sent, 400ns);  // a b a b a
  EXPECT_EQ(seen[a].sent, 500ns);
  EXPECT_EQ(seen[late].sent, 5100ns);
  EXPECT_EQ(seen[gone].notices, 0);
}

TEST(LinkModel, AShortMessageOvertakesALongOne) {
  LinkModel model(links(3));
  const auto nothing = [](std::uint32_t, LinkNotice, Time) {};
  const auto a = model.add(0, 1, 100'000, 0ns);
  model.advance(40'000ns, nothing);
  const auto b = model.add(0, 2, 100, 40'050ns);
  auto seen = run(model);
  EXPECT_EQ(seen[b].sent, 40'200ns);  // after the quantum that is under way, not after the message
  EXPECT_EQ(seen[a].sent, 100'100ns);
}

TEST(LinkModel, WhatHasNotBegunGivesWay) {
  const auto nothing = [](std::uint32_t, LinkNotice, Time) {};
  for (const bool gives_way : {true, false}) {
    LinkModel model(links(3));
    const auto begun = model.add(0, 1, 1000, 0ns);
    const auto waiting = model.add(0, 1, 300, 0ns);
    const auto other = model.add(1, 2, 300, 0ns);  // another rank's
    model.advance(50ns, nothing);
    const auto who = [&](std::uint32_t id) { return id == waiting; };
    if (gives_way) model.give_way(0, 5000ns, 50ns, who);
    const auto urgent = model.add(0, 2, 300, 50ns);
    const auto late = model.add(0, 1, 100, 60ns, gives_way ? 5000ns : 0ns);
    auto seen = run(model);
    EXPECT_EQ(seen[other].sent, 300ns);
    if (gives_way) {
      EXPECT_EQ(seen[urgent].sent, 600ns);  // begun urgent begun urgent begun urgent
      EXPECT_EQ(seen[begun].sent, 1300ns);  // what has begun goes on
      EXPECT_EQ(seen[late].sent, 5200ns);   // waiting late waiting waiting, from 5000 on
      EXPECT_EQ(seen[waiting].sent, 5400ns);
    } else {  // control: turns of four
      EXPECT_GT(seen[urgent].sent, 600ns);
      EXPECT_LT(seen[waiting].sent, 1300ns);
    }
  }
}

TEST(LinkModel, GivingWayEndsEarlyWhereItIsSaidSo) {
  LinkModel model(links(2));
  const auto nothing = [](std::uint32_t, LinkNotice, Time) {};
  const auto everybody = [](std::uint32_t) { return true; };
  const auto nobody = [](std::uint32_t) { return false; };
  const auto id = model.add(0, 1, 100, 0ns, 9000ns);
  EXPECT_EQ(model.earliest_arrival(id), 9600ns);
  model.give_way(0, kNever, 10ns, everybody);
  EXPECT_EQ(model.next_event(), 9000ns);  // of the first, which finds that it is to wait on
  model.advance(9500ns, nothing);
  EXPECT_EQ(model.next_event(), kNever) << "nothing is left to happen by itself";
  model.give_way(0, kNever, 20'000ns, nobody);
  EXPECT_EQ(model.earliest_arrival(id), 20'600ns);
  EXPECT_EQ(run(model)[id].sent, 20'100ns);
}

TEST(LinkModel, SharingIsFair) {
  LinkModel model(links(5));
  std::vector<std::uint32_t> ids;
  for (int to = 1; to < 5; ++to) ids.push_back(model.add(0, to, 10'000, 0ns));
  auto seen = run(model);
  for (std::size_t i = 0; i < ids.size(); ++i) EXPECT_EQ(seen[ids[i]].sent, 40'000ns - Time(100 * (3 - i)));
}

TEST(LinkModel, OverheadOccupiesTheSendPort) {
  LinkOptions options = links(3);
  options.overhead_seconds = 30e-9;
  LinkModel model(options);
  const auto a = model.add(0, 1, 200, 0ns);
  const auto b = model.add(0, 2, 100, 0ns);
  auto seen = run(model);
  EXPECT_EQ(seen[b].sent, 260ns);  // 30 + 100 of a, 30 + 100 of b
  EXPECT_EQ(seen[a].sent, 360ns);
  EXPECT_EQ(seen[a].arrived, 860ns);
}

TEST(LinkModel, BytesAreScaledAndFramesAreNot) {
  LinkOptions options = links(2);
  options.byte_scale = 1000;
  options.frame_bytes = 64;
  LinkModel model(options);
  const auto id = model.add(0, 1, 5, 0ns);
  EXPECT_EQ(run(model)[id].sent, 5064ns);
}

TEST(LinkModel, ARankReachesItselfAtOnce) {
  LinkOptions options = links(2);
  options.overhead_seconds = 1e-3;
  LinkModel model(options);
  const auto other = model.add(0, 1, 1000, 3ns);
  const auto own = model.add(0, 0, 1'000'000, 3ns);
  auto seen = run(model);
  EXPECT_EQ(seen[own].arrived, 3ns);
  EXPECT_EQ(seen[own].notices, 2);
  EXPECT_EQ(seen[other].arrived, 3ns + 1'000'000ns + 500ns + 1000ns);
}

TEST(LinkModel, NodesShareAScaleOutPort) {
  LinkOptions options = links(4);
  options.nodes = 2;
  options.scale_up_bytes_per_second = 10 * kByteANanosecond;
  options.scale_up_latency_seconds = 20e-9;
  LinkModel model(options);
  const auto a = model.add(0, 2, 1000, 0ns);
  const auto b = model.add(1, 3, 1000, 0ns);   // another pair of ranks, the same two ports
  const auto up = model.add(0, 1, 1000, 0ns);  // inside the node: not disturbed
  const auto back = model.add(3, 0, 1000, 0ns);
  auto seen = run(model);
  EXPECT_EQ(seen[a].sent, 1900ns);
  EXPECT_EQ(seen[b].sent, 2000ns);
  EXPECT_EQ(seen[b].arrived, 2500ns);
  EXPECT_EQ(seen[up].sent, 100ns);
  EXPECT_EQ(seen[up].arrived, 120ns);
  EXPECT_EQ(seen[back].arrived, 1500ns);  // ports are full duplex
}

TEST(LinkModel, RanksAreSplitEvenlyInRuns) {
  LinkOptions options;
  options.ranks = 7;
  options.nodes = 3;
  std::vector<int> of;
  for (int r = 0; r < 7; ++r) of.push_back(node_of(options, r));
  EXPECT_EQ(of, (std::vector<int>{0, 0, 0, 1, 1, 2, 2}));
}

TEST(LinkModel, LongTransfersMayTakeLargerQuanta) {
  LinkOptions options = links(2);
  LinkModel fine(options);
  options.max_quanta = 64;
  LinkModel coarse(options);
  const auto a = fine.add(0, 1, 1'000'000, 0ns);
  const auto b = coarse.add(0, 1, 1'000'000, 0ns);
  EXPECT_EQ(run(fine)[a].arrived, run(coarse)[b].arrived);
  EXPECT_GE(fine.events(), 10'000u);
  EXPECT_LE(coarse.events(), 70u);
}

TEST(LinkModel, ACancelledTransferFreesItsPort) {
  LinkModel model(links(3));
  const auto a = model.add(0, 1, 100'000, 0ns);
  const auto b = model.add(0, 2, 1000, 0ns);
  model.cancel(a);
  auto seen = run(model);
  EXPECT_FALSE(seen.contains(a));
  EXPECT_EQ(seen[b].sent, 1100ns);  // the quantum of a that was under way, then its own
}

TEST(LinkModel, ACancelledLastQuantumGivesNoNotice) {
  LinkModel model(links(2));
  const auto a = model.add(0, 1, 50, 0ns);
  model.cancel(a);
  EXPECT_TRUE(run(model).empty());
}

TEST(LinkModel, ATransferMayBeEnteredLate) {
  const auto nothing = [](std::uint32_t, LinkNotice, Time) {};
  LinkModel model(links(2));
  const auto first = model.add(0, 1, 1000, 0ns);
  model.advance(1070ns, nothing);  // somebody woke up 70 ns after the port was free
  const auto second = model.add(0, 1, 1000, 1000ns);
  EXPECT_EQ(model.earliest_arrival(second), 2500ns);
  std::map<std::uint32_t, Time> arrived;
  const auto note = [&](std::uint32_t transfer, LinkNotice notice, Time at) {
    if (notice == LinkNotice::arrived) arrived[transfer] = at;
  };
  model.advance(10'000ns, note);
  EXPECT_EQ(arrived[first], 1500ns);
  EXPECT_EQ(arrived[second], 2500ns) << "the rate over both must be the link's";
}

// Random traffic: every transfer gets its two notices, nothing is faster than its ports, ports are never idle
// while they have work, and a predicted arrival is never later than the real one.
TEST(LinkModel, RandomTrafficKeepsTheLaws) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    std::mt19937_64 random(seed);
    LinkOptions options = links(4);
    options.nodes = seed % 2 == 0 ? 0 : 2;
    options.scale_up_bytes_per_second = 4 * kByteANanosecond;
    options.overhead_seconds = seed % 3 == 0 ? 10e-9 : 0;
    LinkModel model(options);
    std::map<std::uint32_t, std::pair<std::uint64_t, Time>> live;  // bytes, prediction
    std::uint64_t finished = 0;
    std::uint64_t sent_by_rank_0 = 0;
    Time last_of_rank_0{0};
    constexpr int kTransfers = 300;
    const auto notify = [&](std::uint32_t transfer, LinkNotice notice, Time at) {
      ASSERT_TRUE(live.contains(transfer));
      if (notice == LinkNotice::sent) return;
      EXPECT_GE(at, live[transfer].second) << "seed " << seed;
      live.erase(transfer);
      ++finished;
    };
    Time now{0};
    for (int i = 0; i < kTransfers; ++i) {
      if (random() % 2 == 0 && model.next_event() != kNever) now = model.next_event();
      model.advance(now, notify);
      const int from = static_cast<int>(random() % 4);
      const int to = static_cast<int>(random() % 4);
      const std::uint64_t bytes = random() % 3 == 0 ? random() % 50 : random() % 5000;
      const auto id = model.add(from, to, bytes, now);
      ASSERT_FALSE(live.contains(id));
      live[id] = {bytes, now};
      if (from == 0 && to != 0 && options.nodes == 0) sent_by_rank_0 += bytes;
      for (auto& [transfer, state] : live) {
        const Time bound = model.earliest_arrival(transfer);
        EXPECT_GE(bound, state.second) << "a prediction became earlier, seed " << seed;
        state.second = bound;
      }
    }
    while (model.next_event() != kNever) {
      now = model.next_event();
      model.advance(now, notify);
      last_of_rank_0 = now;
    }
    EXPECT_EQ(finished, static_cast<std::uint64_t>(kTransfers));
    EXPECT_GE(last_of_rank_0.count(), static_cast<std::int64_t>(sent_by_rank_0));
  }
}

TEST(LinkModel, AMillionShortTransfersTakeSeconds) {
  LinkOptions options = links(1024);
  LinkModel model(options);
  std::uint64_t notices = 0;
  const auto notify = [&](std::uint32_t, LinkNotice, Time) { ++notices; };
  const auto begin = std::chrono::steady_clock::now();
  for (int round = 1; round < 1001; ++round) {
    for (int r = 0; r < 1024; ++r) model.add(r, (r + round) % 1024, 64, Time(round * 64));
    model.advance(Time(round * 64), notify);
  }
  model.advance(1s, notify);
  const double taken = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  EXPECT_EQ(notices, 2u * 1000 * 1024);
  RecordProperty("seconds", std::to_string(taken));
  EXPECT_LT(taken, kInstrumented ? 60 : 5);
}

TEST(LinkModel, RefusesOptionsThatMakeNoSense) {
  const auto refused = [](auto change) {
    LinkOptions options = links(4);
    change(options);
    EXPECT_THROW(LinkModel{options}, UsageError);
  };
  const double nan = std::numeric_limits<double>::quiet_NaN();
  refused([](LinkOptions& o) { o.ranks = 0; });
  refused([](LinkOptions& o) { o.nodes = 5; });
  refused([](LinkOptions& o) { o.nodes = -1; });
  refused([](LinkOptions& o) { o.bytes_per_second = 0; });
  refused([&](LinkOptions& o) { o.bytes_per_second = nan; });
  refused([](LinkOptions& o) { o.scale_up_bytes_per_second = -1; });
  refused([&](LinkOptions& o) { o.latency_seconds = nan; });
  refused([](LinkOptions& o) { o.latency_seconds = -1e-6; });
  refused([](LinkOptions& o) { o.overhead_seconds = LinkOptions::kUnlimited; });
  refused([](LinkOptions& o) { o.byte_scale = 0; });
  refused([](LinkOptions& o) { o.byte_scale = LinkOptions::kUnlimited; });
  refused([](LinkOptions& o) { o.frame_bytes = -1; });
  refused([](LinkOptions& o) { o.quantum_bytes = 0; });
}

TEST(LinkSpec, ReadsWhatPeopleWrite) {
  const auto is = [](std::string_view text, double rate, double latency) {
    const LinkSpec spec = parse_link(text);
    EXPECT_DOUBLE_EQ(spec.bytes_per_second, rate) << text;
    EXPECT_DOUBLE_EQ(spec.latency_seconds, latency) << text;
  };
  is("1gbit,50us", 125e6, 50e-6);
  is("100mbit", 12.5e6, 0);
  is("10Gbit,5us", 1.25e9, 5e-6);
  is("2.5gbit,1ms", 312.5e6, 1e-3);
  is("2GB,10ns", 2e9, 10e-9);
  is("800kbit,0.5s", 1e5, 0.5);
  is("8bit,0us", 1, 0);
  is("1tbit", 125e9, 0);
}

TEST(LinkSpec, RefusesTheRestAndSaysWhatToWrite) {
  for (const char* text : {"",           ",",           ",50us",      "gbit",        "1",         "1 gbit",
                           "0gbit",      "-1gbit",      "+1gbit",     "nangbit",     "infgbit",   "1e3mbit",
                           "1..5gbit",   "1gb",         "1gbps",      "1gbit,",      "1gbit,50",  "1gbit,us",
                           "1gbit,-5us", "1gbit,nanus", "1gbit,5us,", "1gbit,5us,3", "1gbit;5us", "0x10mbit",
                           "1gbit,1h",   "1gbit,3600s", ".gbit",      "1gbit 50us"}) {
    try {
      parse_link(text);
      ADD_FAILURE() << "accepted '" << text << "'";
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find("'" + std::string(text) + "'"), std::string::npos)
          << error.what();
      EXPECT_NE(std::string(error.what()).find("1gbit,50us"), std::string::npos) << error.what();
    }
  }
}

TEST(LinkSpec, InsideANodeIsARateOrSoManyTimesTheLink) {
  const LinkSpec link = parse_link("100mbit,50us");
  EXPECT_DOUBLE_EQ(parse_scale_up("2gbit", link), 250e6);
  EXPECT_DOUBLE_EQ(parse_scale_up("10x", link), 125e6);
  EXPECT_DOUBLE_EQ(parse_scale_up("0.5x", link), 6.25e6);
  for (const char* text : {"x", "0x", "-1x", "10xx", "10 x", "1gbitx", "nanx", "10"})
    EXPECT_THROW(parse_scale_up(text, link), UsageError) << text;
}

TEST(FlowOrder, OnlyTheFirstOfAFlowMayGo) {
  FlowOrder order;
  FlowNode a, b, c, other;
  a.key = b.key = c.key = {1, {.slot = 5}};
  other.key = {1, {.slot = 6}};
  for (FlowNode* node : {&a, &b, &c, &other}) order.enter(*node);
  EXPECT_TRUE(FlowOrder::is_first(a));
  EXPECT_FALSE(FlowOrder::is_first(b));
  EXPECT_TRUE(FlowOrder::is_first(other));
  EXPECT_EQ(order.leave(b), &c);  // from the middle: c now waits for a
  EXPECT_FALSE(FlowOrder::is_first(c));
  EXPECT_EQ(order.leave(a), &c);
  EXPECT_TRUE(FlowOrder::is_first(c));
  EXPECT_EQ(order.leave(c), nullptr);
  order.enter(a);
  order.enter(b);
  EXPECT_EQ(order.leave(b), nullptr);  // the last: a is the last again
  order.enter(c);
  EXPECT_FALSE(FlowOrder::is_first(c));
  EXPECT_EQ(order.leave(a), &c);
  EXPECT_EQ(order.leave(c), nullptr);
  EXPECT_EQ(order.leave(other), nullptr);
}

}  // namespace
}  // namespace weft
