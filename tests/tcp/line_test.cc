// Lines that are slow, stall or break: nothing that a leaving rank has sent is lost on a slow one, a live one
// is not given up, and each way of breaking has its own sentence.
#include <gmock/gmock.h>

#include <barrier>

#include "tcp/stalled.h"
#include "tcp/stranger.h"

namespace weft {
namespace {

using testing::as_rank;
using ::testing::HasSubstr;
using testing::job_options;
using testing::join_as_last;
using ::testing::Not;
using testing::pattern;
using testing::run_ranks;
using testing::socket_of;
using testing::Stalled;
using testing::Stranger;
using testing::text_of;
using testing::view;

TcpOptions secret_options() {
  TcpOptions options = job_options(2);
  options.token = testing::kToken;
  return options;
}

// What rank 1 has when rank 0 has left behind a line that stalls for `stall`: the message, and the error of a
// receive that nobody will answer.
struct Left {
  bool whole = false;
  std::string error;
  double seconds = 0;  // that rank 0 took to leave
};

Left leave_behind_a_stalled_line(TcpOptions options, Time stall) {
  Left left;
  std::barrier<> stalled(2);
  const std::vector<std::byte> gift = pattern(60'000, 3);
  run_ranks(options, [&](Transport& transport, BareRank& bare) {
    if (transport.rank() == 0) {
      stalled.arrive_and_wait();
      bare.start([&](Comm comm) -> Task<void> {
        Transfer sent = comm.send(1, 0, view(gift));
        co_await sent;  // the kernel has it
      });
      bare.run();
      const Time start = transport.clock().now();
      transport.close("");
      left.seconds = seconds(transport.clock().now() - start);
      return;
    }
    auto line = std::make_unique<Stalled>(socket_of(options.port, false));
    stalled.arrive_and_wait();
    std::thread repair([&] {
      ::usleep(static_cast<useconds_t>(stall / 1us));
      line.reset();
    });
    bare.start([&](Comm comm) -> Task<void> {
      std::vector<std::byte> into(gift.size());
      std::vector<std::byte> more(8);
      Transfer received = comm.recv(0, 0, into);
      Transfer never = comm.recv(0, 1, more);
      try {
        co_await received;
        left.whole = into == gift;
        co_await never;
      } catch (const TransportError& e) {
        left.error = e.what();
      }
    });
    bare.run();
    repair.join();
  });
  return left;
}

TEST(TcpLine, AStallWhileARankLeavesLosesNothing) {
  TcpOptions options = job_options(2);
  options.dead_after = 10s;
  const Left left = leave_behind_a_stalled_line(options, 1200ms);
  EXPECT_TRUE(left.whole);
  EXPECT_THAT(left.error, HasSubstr("rank 0 has left the job"));
  EXPECT_GT(left.seconds, 1.0);  // it waited for the line
}

// Control, and the bound: a peer that takes nothing at all keeps a leaving rank for dead_after, not for ever.
TEST(TcpLine, LeavingWaitsNoLongerThanDeadAfterForALineThatDoesNotMove) {
  TcpOptions options = job_options(2);
  options.heartbeat = 100ms;
  options.dead_after = 600ms;
  const Left left = leave_behind_a_stalled_line(options, 1800ms);
  EXPECT_FALSE(left.whole);
  EXPECT_THAT(left.error, HasSubstr("rank 0 has not answered for 0.6 s"));
  EXPECT_GT(left.seconds, 0.3);
  EXPECT_LT(left.seconds, 1.0);
}

// What rank 0 of two says of a rank 1 that does as `act` likes with its line.
std::string rank0_says(const TcpOptions& options, const std::function<void(Stranger&)>& act) {
  std::string error;
  std::thread rank0([&] {
    const auto transport = connect_tcp(as_rank(options, 0));
    BareRank bare(*transport);
    bare.start([](Comm comm) -> Task<void> {
      std::vector<std::byte> into(8);
      Transfer never = comm.recv(1, 0, into);
      co_await never;
    });
    try {
      bare.run();
    } catch (const std::exception& e) {
      error = e.what();
    }
  });
  Stranger line(options.port);
  const bool joined = join_as_last(line, options);
  EXPECT_TRUE(joined);
  if (joined) act(line);
  rank0.join();
  return error;
}

wire::FrameBytes frame_of(const TcpOptions& options, wire::FrameKind kind) {
  return wire::encode_frame(
      {.kind = kind, .epoch = options.epoch, .job = tcp::job_hash(options.job), .source = 1});
}

// Nothing reaches rank 1 for five times dead_after, so it acknowledges nothing, but it is heard: the line is
// slow in one direction, and alive.
TEST(TcpLine, APeerThatIsHeardIsNotGivenUpBecauseNothingIsAcknowledged) {
  TcpOptions options = secret_options();
  options.heartbeat = 100ms;
  options.dead_after = 400ms;
  const auto beat = [&](const Stranger& line, bool goodbye) {
    const Stalled stalled(line.fd(), Stalled::What::data);
    for (int i = 0; i < 8; ++i) {
      EXPECT_TRUE(line.send(frame_of(options, wire::FrameKind::heartbeat)));
      ::usleep(250'000);
    }
    if (goodbye) {
      EXPECT_TRUE(line.send(frame_of(options, wire::FrameKind::goodbye)));
    } else {
      ::usleep(600'000);
    }
  };
  EXPECT_THAT(rank0_says(options, [&](const Stranger& line) { beat(line, true); }),
              HasSubstr("rank 1 has left the job"));
  // Control: without the goodbye the silence after it is what ends the job.
  EXPECT_THAT(rank0_says(options, [&](const Stranger& line) { beat(line, false); }),
              HasSubstr("rank 1 has not answered for 0.4 s"));
}

TEST(TcpLine, EveryWayOfBreakingHasItsSentence) {
  TcpOptions options = secret_options();
  options.dead_after = 10s;
  const std::string ended = rank0_says(options, [](Stranger& line) { ::shutdown(line.fd(), SHUT_WR); });
  EXPECT_THAT(ended, HasSubstr("rank 1 is lost: its connection ended without a goodbye"));
  EXPECT_THAT(ended, HasSubstr("killed or has crashed"));

  const std::string reset = rank0_says(options, [](Stranger& line) {
    const linger at_once{.l_onoff = 1, .l_linger = 0};
    ::setsockopt(line.fd(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    line.close();
  });
  EXPECT_THAT(reset, HasSubstr("rank 1 is lost: its connection was reset"));

  const std::string timed_out = rank0_says(options, [&](const Stranger& line) {
    const Stalled stalled(line.fd());
    const unsigned soon = 300;  // what takes the kernel a quarter of an hour by itself
    const int fd = socket_of(options.port, true);
    ASSERT_EQ(::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &soon, sizeof soon), 0);
    ::usleep(1'500'000);
  });
  EXPECT_THAT(timed_out, HasSubstr("rank 1 is lost: its connection timed out"));
  EXPECT_THAT(timed_out, Not(HasSubstr("killed")));
}

}  // namespace
}  // namespace weft
