// What the files of the mpi suite share. Every rank runs every test; a rank that waits in vain fails after a
// deadline.
#pragma once

#include <gtest/gtest.h>
#define OMPI_SKIP_MPICXX 1
#include <mpi.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "transports/bare_rank.h"
#include "transports/mpi.h"
#include "weft/error.h"

namespace weft {

using Bytes = std::vector<std::byte>;

inline std::unique_ptr<Transport>& shared() {  // owns MPI: opened first, destroyed last
  static std::unique_ptr<Transport> transport;
  return transport;
}

// A transport with short bounces and tiny pieces, on communicators of its own.
inline std::unique_ptr<Transport> open_tiny() {
  return open_mpi({.job = 7, .max_message = std::size_t{64} << 20, .bounce_bytes = 100, .piece_limit = 1000});
}

inline std::span<const std::byte> view(const Bytes& bytes) { return bytes; }

inline Bytes pattern(std::size_t length, std::uint64_t seed) {
  Bytes bytes(length);
  for (std::size_t i = 0; i < length; ++i)
    bytes[i] = static_cast<std::byte>(mix(seed * 1000003 + i / 8) >> (8 * (i % 8)));
  return bytes;
}

// Runs one operation on this rank; a TimeoutError after `limit`.
inline void run(Transport& transport, std::function<Task<void>(Comm)> body, std::uint32_t slot,
                std::uint32_t step = 0, Time limit = 15s) {
  BareRank rank(transport);
  rank.start(std::move(body), slot, step);
  const Time deadline = transport.clock().now() + limit;
  bool late = false;
  while (!rank.done()) {
    if (rank.poll() || rank.done()) continue;
    transport.wait(std::min(rank.next_deadline(), deadline));
    if (transport.clock().now() >= deadline && !std::exchange(late, true)) {
      rank.operation().fail(
          std::make_exception_ptr(TimeoutError(-1, seconds(limit), "the test's deadline passed")));
    }
  }
  rank.rethrow();
}

class Mpi : public ::testing::Test {
 protected:
  void SetUp() override { MPI_Barrier(MPI_COMM_WORLD); }
  void TearDown() override { MPI_Barrier(MPI_COMM_WORLD); }
  static int rank() { return shared()->rank(); }
  static int size() { return shared()->size(); }
};

}  // namespace weft
