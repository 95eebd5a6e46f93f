// Strangers, impostors and liars at the port: each is turned away with a reason, and the job forms and goes
// on.
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <random>

#include "tcp/stranger.h"
#include "wire/crc32c.h"

namespace weft {
namespace {

using testing::as_rank;
using testing::greet;
using ::testing::HasSubstr;
using testing::hello_of;
using testing::job_options;
using testing::join_as_last;
using testing::kToken;
using ::testing::Not;
using testing::pattern;
using testing::run_ranks;
using testing::Spoken;
using testing::Stranger;
using testing::text_of;
using testing::view;

TcpOptions secret_options(int size) {
  TcpOptions options = job_options(size);
  options.token = kToken;
  return options;
}

Task<void> shake_hands(Comm comm) {
  const std::vector<std::byte> mine = pattern(100'000, 1);
  std::vector<std::byte> theirs(mine.size());
  Transfer received = comm.recv(comm.before(1), 0, theirs);
  Transfer sent = comm.send(comm.after(1), 0, view(mine));
  co_await received;
  co_await sent;
  EXPECT_EQ(theirs, mine);
}

// A job whose rank 0 waits at its port while `at_the_port` does what it likes; then the other ranks come, and
// it must form.
void job_forms_although(const TcpOptions& options, const std::function<void()>& at_the_port) {
  std::vector<std::thread> threads;
  const auto rank_body = [&](int rank) {
    try {
      const auto transport = connect_tcp(as_rank(options, rank));
      BareRank bare(*transport);
      bare.start([](Comm comm) { return shake_hands(comm); });
      bare.run();
    } catch (const std::exception& e) {
      ADD_FAILURE() << "rank " << rank << ": " << e.what();
    }
  };
  threads.emplace_back(rank_body, 0);
  at_the_port();
  for (int rank = 1; rank < options.size; ++rank) threads.emplace_back(rank_body, rank);
  for (std::thread& thread : threads) thread.join();
}

template <class F>
std::string error_of(F f) {
  try {
    f();
    return "";
  } catch (const TransportError& e) {
    return (e.kind() == TransportError::Kind::refused ? "refused: " : "transport: ") + std::string(e.what());
  } catch (const UsageError& e) {
    return "usage: " + std::string(e.what());
  } catch (const TimeoutError& e) {
    return "timeout: " + std::string(e.what());
  }
}

TEST(TcpHostile, WrongTokenIsRefusedAndTheJobGoesOn) {
  const TcpOptions options = secret_options(2);
  job_forms_although(options, [&] {
    TcpOptions wrong = as_rank(options, 1);
    wrong.token = "another secret of more than 32 characters";
    const std::string error = error_of([&] { connect_tcp(wrong); });
    EXPECT_THAT(error, HasSubstr("refused: "));
    EXPECT_THAT(error, HasSubstr("the token differs"));
    EXPECT_THAT(error, Not(HasSubstr(wrong.token)));
    EXPECT_THAT(error, Not(HasSubstr(kToken)));
  });
}

TEST(TcpHostile, OtherJobEpochSizeOrSettingsAreRefusedWithTheReason) {
  const TcpOptions options = secret_options(2);
  job_forms_although(options, [&] {
    const auto refused = [&](auto change) {
      TcpOptions other = as_rank(options, 1);
      change(other);
      return error_of([&] { connect_tcp(other); });
    };
    EXPECT_THAT(refused([](TcpOptions& o) { o.job = "other"; }), HasSubstr("another job"));
    EXPECT_THAT(refused([](TcpOptions& o) { o.epoch = 7; }), HasSubstr("another epoch"));
    EXPECT_THAT(refused([](TcpOptions& o) { o.size = 3; }), HasSubstr("WORLD_SIZE"));
    EXPECT_THAT(refused([](TcpOptions& o) { o.credit += 1; }), HasSubstr("credit"));
  });
}

TEST(TcpHostile, SecondClaimantOfARankIsRefused) {
  const TcpOptions options = secret_options(3);
  job_forms_although(options, [&] {
    const Stranger first(options.port);
    EXPECT_EQ(greet(first, hello_of(options, 1), kToken),
              tcp::Refusal::none);  // holds the rank while it is connected
    const std::string error = error_of([&] { connect_tcp(as_rank(options, 1)); });
    EXPECT_THAT(error, HasSubstr("this rank is taken"));
  });  // it has gone, so the true rank 1 is welcome
}

TEST(TcpHostile, ReplayedHandshakeIsRefused) {
  const TcpOptions options = secret_options(3);
  job_forms_although(options, [&] {
    Spoken spoken;
    {
      const Stranger real(options.port);
      ASSERT_EQ(greet(real, hello_of(options, 1), kToken, &spoken), tcp::Refusal::none);
    }
    const Stranger replay(options.port);
    ASSERT_TRUE(replay.send(spoken.hello));
    tcp::ChallengeBytes challenge{};
    ASSERT_TRUE(replay.receive(challenge));
    EXPECT_NE(challenge, spoken.challenge);
    ASSERT_TRUE(replay.send(spoken.proof));
    tcp::VerdictBytes verdict{};
    ASSERT_TRUE(replay.receive(verdict));
    EXPECT_EQ(verdict[5], static_cast<std::byte>(tcp::Refusal::token));
    EXPECT_TRUE(replay.closed_by_peer());
  });
}

TEST(TcpHostile, ReflectedHandshakeIsRefused) {
  const TcpOptions options = secret_options(3);
  job_forms_although(options, [&] {
    // A liar without the secret has two lines open and passes what it gets on one back on the other.
    const Stranger a(options.port);
    const Stranger b(options.port);
    const tcp::HelloBytes hello = tcp::encode(hello_of(options, 1));
    tcp::ChallengeBytes from_a{};
    tcp::ChallengeBytes from_b{};
    ASSERT_TRUE(a.send(hello) && a.receive(from_a) && b.send(hello) && b.receive(from_b));
    tcp::ProofBytes guess{};
    std::copy(from_a.begin() + 16, from_a.end(), guess.begin() + 32);
    tcp::VerdictBytes verdict{};
    ASSERT_TRUE(b.send(guess) && b.receive(verdict));
    EXPECT_EQ(verdict[5], static_cast<std::byte>(tcp::Refusal::token));
    ASSERT_TRUE(a.send(guess) && a.receive(verdict));
    EXPECT_EQ(verdict[5], static_cast<std::byte>(tcp::Refusal::token));
    // Without the secret nothing that could be reflected is ever said: no MAC in any of these verdicts.
    EXPECT_TRUE(
        std::all_of(verdict.begin() + 16, verdict.end(), [](std::byte x) { return x == std::byte{0}; }));
  });
}

TEST(TcpHostile, GarbageAndSilenceDoNotKeepTheJobFromForming) {
  const TcpOptions options = secret_options(3);
  std::vector<Stranger> crowd;
  job_forms_although(options, [&] {
    std::mt19937 random(1);
    for (int i = 0; i < 200; ++i) {
      Stranger& guest = crowd.emplace_back(options.port);
      std::vector<std::byte> noise(static_cast<std::size_t>(i % 3 == 0 ? 0 : i * 7));
      for (std::byte& b : noise) b = static_cast<std::byte>(random());
      if (i % 3 == 1) {  // starts like a rank and goes on with noise
        const tcp::HelloBytes hello = tcp::encode(hello_of(options, 1 + i % 2));
        guest.send(hello);
      }
      guest.send(noise);
    }
    for (const char* text :
         {"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "\x16\x03\x01\x02", "SSH-2.0-OpenSSH_9\r\n"}) {
      crowd.emplace_back(options.port).send(std::as_bytes(std::span(std::string_view(text))));
    }
  });
}

TEST(TcpHostile, FloodOfTenThousandConnectionsDoesNotKeepTheJobFromForming) {
  const TcpOptions options = secret_options(3);
  std::vector<Stranger> crowd;  // stays open and silent
  const auto flood = [&](int connections) {
    int connected = 0;
    for (int i = 0; i < connections; ++i) {
      Stranger guest(options.port, 0ms);
      connected += guest.connected() ? 1 : 0;
      if (crowd.size() < 1000) crowd.push_back(std::move(guest));
    }
    return connected;
  };
  std::thread rest;
  int connected = 0;
  job_forms_although(options, [&] {
    connected = Stranger(options.port).connected() ? flood(9'999) : 0;
    rest = std::thread([&] { flood(2'000); });  // and on while the ranks come
  });
  rest.join();
  EXPECT_GT(connected, 9'900);
  EXPECT_FALSE(Stranger(options.port, 0ms).connected());  // the job has formed: nobody listens any more
}

TEST(TcpHostile, HandshakeReadsLittleAndAnswersOnce) {
  const TcpOptions options = secret_options(2);
  job_forms_although(options, [&] {
    const Stranger guest(options.port);
    const std::vector<std::byte> noise(96, std::byte{0x41});
    ASSERT_TRUE(guest.send(noise));
    EXPECT_TRUE(guest.closed_by_peer());  // without a word
  });
}

// ---- a peer that knows the secret and lies afterwards ----

wire::Frame frame_of(const TcpOptions& options, wire::FrameKind kind) {
  return {.kind = kind, .epoch = options.epoch, .job = tcp::job_hash(options.job), .source = 1};
}

// What rank 0 ends with when rank 1 sends these bytes; it waits for two messages of rank 1.
std::string rank0_after(const TcpOptions& options, const std::function<void(const Stranger&)>& lie) {
  std::string error;
  std::thread rank0([&] {
    const auto transport = connect_tcp(as_rank(options, 0));
    BareRank bare(*transport);
    bare.start([](Comm comm) -> Task<void> {
      std::vector<std::byte> into(100);
      Transfer first = comm.recv(1, 0, into);
      std::vector<std::byte> large(1 << 20);
      Transfer second = comm.recv(1, 1, large);
      co_await first;
      co_await second;
    });
    error = error_of([&] { bare.run(); });
  });
  const Stranger line(options.port);
  const bool joined = join_as_last(line, options);
  EXPECT_TRUE(joined);
  if (joined) lie(line);
  rank0.join();
  return error;
}

TEST(TcpHostile, WrongFramesAreNamed) {
  const TcpOptions options = secret_options(2);
  const auto with = [&](auto change) {
    return rank0_after(options, [&](const Stranger& line) {
      wire::Frame frame = frame_of(options, wire::FrameKind::data);
      frame.length = 100;
      change(frame);
      wire::FrameBytes bytes = wire::encode_frame(frame);
      line.send(bytes);
      line.send(pattern(100, 1));
    });
  };
  EXPECT_THAT(with([](wire::Frame& f) { f.job ^= 1; }), HasSubstr("job is"));
  EXPECT_THAT(with([](wire::Frame& f) { f.epoch = 9; }), HasSubstr("epoch is 9"));
  EXPECT_THAT(with([](wire::Frame& f) { f.source = 0; }), HasSubstr("source is 0"));
  EXPECT_THAT(with([](wire::Frame& f) { f.length = 1ull << 41; }), HasSubstr("above the limit"));
  EXPECT_THAT(with([](wire::Frame& f) { f.length = 10 << 20; }), HasSubstr("without asking"));
  EXPECT_THAT(with([](wire::Frame& f) { f.payload_crc = 1; }), HasSubstr("payload checksum"));
  EXPECT_THAT(with([](wire::Frame& f) { f.kind = wire::FrameKind::grant; }), HasSubstr("not asked for"));
  EXPECT_THAT(with([](wire::Frame& f) { f.kind = wire::FrameKind::credit; }), HasSubstr("more credit"));
  EXPECT_THAT(with([](wire::Frame& f) {
                f.kind = wire::FrameKind::goodbye;
                f.length = 5000;
              }),
              HasSubstr("goodbye of 5000"));
  EXPECT_THAT(with([](wire::Frame& f) { f.length = 99; }), HasSubstr("length of a message"));
  // Control: a right frame is taken, and rank 0 waits for the next one until it hears no heartbeat.
  EXPECT_THAT(with([](wire::Frame& f) {
                const auto payload = pattern(100, 1);
                f.payload_crc = wire::crc32c(payload);
              }),
              HasSubstr("rank 1 has not answered"));
}

TEST(TcpHostile, FlippedBytesAreCorruptNotWrong) {
  const TcpOptions options = secret_options(2);
  std::mt19937 random(5);
  for (int trial = 0; trial < 24; ++trial) {
    const std::string error = rank0_after(options, [&](const Stranger& line) {
      wire::Frame frame = frame_of(options, wire::FrameKind::data);
      const std::vector<std::byte> payload = pattern(100, 1);
      frame.length = payload.size();
      frame.payload_crc = wire::crc32c(payload);
      const wire::FrameBytes head = wire::encode_frame(frame);
      std::vector<std::byte> bytes(head.begin(), head.end());
      bytes.insert(bytes.end(), payload.begin(), payload.end());
      bytes[random() % bytes.size()] ^= static_cast<std::byte>(1u << random() % 8);
      line.send(bytes);
    });
    EXPECT_THAT(error, HasSubstr("frame from rank 1"));
  }
}

// Random frames with right checksums: whatever they say, rank 0 ends with a typed error (sanitizers watch).
TEST(TcpHostile, RandomFramesEndInATypedError) {
  const TcpOptions options = secret_options(2);
  for (unsigned seed = 0; seed < 30; ++seed) {
    std::mt19937 random(seed);
    const std::string error = rank0_after(options, [&](const Stranger& line) {
      std::vector<std::byte> bytes;
      for (int i = 0; i < 200; ++i) {
        wire::Frame frame = frame_of(options, static_cast<wire::FrameKind>(1 + random() % 6));
        if (frame.kind == wire::FrameKind::goodbye && random() % 8 != 0) frame.kind = wire::FrameKind::data;
        frame.id.hop = random() % 3;
        frame.dtype = static_cast<DType>(random() % 8 == 0 ? 1 : 0);
        const std::uint64_t lengths[] = {0, 1, 100, 1000, 65536, 65537, 1 << 20, 4 << 20, 1ull << 39};
        frame.length = lengths[random() % (random() % 4 == 0 ? 9 : 4)];
        if (random() % 3 == 0) frame.length = 100;
        std::vector<std::byte> payload;
        const bool carries = frame.kind == wire::FrameKind::data || frame.kind == wire::FrameKind::goodbye;
        if (carries && frame.length < (1 << 18)) payload.resize(frame.length, std::byte{42});
        frame.payload_crc = wire::crc32c(payload);
        const wire::FrameBytes head = wire::encode_frame(frame);
        bytes.insert(bytes.end(), head.begin(), head.end());
        bytes.insert(bytes.end(), payload.begin(), payload.end());
      }
      line.send(bytes);
    });
    EXPECT_NE(error, "") << "seed " << seed;
  }
}

}  // namespace
}  // namespace weft
