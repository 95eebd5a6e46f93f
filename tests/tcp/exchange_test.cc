// What a tcp transport promises when nothing goes wrong: every length arrives, order per identity,
// independence of identities, flow control that neither loses nor blocks, priority.
#include <gmock/gmock.h>

#include <algorithm>

#include "base/worker_pool.h"
#include "tcp/tcp_job.h"

namespace weft {
namespace {

using testing::job_options;
using testing::pattern;
using testing::run_ranks;
using testing::view;

Task<void> swap_lengths(Comm comm, std::vector<std::size_t> lengths) {
  for (std::uint32_t hop = 0; hop < lengths.size(); ++hop) {
    for (int gap = 0; gap < comm.size(); ++gap) {  // 0: to itself
      const int to = comm.after(gap);
      const int from = comm.before(gap);
      const std::vector<std::byte> mine =
          pattern(lengths[hop], static_cast<unsigned>(comm.rank() * 100 + to));
      std::vector<std::byte> theirs(lengths[hop]);
      Transfer received = comm.recv(from, hop, theirs);
      Transfer sent = comm.send(to, hop, mine);
      co_await received;
      co_await sent;
      EXPECT_EQ(theirs, pattern(lengths[hop], static_cast<unsigned>(from * 100 + comm.rank())));
    }
  }
}

class Exchange : public ::testing::TestWithParam<std::tuple<int, std::size_t, bool>> {};

TEST_P(Exchange, EveryLengthArrives) {
  const auto [size, eager_limit, checksum] = GetParam();
  TcpOptions options = job_options(size);
  options.eager_limit = eager_limit;
  options.checksum = checksum;
  const std::size_t edge = 64 << 10;
  run_ranks(options, [&](Transport& transport, BareRank& bare) {
    bare.start([&](Comm comm) {
      return swap_lengths(comm, {0, 1, 63, 64, 65, edge - 1, edge, edge + 1, 0, 3 << 20, 5, (2 << 20) + 7});
    });
    bare.run();
    EXPECT_EQ(transport.failure(), nullptr);
  });
}
INSTANTIATE_TEST_SUITE_P(Sizes, Exchange,
                         ::testing::Values(std::tuple(1, 64 << 10, true), std::tuple(2, 64 << 10, true),
                                           std::tuple(2, 0, true), std::tuple(3, 64 << 10, false),
                                           std::tuple(5, 1 << 20, true)));

Task<void> every_sink(Comm comm) {
  const int peer = 1 - comm.rank();
  const std::vector<std::size_t> lengths = {0, 10, 70'000, 3 << 20};
  for (std::uint32_t hop = 0; hop < lengths.size(); ++hop) {
    const std::vector<std::byte> mine = pattern(lengths[hop], hop);
    std::vector<std::byte> consumed;
    auto take = [&](std::span<const std::byte> bytes) { consumed.assign(bytes.begin(), bytes.end()); };
    Transfer any = comm.recv_any(peer, 3 * hop, 4 << 20);
    Transfer with = comm.recv_with(peer, 3 * hop + 1, 4 << 20, take);
    Transfer first = comm.send(peer, 3 * hop, mine);
    Transfer second = comm.send(peer, 3 * hop + 1, mine);
    co_await any;
    co_await with;
    co_await first;
    co_await second;
    const Buffer kept = any.take();
    EXPECT_EQ(std::vector(kept.span().begin(), kept.span().end()), mine);
    EXPECT_EQ(consumed, mine);
    // Arrived before they are wanted: hop 3h+2 is sent first and received after a round trip.
    std::vector<std::byte> sync(1);
    Transfer early = comm.send(peer, 3 * hop + 2, mine);
    Transfer ping = comm.send(peer, 1000 + hop, view(sync));
    Transfer pong = comm.recv(peer, 1000 + hop, sync);
    co_await ping;
    co_await pong;
    Transfer late = comm.recv_any(peer, 3 * hop + 2, 4 << 20);
    co_await late;
    co_await early;
    const Buffer got = late.take();
    EXPECT_EQ(std::vector(got.span().begin(), got.span().end()), mine);
  }
}

TEST(Exchange, EverySinkGetsItsBytes) {
  WorkerPool pool(2);
  for (WorkerPool* workers : {static_cast<WorkerPool*>(nullptr), &pool}) {
    run_ranks(job_options(2), [&](Transport& transport, BareRank&) {
      BareRank bare(transport, workers);
      bare.start([](Comm comm) { return every_sink(comm); });
      bare.run();
    });
  }
}

// Rank 0 sends far more than the credit before rank 1 receives anything, short and long mixed, all of one
// identity.
Task<void> flood(Comm comm, int messages) {
  const auto length = [](int i) {
    return static_cast<std::size_t>(i % 7 == 3 ? 100'000 : 1 + i * 37 % 5000);
  };
  std::vector<std::vector<std::byte>> data;
  for (int i = 0; i < messages; ++i) data.push_back(pattern(length(i), static_cast<unsigned>(i)));
  std::vector<std::byte> token(1);
  if (comm.rank() == 0) {
    std::vector<Transfer> sends;
    for (const auto& message : data) sends.push_back(comm.send(1, 0, message));
    Transfer go = comm.send(1, 1, view(token));  // another identity: overtakes what waits for credit
    co_await go;
    for (Transfer& send : sends) co_await send;
  } else {
    Transfer go = comm.recv(0, 1, token);
    co_await go;
    for (int i = 0; i < messages; ++i) {
      Transfer next = comm.recv_any(0, 0, 1 << 20);
      co_await next;
      const Buffer got = next.take();
      EXPECT_EQ(std::vector(got.span().begin(), got.span().end()), data[static_cast<std::size_t>(i)])
          << "message " << i;
    }
  }
}

TEST(Exchange, MoreThanTheCreditIsNeitherLostNorReorderedNorBlocked) {
  for (const std::size_t credit : {8 << 10, 64 << 10, 4 << 20}) {
    TcpOptions options = job_options(2);
    options.credit = credit;
    options.eager_limit = std::min<std::size_t>(options.eager_limit, credit);
    run_ranks(options, [&](Transport&, BareRank& bare) {
      bare.start([](Comm comm) { return flood(comm, 400); });
      bare.run();
    });
  }
}

// What waits at the receiver is bounded by the credit, however much is sent.
TEST(Exchange, UnexpectedBytesAreBounded) {
  TcpOptions options = job_options(2);
  options.credit = 256 << 10;
  run_ranks(options, [&](Transport& transport, BareRank& bare) {
    const int messages = 200;
    const std::vector<std::byte> block = pattern(32 << 10, 1);
    std::uint64_t received_early = 0;
    bare.start([&](Comm comm) -> Task<void> {
      std::vector<std::byte> token(1);
      if (comm.rank() == 0) {
        std::vector<Transfer> sends;
        for (int i = 0; i < messages; ++i) sends.push_back(comm.send(1, 0, block));
        Transfer go = comm.send(1, 1, view(token));
        co_await go;
        for (Transfer& send : sends) co_await send;
      } else {
        Transfer go = comm.recv(0, 1, token);
        co_await go;
        received_early = transport.counters().payload_bytes_received;
        std::vector<std::byte> into(block.size());
        for (int i = 0; i < messages; ++i) {
          Transfer next = comm.recv(0, 0, into);
          co_await next;
        }
      }
    });
    bare.run();
    if (transport.rank() == 1) {
      EXPECT_GT(received_early, 0u);  // control: some came unasked
      EXPECT_LE(received_early, options.credit);
      EXPECT_EQ(transport.counters().payload_bytes_received, messages * block.size() + 1);
    }
  });
}

// Identities are independent: received in the opposite order of sending, by hops.
TEST(Exchange, IdentitiesAreIndependent) {
  for (const std::size_t eager_limit : {std::size_t{0}, std::size_t{64 << 10}}) {
    TcpOptions options = job_options(2);
    options.eager_limit = eager_limit;
    run_ranks(options, [&](Transport&, BareRank& bare) {
      bare.start([](Comm comm) -> Task<void> {
        const std::uint32_t hops = 50;
        std::vector<std::vector<std::byte>> out;
        std::vector<std::vector<std::byte>> in;
        for (std::uint32_t hop = 0; hop < hops; ++hop) {
          out.push_back(pattern(hop * 3000, hop));
          in.emplace_back(hop * 3000);
        }
        std::vector<Transfer> transfers;
        for (std::uint32_t hop = 0; hop < hops; ++hop)
          transfers.push_back(comm.send(1 - comm.rank(), hop, view(out[hop])));
        for (std::uint32_t hop = hops; hop-- > 0;) {
          Transfer next = comm.recv(1 - comm.rank(), hop, in[hop]);
          co_await next;
          EXPECT_EQ(in[hop], out[hop]);
        }
        for (Transfer& transfer : transfers) co_await transfer;
      });
      bare.run();
    });
  }
}

TEST(Exchange, CountersCountPayloadAndFrames) {
  run_ranks(job_options(2), [&](Transport& transport, BareRank& bare) {
    const TrafficCounters before = transport.counters();
    EXPECT_GT(before.wire_bytes_sent, 0u);  // the handshake
    EXPECT_EQ(before.payload_bytes_sent, 0u);
    bare.start([](Comm comm) { return swap_lengths(comm, {1000}); });
    bare.run();
    const TrafficCounters after = transport.counters();
    EXPECT_EQ(after.messages_sent, 1u);
    EXPECT_EQ(after.payload_bytes_sent, 1000u);
    EXPECT_EQ(after.payload_bytes_received, 1000u);
    EXPECT_GE(after.wire_bytes_sent - before.wire_bytes_sent, 1064u);
    EXPECT_LT(after.wire_bytes_sent - before.wire_bytes_sent, 1064u + 20 * 64u);
  });
}

}  // namespace
}  // namespace weft
