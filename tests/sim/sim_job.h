// One program on every rank of a simulated world, without an engine.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "transports/bare_rank.h"
#include "transports/sim.h"

namespace weft::sim_test {

using Program = std::function<Task<void>(Comm)>;

inline SimOptions world_of(int ranks, double bytes_per_second = 1e9, double latency_seconds = 5e-6) {
  SimOptions options;
  options.link.ranks = ranks;
  options.link.bytes_per_second = bytes_per_second;
  options.link.latency_seconds = latency_seconds;
  return options;
}

// One program on every rank.
class Job {
 public:
  explicit Job(SimOptions options) : world(std::move(options)) {
    for (int r = 0; r < world.size(); ++r) {
      ranks.push_back(std::make_unique<BareRank>(world.transport(r)));
      world.attach(r, *ranks.back());
    }
  }
  void start(const Program& program) {
    for (const auto& rank : ranks) rank->start(program);
  }
  // All of them to their end; rethrows what went wrong.
  void run(const Program& program) {
    start(program);
    world.run();
    for (const auto& rank : ranks) {
      ASSERT_TRUE(rank->done()) << "deadlock";
      rank->rethrow();
    }
  }

  SimWorld world;
  std::vector<std::unique_ptr<BareRank>> ranks;
};

inline std::span<const std::byte> view(const std::vector<std::byte>& bytes) { return bytes; }

inline std::vector<std::byte> bytes_of(std::size_t n, unsigned first) {
  std::vector<std::byte> out(n);
  for (std::size_t i = 0; i < n; ++i) out[i] = static_cast<std::byte>(first + 7 * i);
  return out;
}

// Everybody exchanges with everybody, for ever.
inline Task<void> exchange_for_ever(Comm comm) {
  std::vector<std::byte> mine(100), theirs(100);
  for (std::uint32_t hop = 0;; ++hop) {
    const int gap = 1 + static_cast<int>(hop) % (comm.size() - 1);
    Transfer received = comm.recv(comm.before(gap), hop, theirs);
    Transfer sent = comm.send(comm.after(gap), hop, view(mine));
    co_await received;
    co_await sent;
  }
}

}  // namespace weft::sim_test
