// What the mpi transport costs: processor time while nothing happens, allocations while something does.
#include <sys/resource.h>

#include <cstdio>
#include <thread>

#include "counted_new.h"
#include "mpi/mpi_fixture.h"

namespace weft {
namespace {

double thread_seconds() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  const auto of = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return of(usage.ru_utime) + of(usage.ru_stime);
}

// Share of a core that poll and wait take for `length` of wall time.
double idle_share(Transport& transport, Time length) {
  const Time end = transport.clock().now() + length;
  const double before = thread_seconds();
  while (transport.clock().now() < end) {
    if (!transport.poll()) transport.wait(end);
  }
  return (thread_seconds() - before) / seconds(length);
}

Task<void> measure_waiting(Comm comm, Transport* transport, double* share) {
  Bytes in(10);
  const Transfer never = comm.recv(comm.before(1), 0, in);
  *share = idle_share(*transport, 1s);
  co_return;
}

TEST_F(Mpi, IdleRanksSleep) {
  const double idle = idle_share(*shared(), 1s);
  double waiting = 0;
  run(*shared(), [&](Comm comm) { return measure_waiting(comm, shared().get(), &waiting); }, 11);
  std::printf("rank %d: idle %.2f %% of a core, waiting %.2f %%\n", rank(), 100 * idle, 100 * waiting);
  EXPECT_LT(idle, 0.02);
  EXPECT_LT(waiting, 0.05);
}

TEST_F(Mpi, WakeEndsAWait) {
  std::thread waker([] {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    shared()->wake();
  });
  for (int i = 0; i < 50; ++i)
    shared()->wait(shared()->clock().now() + 1ms);  // wake() never hurts, whenever it comes
  waker.join();
}

// Ping-pong: its allocations once warm, and its time.
Task<void> ping_pong(Comm comm, int rounds, std::size_t length, std::uint64_t* allocations,
                     double* half_round_trip) {
  if (comm.rank() > 1) co_return;
  Bytes out(length);
  Bytes in(length);
  const int peer = 1 - comm.rank();
  Time started{};
  for (int i = -20; i < rounds; ++i) {
    if (i == 0) {
      *allocations = testing::allocations();
      started = comm.now();
    }
    const auto hop = static_cast<std::uint32_t>(i + 20);
    Transfer received = comm.recv(peer, hop, in);
    if (comm.rank() == 0) {
      Transfer sent = comm.send(peer, hop, view(out));
      co_await received;
      co_await sent;
    } else {
      co_await received;
      Transfer sent = comm.send(peer, hop, view(out));
      co_await sent;
    }
  }
  *allocations = testing::allocations() - *allocations;
  *half_round_trip = seconds(comm.now() - started) / rounds / 2;
}

TEST_F(Mpi, SteadyTrafficAllocatesNothing) {
  if (!testing::kCountsAllocations) GTEST_SKIP() << "this build cannot count allocations";
  for (const std::size_t length : {std::size_t{8}, std::size_t{1} << 20}) {
    std::uint64_t allocations = 0;
    double half = 0;
    const int rounds = length > 1000 ? 100 : 1000;
    run(
        *shared(), [&](Comm comm) { return ping_pong(comm, rounds, length, &allocations, &half); }, 12,
        length > 1000 ? 1 : 0);
    EXPECT_EQ(allocations, 0u);
    if (rank() == 0) std::printf("%zu bytes: half round trip %.1f us\n", length, 1e6 * half);
  }
}

}  // namespace
}  // namespace weft
