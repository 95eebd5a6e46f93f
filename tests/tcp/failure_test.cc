// How a tcp job ends when something goes wrong: killed, stopped, leaving and corrupting peers.
#include <gmock/gmock.h>

#include <algorithm>
#include <atomic>
#include <barrier>

#include "tcp/forked.h"
#include "weft/config.h"

namespace weft {
namespace {

using testing::drive;
using testing::ForkedRanks;
using ::testing::HasSubstr;
using testing::job_options;
using testing::pattern;
using testing::Report;
using testing::run_ranks;
using testing::run_ranks_caught;
using testing::text_of;
using testing::view;

// A receive that nobody will ever answer, from each of the others.
Task<void> wait_for_ever(Comm comm) {
  std::vector<std::byte> into(8);
  Transfer received = comm.recv(comm.after(1), 99, into);
  co_await received;
}

void wait_until_it_fails(const TcpOptions& options, const ForkedRanks::Say& say) {
  const std::unique_ptr<Transport> transport = connect_tcp(options);
  BareRank bare(*transport);
  bare.start([](Comm comm) { return wait_for_ever(comm); });
  say("ready");
  bare.run();  // throws
}

// Seconds from the signal until the last survivor knew, and what they said.
struct Noticed {
  double seconds = 0;
  std::vector<std::string> texts;
};

Noticed notice(int size, int victim, int signal) {
  ForkedRanks ranks(job_options(size), wait_until_it_fails);
  Noticed noticed;
  for (int rank = 0; rank < size; ++rank) {
    const auto ready = ranks.hear(rank, 20s);
    EXPECT_TRUE(ready && std::string(ready->text.data()) == "ready")
        << (ready ? ready->text.data() : "nothing");
  }
  ::usleep(50'000);  // all are asleep in wait(): the case that matters
  const Time sent = SteadyClock().now();
  ranks.signal(victim, signal);
  for (int rank = 0; rank < size; ++rank) {
    if (rank == victim) continue;
    const auto report = ranks.hear(rank, 5s);
    if (!report) {
      ADD_FAILURE() << "rank " << rank << " noticed nothing";
      continue;
    }
    noticed.seconds = std::max(noticed.seconds, seconds(report->at - sent));
    noticed.texts.emplace_back(report->text.data());
  }
  if (signal == SIGSTOP) {  // when it goes on it learns what the others think of it
    ranks.signal(victim, SIGCONT);
    const auto report = ranks.hear(victim, 5s);
    EXPECT_TRUE(report &&
                std::string(report->text.data()).find("rank " + std::to_string(victim)) != std::string::npos)
        << (report ? report->text.data() : "nothing");
  }
  return noticed;
}

TEST(TcpFailure, KillIsNoticedWithin100ms) {
  std::vector<double> trials;
  for (const int victim : {0, 3, 1, 2, 3}) {
    const Noticed noticed = notice(4, victim, SIGKILL);
    trials.push_back(noticed.seconds);
    for (const std::string& text : noticed.texts)
      EXPECT_THAT(text, HasSubstr("rank " + std::to_string(victim) + " is lost"));
  }
  std::sort(trials.begin(), trials.end());
  RecordProperty("median_us", static_cast<int>(trials[trials.size() / 2] * 1e6));
  EXPECT_LT(trials[trials.size() / 2], 0.1);
}

TEST(TcpFailure, StopIsNoticedByAllWithin1500ms) {
  const Noticed noticed = notice(4, 2, SIGSTOP);
  RecordProperty("us", static_cast<int>(noticed.seconds * 1e6));
  EXPECT_LT(noticed.seconds, 1.5);
  EXPECT_GT(noticed.seconds, 0.5);  // control: it was the silence, not a closed connection
  for (const std::string& text : noticed.texts)
    EXPECT_THAT(text, HasSubstr("rank 2 has not answered for 1.0 s"));
}

// By default a rank may be away for a while: a debugger, a paging host, a virtual machine that moves. (Those
// that are killed are noticed by their connections.)
TEST(TcpFailure, AStopOfTwoSecondsIsNoFailureByDefault) {
  EXPECT_EQ(Config{}.dead_after, 10s);
  TcpOptions options = job_options(3);
  options.dead_after = TcpOptions{}.dead_after;
  ForkedRanks ranks(options, wait_until_it_fails);
  for (int rank = 0; rank < options.size; ++rank) ASSERT_TRUE(ranks.hear(rank, 20s));
  ranks.signal(1, SIGSTOP);
  ::usleep(2'000'000);
  ranks.signal(1, SIGCONT);
  for (int rank = 0; rank < options.size; ++rank) EXPECT_FALSE(ranks.hear(rank, 200ms)) << "rank " << rank;
}

// Control for those above: idle ranks that are well stay together for many times dead_after.
TEST(TcpFailure, SilenceWithHeartbeatsIsNoFailure) {
  TcpOptions options = job_options(3);
  options.heartbeat = 40ms;
  options.dead_after = 400ms;
  std::barrier<> together(3);  // nobody leaves while another still looks
  run_ranks(options, [&](Transport& transport, BareRank& bare) {
    bare.start([](Comm comm) { return wait_for_ever(comm); });
    EXPECT_FALSE(drive(transport, bare, 1600ms, [&] { return bare.done(); }));
    together.arrive_and_wait();
    EXPECT_EQ(transport.failure(), nullptr) << text_of(transport.failure());
    bare.operation().fail(std::make_exception_ptr(UsageError("enough")));
    EXPECT_THROW(bare.run(), UsageError);
  });
}

TEST(TcpFailure, GracefulCloseIsNoFailureAndKeepsWhatWasSent) {
  std::atomic<bool> left{false};
  run_ranks(job_options(3), [&](Transport& transport, BareRank& bare) {
    const std::vector<std::byte> gift = pattern(20'000, 7);
    bare.start([&](Comm comm) -> Task<void> {
      if (comm.rank() == 2) {
        Transfer sent = comm.send(0, 0, view(gift));
        co_await sent;
        co_return;
      }
      std::vector<std::byte> into(8);
      std::string error;
      Transfer never = comm.recv(2, 1, into);  // pending while rank 2 leaves
      try {
        co_await never;
      } catch (const TransportError& e) {
        EXPECT_EQ(e.kind(), TransportError::Kind::peer_lost);
        EXPECT_EQ(e.peer(), 2);
        error = e.what();
      }
      EXPECT_THAT(error, HasSubstr("rank 2 has left the job"));
      EXPECT_EQ(transport.failure(), nullptr);
      if (comm.rank() == 0) {
        std::vector<std::byte> late(gift.size());
        Transfer received = comm.recv(2, 0, late);  // arrived before the goodbye
        co_await received;
        EXPECT_EQ(late, gift);
      }
      error.clear();
      Transfer sent = comm.send(2, 5, view(gift));
      try {
        co_await sent;
      } catch (const TransportError& e) {
        error = e.what();
      }
      EXPECT_THAT(error, HasSubstr("rank 2 has left the job"));
      Transfer hello = comm.send(1 - comm.rank(), 6, view(gift));  // the others go on
      std::vector<std::byte> answer(gift.size());
      Transfer back = comm.recv(1 - comm.rank(), 6, answer);
      co_await back;
      co_await hello;
    });
    bare.run();
    if (transport.rank() == 2) left = true;
  });
  EXPECT_TRUE(left);
}

TEST(TcpFailure, CloseWithAReasonStopsAllAndIsQuoted) {
  const auto errors = run_ranks_caught(job_options(3), [&](Transport& transport, BareRank& bare) {
    bare.start([](Comm comm) { return wait_for_ever(comm); });
    if (transport.rank() == 1) {
      transport.close("the loss is not a number");
      EXPECT_TRUE(transport.failure());
    }
    bare.run();
  });
  for (const int rank : {0, 2}) {
    EXPECT_THAT(text_of(errors[static_cast<std::size_t>(rank)]),
                HasSubstr("rank 1 has stopped: the loss is not a number"));
    EXPECT_THROW(std::rethrow_exception(errors[static_cast<std::size_t>(rank)]), TransportError);
  }
  EXPECT_THAT(text_of(errors[1]), HasSubstr("has closed its transport: the loss is not a number"));
}

// Ranks disagree about a length: the receiver's error names it, and the sender is not left hanging, short or
// long.
TEST(TcpFailure, MismatchIsTheReceiversErrorAndTheJobGoesOn) {
  for (const std::size_t length : {std::size_t{100}, std::size_t{1} << 20}) {
    run_ranks(job_options(2), [&](Transport&, BareRank& bare) {
      bare.start([&](Comm comm) -> Task<void> {
        const std::vector<std::byte> data = pattern(length, 3);
        if (comm.rank() == 0) {
          Transfer wrong = comm.send(1, 0, view(data));
          Transfer right = comm.send(1, 1, view(data));
          co_await wrong;
          co_await right;
        } else {
          std::vector<std::byte> into(length + 1);
          std::string error;
          Transfer wrong = comm.recv(0, 0, into);
          try {
            co_await wrong;
          } catch (const TransportError& e) {
            EXPECT_EQ(e.kind(), TransportError::Kind::mismatch);
            error = e.what();
          }
          EXPECT_THAT(error, HasSubstr("length of a message"));
          into.resize(length);
          Transfer right = comm.recv(0, 1, into);
          co_await right;
          EXPECT_EQ(into, data);
        }
      });
      bare.run();
    });
  }
}

// An operation is given up in every phase of its messages; the memory goes at once, and the connection still
// serves.
TEST(TcpFailure, CancelLetsGoOfMemoryAndKeepsTheConnection) {
  for (const int phase : {0, 1, 2, 3}) {
    for (const std::size_t length : {std::size_t{1000}, std::size_t{40} << 20}) {
      run_ranks(job_options(2), [&](Transport& transport, BareRank& bare) {
        auto data = std::make_unique<std::vector<std::byte>>(pattern(length, 1));
        bare.start([&](Comm comm) -> Task<void> {
          Transfer transfer =
              comm.rank() == 0 ? comm.send(1, 0, view(*data)) : comm.recv(0, 0, std::span<std::byte>(*data));
          co_await transfer;
        });
        // Rank 0 gives up before, early in, or in the middle of its message; rank 1 in phase 3.
        const int who = phase == 3 ? 1 : 0;
        if (transport.rank() == who) {
          const std::uint64_t some = phase < 2 ? 0 : length / 3;
          drive(transport, bare, phase == 0 ? 0ms : 2000ms, [&] {
            const TrafficCounters c = transport.counters();
            return bare.done() || std::max(c.wire_bytes_sent, c.wire_bytes_received) > some + 1000;
          });
        } else {
          drive(transport, bare, 200ms, [&] { return bare.done(); });
        }
        if (!bare.done()) bare.operation().fail(std::make_exception_ptr(UsageError("given up")));
        drive(transport, bare, 2000ms, [&] { return bare.done(); });
        data->assign(data->size(), std::byte{0xee});
        data.reset();
        EXPECT_EQ(transport.failure(), nullptr) << text_of(transport.failure());
        // A new operation over the same connection.
        bare.start(
            [&](Comm comm) -> Task<void> {
              std::vector<std::byte> out = pattern(100'000, 5);
              std::vector<std::byte> in(out.size());
              Transfer received = comm.recv(1 - comm.rank(), 0, in);
              Transfer sent = comm.send(1 - comm.rank(), 0, view(out));
              co_await received;
              co_await sent;
              EXPECT_EQ(in, out);
            },
            1);
        bare.run();
      });
    }
  }
}

}  // namespace
}  // namespace weft
