// What goes wrong in the simulator on purpose: deaths, goodbyes, cancelled transfers; by seed.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "sim/sim_job.h"
#include "transports/endpoint.h"
#include "weft/error.h"

namespace weft {
namespace {

using namespace sim_test;  // NOLINT(google-build-using-namespace): this file's fixture

void expect_lost(BareRank& rank, Transport& transport, int dead) {
  ASSERT_TRUE(rank.done());
  ASSERT_TRUE(transport.failure());
  try {
    rank.rethrow();
    FAIL() << "no error";
  } catch (const TransportError& error) {
    EXPECT_EQ(error.kind(), TransportError::Kind::peer_lost);
    EXPECT_EQ(error.peer(), dead) << error.what();
    EXPECT_NE(std::string(error.what()).find("rank " + std::to_string(dead)), std::string::npos)
        << error.what();
  }
}

TEST(Sim, ADeathIsNamedOnEverySurvivor) {
  for (const bool by_time : {true, false}) {
    for (const std::size_t eager_limit : {std::size_t{0}, std::size_t{1} << 20}) {
      for (const double jitter : {0.0, 1e-4}) {
        SimOptions options = world_of(7);
        options.eager_limit = eager_limit;
        options.jitter_seconds = jitter;
        options.detection_seconds = 2e-3;
        SimDeath death{.rank = 3};
        if (by_time)
          death.at = 10ms;
        else
          death.at_message = 17;
        options.deaths.push_back(death);
        Job job(options);
        job.start(exchange_for_ever);
        job.world.run();
        for (int r = 0; r < 7; ++r) {
          if (r != 3) expect_lost(*job.ranks[static_cast<std::size_t>(r)], job.world.transport(r), 3);
        }
        if (by_time) {
          EXPECT_EQ(job.world.now(), 12ms) << "detection takes its time";
          EXPECT_FALSE(job.ranks[3]->done()) << "the dead do not go on";
        } else {
          EXPECT_EQ(job.world.transport(3).counters().messages_sent, 17u);
        }
      }
    }
  }
}

TEST(Sim, WhatLeftBeforeADeathArrivesAndWhatDidNotDoesNot) {
  SimOptions options = world_of(2);
  options.deaths.push_back({.rank = 0, .at = 2ms});
  Job job(options);
  std::vector<std::byte> first = bytes_of(1'999'000, 1), second(2'000), got(1'999'000), never(2'000);
  bool got_first = false;
  job.start([&](Comm comm) -> Task<void> {
    if (comm.rank() == 0) {
      Transfer a = comm.send(1, 0, view(first));
      co_await a;
      Transfer b = comm.send(1, 1, view(second));  // a third of it never leaves
      co_await b;
    } else {
      Transfer a = comm.recv(0, 0, got);
      Transfer b = comm.recv(0, 1, never);
      co_await a;
      got_first = true;
      co_await b;
    }
  });
  job.world.run();
  EXPECT_TRUE(got_first);
  EXPECT_EQ(got, first);
  expect_lost(*job.ranks[1], job.world.transport(1), 0);
  EXPECT_EQ(job.world.now(), 3ms);
}

TEST(Sim, AGoodbyeConcernsOnlyThoseWhoNeedTheRank) {
  for (const std::size_t eager_limit : {std::size_t{0}, std::size_t{1} << 20}) {
    SimOptions options = world_of(3);
    options.eager_limit = eager_limit;
    Job job(options);
    std::vector<std::byte> from = bytes_of(50, 9), to(50), other(50);
    int caught = 0;
    job.run([&](Comm comm) -> Task<void> {
      if (comm.rank() == 0) {
        Transfer sent = comm.send(1, 0, view(from));
        co_await sent;
        job.world.transport(0).close("");
        Transfer refused = comm.send(1, 5, view(from));
        try {
          co_await refused;
        } catch (const TransportError& error) {
          caught += error.kind() == TransportError::Kind::closed ? 1 : 100;
        }
        co_return;
      }
      if (comm.rank() == 1) {
        Transfer waiting = comm.recv(0, 7, other);  // nobody will send this
        Transfer wanted = comm.recv(0, 0, to);      // this was sent before the goodbye
        co_await wanted;
        try {
          co_await waiting;
        } catch (const TransportError& error) {
          caught += error.kind() == TransportError::Kind::peer_lost && error.peer() == 0 ? 10 : 100;
        }
      }
      co_await comm.sleep_until(1ms);
      Transfer to_peer = comm.send(3 - comm.rank(), 1, view(from));  // the others go on
      Transfer from_peer = comm.recv(3 - comm.rank(), 1, comm.rank() == 1 ? other : to);
      co_await from_peer;
      co_await to_peer;
    });
    EXPECT_EQ(to, from);
    EXPECT_EQ(caught, 11);
    EXPECT_FALSE(job.world.transport(1).failure());
  }
}

TEST(Sim, ACloseWithAReasonStopsEverybodyAndIsQuoted) {
  Job job(world_of(4));
  job.start([&](Comm comm) -> Task<void> {
    if (comm.rank() != 2) {
      co_await exchange_for_ever(comm);
    } else {
      co_await comm.sleep_until(1ms);
      job.world.transport(2).close("out of memory");
    }
  });
  job.world.run();
  for (const int r : {0, 1, 3}) {
    expect_lost(*job.ranks[static_cast<std::size_t>(r)], job.world.transport(r), 2);
    try {
      std::rethrow_exception(job.world.transport(r).failure());
    } catch (const TransportError& error) {
      EXPECT_NE(std::string(error.what()).find("out of memory"), std::string::npos);
    }
  }
  EXPECT_EQ(job.world.now(), 1ms + 5us);
}

// Transfers that are dropped in every state let go of their memory (a sanitizer would see it) and leave the
// rest alone.
TEST(Sim, CancelledTransfersLetGo) {
  for (const std::size_t eager_limit : {std::size_t{0}, std::size_t{100}, std::size_t{1} << 20}) {
    for (int state = 0; state < 6; ++state) {
      SimOptions options = world_of(2);
      options.eager_limit = eager_limit;
      Job job(options);
      std::vector<std::byte> good = bytes_of(500, 4), got(500);
      job.run([&](Comm comm) -> Task<void> {
        auto memory = std::make_unique<std::vector<std::byte>>(1000);
        const Time when = state == 0 ? 0us : Time(state * 400);  // before, during and after the transfer
        {
          Transfer dropped = comm.rank() == 0 ? comm.send(1, 0, view(*memory))
                             : state % 2 == 0 ? comm.recv(0, 0, *memory)
                                              : Transfer();
          co_await comm.sleep_until(when);
        }
        memory.reset();
        co_await comm.sleep_until(1ms);
        Transfer transfer = comm.rank() == 0 ? comm.send(1, 1, view(good)) : comm.recv(0, 1, got);
        co_await transfer;
      });
      EXPECT_EQ(got, good);
    }
  }
}

// Anything may happen to a transfer on the way: it is dropped, its peer dies, closes, or never answers. Every
// rank that lives gets to its end or to an error that names a rank which is gone, and the same seed ends the
// same way.
Task<void> lead_a_random_life(Comm comm, std::uint64_t seed, bool may_close) {
  std::uint64_t drawn = mix(seed ^ static_cast<std::uint64_t>(comm.rank()));
  const auto draw = [&](std::uint64_t n) { return (drawn = mix(drawn)) % n; };
  std::vector<std::unique_ptr<std::vector<std::byte>>> memory;
  std::vector<Transfer> transfers;
  for (int i = 0; i < 40; ++i) {
    const int peer = static_cast<int>(draw(static_cast<std::uint64_t>(comm.size())));
    const auto hop = static_cast<std::uint32_t>(draw(2));
    switch (draw(6)) {
      case 0:
      case 1:
        memory.push_back(std::make_unique<std::vector<std::byte>>(draw(2) == 0 ? 10 : 5000));
        transfers.push_back(comm.send(peer, hop, view(*memory.back())));
        break;
      case 2:
      case 3:
        transfers.push_back(comm.recv_any(peer, hop, 8192));
        break;
      case 4:
        co_await comm.sleep_until(comm.now() + Time(draw(20'000)));
        break;
      default:
        if (transfers.empty()) break;
        transfers.erase(transfers.begin() + static_cast<std::ptrdiff_t>(draw(transfers.size())));
        if (draw(2) == 0) break;
        if (!transfers.empty() && transfers.back().done()) {
          Transfer& last = transfers.back();
          co_await last;
        }
    }
  }
  if (may_close && draw(4) == 0) comm.endpoint().transport().close(draw(2) == 0 ? "" : "bored");
  co_await comm.sleep_until(comm.now() + Time(draw(100'000)));
}

TEST(Sim, RandomLivesAndDeaths) {
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    std::uint64_t hashes[2];
    for (std::uint64_t& hash : hashes) {
      SimOptions options = world_of(5);
      options.seed = seed;
      options.link.quantum_bytes = 512;
      options.eager_limit = std::vector<std::size_t>{0, 100, 1 << 20}[seed % 3];
      options.jitter_seconds = seed % 2 == 0 ? 0 : 5e-6;
      options.detection_seconds = 20e-6;
      if (seed % 5 == 1) options.deaths.push_back({.rank = 1, .at = Time(mix(seed) % 200'000)});
      if (seed % 5 == 2) options.deaths.push_back({.rank = 2, .at_message = mix(seed) % 12});
      Job job(options);
      job.start([&](Comm comm) { return lead_a_random_life(comm, seed, seed % 5 == 3); });
      job.world.run();
      for (int r = 0; r < 5; ++r) {
        BareRank& rank = *job.ranks[static_cast<std::size_t>(r)];
        const bool dead = (seed % 5 == 1 && r == 1) || (seed % 5 == 2 && r == 2);
        if (dead) continue;
        ASSERT_TRUE(rank.done()) << "seed " << seed << " rank " << r;
        try {
          rank.rethrow();
        } catch (const TransportError& error) {
          EXPECT_NE(seed % 5, 0u) << error.what();
        }
      }
      hash = job.world.event_hash();
    }
    EXPECT_EQ(hashes[0], hashes[1]) << "seed " << seed;
  }
}

}  // namespace
}  // namespace weft
