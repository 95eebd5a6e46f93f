// Faults on purpose, over `threads`: each kind ends in its error within the deadline, never in wrong data,
// never in a hang.
#include "transports/faulty.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "transports/bare_rank.h"
#include "weft/error.h"

namespace weft {
namespace {

using Bytes = std::vector<std::byte>;
constexpr Time kDeadline = 400ms;
constexpr Time kHang = 5s;  // more than a deadline and whatever a loaded machine adds

Bytes pattern(std::size_t length, std::uint64_t seed) {
  Bytes bytes(length);
  for (std::size_t i = 0; i < length; ++i)
    bytes[i] = static_cast<std::byte>(mix(seed * 1000003 + i / 8) >> (8 * (i % 8)));
  return bytes;
}

struct Job {
  int ranks = 3;
  std::size_t eager_limit = 8192;
  bool checksum = true;
  FaultOptions faults;
  int dies = -1;  // die_at_message is for this rank only
  Time deadline = kDeadline;
};

struct Outcome {
  std::vector<std::exception_ptr> errors;  // by rank
  std::uint64_t delayed = 0;
  double seconds = 0;
  int failed() const {
    return static_cast<int>(
        std::count_if(errors.begin(), errors.end(), [](const auto& e) { return e != nullptr; }));
  }
};

void drive(BareRank& rank, Transport& transport, Time limit) {
  const Time deadline = transport.clock().now() + limit;
  while (!rank.done()) {
    if (rank.poll() || rank.done()) continue;
    transport.wait(std::min(rank.next_deadline(), deadline));
    if (transport.clock().now() >= deadline && !rank.operation().failure) {
      rank.operation().fail(
          std::make_exception_ptr(TimeoutError(-1, seconds(limit), "the test's deadline passed")));
    }
  }
}

using Body = std::function<Task<void>(Comm)>;

Outcome run(const Job& job, const Body& body) {
  ThreadsOptions options;
  options.ranks = job.ranks;
  options.eager_limit = job.eager_limit;
  options.checksum_always = job.checksum;
  const FaultOptions& faults = job.faults;
  if (faults.drop + faults.truncate + faults.corrupt + faults.corrupt_frame > 0)
    options.tamper = make_tamper(faults);
  ThreadsWorld world(options);
  Outcome outcome;
  outcome.errors.resize(static_cast<std::size_t>(job.ranks));
  std::atomic<std::uint64_t> delayed{0};
  const Time started = SteadyClock().now();
  std::vector<std::thread> threads;
  for (int r = 0; r < job.ranks; ++r) {
    threads.emplace_back([&, r] {
      FaultOptions mine = faults;
      if (r != job.dies) mine.die_at_message = 0;
      FaultyTransport transport(world.transport(r), mine);
      BareRank rank(transport);
      rank.start(body, 1);
      drive(rank, transport, job.deadline);
      try {
        rank.rethrow();
      } catch (...) {
        outcome.errors[static_cast<std::size_t>(r)] = std::current_exception();
      }
      delayed += transport.messages_delayed();
    });
  }
  for (std::thread& thread : threads) thread.join();
  outcome.delayed = delayed;
  outcome.seconds = seconds(SteadyClock().now() - started);
  return outcome;
}

std::optional<TransportError> transport_error(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const TransportError& e) {
    return e;
  } catch (...) {
  }
  return std::nullopt;
}

bool is_timeout(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const TimeoutError&) {
    return true;
  } catch (...) {
  }
  return false;
}

// Everybody sends to everybody in each of `hops` rounds; what arrives without an error and is wrong is
// counted.
Task<void> exchange(Comm comm, std::uint32_t hops, std::size_t length, std::atomic<int>* wrong) {
  const auto seed = [](int from, int to, std::uint32_t hop) {
    return static_cast<std::uint64_t>(from * 100 + to) + hop * 10000ull;
  };
  for (std::uint32_t hop = 0; hop < hops; ++hop) {
    std::vector<Bytes> in(static_cast<std::size_t>(comm.size()), Bytes(length));
    std::vector<Bytes> out;
    std::vector<Transfer> transfers;
    for (int peer = 0; peer < comm.size(); ++peer)
      out.push_back(pattern(length, seed(comm.rank(), peer, hop)));
    for (int peer = 0; peer < comm.size(); ++peer) {
      const auto p = static_cast<std::size_t>(peer);
      const std::span<const std::byte> payload(out[p]);
      transfers.push_back(comm.recv(peer, hop, std::span<std::byte>(in[p])));
      transfers.push_back(comm.send(peer, hop, payload));
    }
    for (Transfer& transfer : transfers) co_await transfer;
    for (int peer = 0; peer < comm.size(); ++peer) {
      if (in[static_cast<std::size_t>(peer)] != pattern(length, seed(peer, comm.rank(), hop))) ++*wrong;
    }
  }
}

TEST(Faulty, IsTransparentWithoutFaults) {
  for (const std::size_t eager : {std::size_t{0}, std::size_t{8192}}) {
    std::atomic<int> wrong{0};
    Job job;
    job.eager_limit = eager;
    job.deadline = 10s;
    const Outcome outcome = run(job, [&](Comm comm) { return exchange(comm, 20, 1000, &wrong); });
    EXPECT_EQ(outcome.failed(), 0);
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(outcome.delayed, 0u);
  }
  Arena arena;
  const Tamper tamper = make_tamper({});
  wire::FrameBytes frame = wire::encode_frame({.length = 100});
  const wire::FrameBytes before = frame;
  Buffer payload(arena, 100);
  std::memset(payload.data(), 7, 100);
  for (int i = 0; i < 1000; ++i) ASSERT_TRUE(tamper(0, 1, frame, payload));
  EXPECT_EQ(frame, before);
  EXPECT_EQ(payload.size(), 100u);
  EXPECT_TRUE(
      std::all_of(payload.data(), payload.data() + 100, [](std::byte b) { return b == std::byte{7}; }));
}

TEST(Faulty, PassesOnThatUrgentTrafficIsUnderWay) {
  struct Told final : Decorator {
    using Decorator::Decorator;
    void give_way(Time until) noexcept override { told = until; }
    Time told{};
  };
  ThreadsWorld world(ThreadsOptions{.ranks = 1, .tamper = {}});
  Told told(world.transport(0));
  FaultyTransport faulty(told, {});
  EXPECT_EQ(told.told, 0s);
  faulty.give_way(5s);
  EXPECT_EQ(told.told, 5s);
}

// Rank 0 sends `count` messages of one identity and one message of each of `count` others, all at once; rank
// 1 notes the order in which the others arrive.
Task<void> race(Comm comm, std::size_t count, std::vector<int>* same, std::vector<int>* others) {
  std::vector<std::int32_t> values(2 * count);
  std::vector<Transfer> transfers;
  std::vector<Task<void>> tasks;
  if (comm.rank() == 0) {
    for (std::size_t i = 0; i < count; ++i) {
      values[i] = static_cast<std::int32_t>(i);
      const std::span<const std::byte> payload = std::as_bytes(std::span(values).subspan(i, 1));
      transfers.push_back(comm.send(1, 0, payload));
      transfers.push_back(comm.send(1, static_cast<std::uint32_t>(i) + 1, payload));
    }
    for (Transfer& transfer : transfers) co_await transfer;
    co_return;
  }
  const auto note = [](Comm c, std::uint32_t hop, std::span<std::byte> into,
                       std::vector<int>* order) -> Task<void> {
    Transfer transfer = c.recv(0, hop, into);
    co_await transfer;
    std::int32_t value = 0;
    std::memcpy(&value, into.data(), sizeof value);
    order->push_back(value);
  };
  for (std::size_t i = 0; i < count; ++i) {
    tasks.push_back(note(comm, 0, std::as_writable_bytes(std::span(values).subspan(i, 1)), same));
    tasks.push_back(note(comm, static_cast<std::uint32_t>(i) + 1,
                         std::as_writable_bytes(std::span(values).subspan(count + i, 1)), others));
  }
  co_await when_all(tasks);
}

TEST(Faulty, DelaysReorderIdentitiesAndNeverOne) {
  for (const std::size_t eager : {std::size_t{0}, std::size_t{8192}}) {
    std::vector<int> same;
    std::vector<int> others;
    Job job;
    job.ranks = 2;
    job.eager_limit = eager;
    job.deadline = 10s;
    job.faults.delay = 0.7;
    job.faults.max_delay = 20ms;
    const Outcome outcome = run(job, [&](Comm comm) { return race(comm, 30, &same, &others); });
    ASSERT_EQ(outcome.failed(), 0);
    EXPECT_GT(outcome.delayed, 20u);
    EXPECT_LT(outcome.delayed, 60u);
    std::vector<int> in_order(30);
    for (int i = 0; i < 30; ++i) in_order[static_cast<std::size_t>(i)] = i;
    EXPECT_EQ(same, in_order);
    EXPECT_NE(others, in_order);
    std::sort(others.begin(), others.end());
    EXPECT_EQ(others, in_order);
  }
}

TEST(Faulty, OnlyOneClassIsDelayed) {
  const auto delayed = [](std::optional<TrafficClass> only) {
    std::vector<int> same, others;
    Job job;
    job.ranks = 2;
    job.deadline = 10s;
    job.faults = {.delay = 1, .max_delay = 1ms, .delay_only = only};
    const Outcome outcome = run(job, [&](Comm comm) { return race(comm, 30, &same, &others); });
    EXPECT_EQ(outcome.failed(), 0);
    return outcome.delayed;
  };
  EXPECT_GT(delayed({}), 0u);
  EXPECT_EQ(delayed(TrafficClass::gradient), delayed({}));  // what operations are unless they say so
  EXPECT_EQ(delayed(TrafficClass::delayed), 0u);
}

// What becomes of 200 messages: 0 lost, 1 shortened, 2 changed, 3 whole.
std::string fates(const FaultOptions& options) {
  Arena arena;
  const Tamper tamper = make_tamper(options);
  std::string result;
  for (std::uint32_t i = 0; i < 200; ++i) {
    const wire::FrameBytes sent = wire::encode_frame({.id = {.slot = i / 20, .hop = i % 3}, .length = 50});
    wire::FrameBytes frame = sent;
    Buffer payload(arena, 50);
    std::memset(payload.data(), 0, 50);
    const bool kept = tamper(0, static_cast<int>(i % 2), frame, payload);
    const auto set = [](std::byte b) { return b != std::byte{0}; };
    if (!kept)
      result += '0';
    else if (payload.size() != 50)
      result += '1';
    else if (frame != sent || std::any_of(payload.data(), payload.data() + 50, set))
      result += '2';
    else
      result += '3';
  }
  return result;
}

TEST(Faulty, TheSameSeedMeetsTheSameFaults) {
  FaultOptions options{.seed = 5};
  options.drop = options.truncate = options.corrupt = options.corrupt_frame = 0.1;
  const std::string first = fates(options);
  EXPECT_EQ(fates(options), first);
  for (const char fate : {'0', '1', '2', '3'}) EXPECT_NE(first.find(fate), std::string::npos) << fate;
  options.seed = 6;
  EXPECT_NE(fates(options), first);
}

TEST(Faulty, ALostMessageEndsInATimeout) {
  std::atomic<int> wrong{0};
  Job job;
  job.faults.drop = 0.2;
  const Outcome outcome = run(job, [&](Comm comm) { return exchange(comm, 20, 100, &wrong); });
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(outcome.failed(), job.ranks);  // who misses nothing itself waits for one who does
  for (const std::exception_ptr& error : outcome.errors) EXPECT_TRUE(is_timeout(error));
  EXPECT_LT(outcome.seconds, seconds(kHang));
}

void expect_corrupt(const Job& job, const std::string& words) {
  std::atomic<int> wrong{0};
  const Outcome outcome = run(job, [&](Comm comm) { return exchange(comm, 20, 100, &wrong); });
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(outcome.failed(), job.ranks);
  EXPECT_LT(outcome.seconds, seconds(kHang));
  int found = 0;
  for (const std::exception_ptr& error : outcome.errors) {
    if (const auto e = transport_error(error)) {
      EXPECT_EQ(e->kind(), TransportError::Kind::corrupt) << e->what();
      EXPECT_NE(std::string(e->what()).find(words), std::string::npos) << e->what();
      EXPECT_GE(e->peer(), 0);
      ++found;
    } else {
      EXPECT_TRUE(is_timeout(error));  // its peer had stopped
    }
  }
  EXPECT_GT(found, 0);
}

TEST(Faulty, AShortenedMessageIsNoticed) {
  Job job;
  job.faults.truncate = 0.2;
  expect_corrupt(job, "bytes arrived");
  job.checksum = false;  // lengths are always checked
  expect_corrupt(job, "bytes arrived");
}

TEST(Faulty, AChangedPayloadIsNoticed) {
  Job job;
  job.faults.corrupt = 0.2;
  expect_corrupt(job, "payload checksum");
}

TEST(Faulty, AChangedFrameIsNoticed) {
  Job job;
  job.faults.corrupt_frame = 0.2;
  job.checksum = false;  // frames are always checked
  expect_corrupt(job, "frame from rank");
}

// The control: without payload checksums (the default inside a process) the very same fault is wrong data and
// no error.
TEST(Faulty, WithoutChecksumsAChangedPayloadIsNotNoticed) {
  std::atomic<int> wrong{0};
  Job job;
  job.faults.corrupt = 0.2;
  job.checksum = false;
  job.deadline = 10s;
  const Outcome outcome = run(job, [&](Comm comm) { return exchange(comm, 20, 100, &wrong); });
  EXPECT_EQ(outcome.failed(), 0);
  EXPECT_GT(wrong, 0);
}

TEST(Faulty, ASilentDeathEndsInTimeouts) {
  for (const std::size_t eager : {std::size_t{0}, std::size_t{8192}}) {
    std::atomic<int> wrong{0};
    Job job;
    job.eager_limit = eager;
    job.dies = 1;
    job.faults.die_at_message = 10;
    job.faults.delay = 0.3;
    const Outcome outcome = run(job, [&](Comm comm) { return exchange(comm, 20, 100, &wrong); });
    EXPECT_EQ(wrong, 0);
    EXPECT_TRUE(is_timeout(outcome.errors[0]));
    EXPECT_TRUE(is_timeout(outcome.errors[2]));
    const auto own = transport_error(outcome.errors[1]);
    ASSERT_TRUE(own);
    EXPECT_EQ(own->kind(), TransportError::Kind::closed);
    EXPECT_STREQ(own->what(), "rank 1 died at message 10, as it was told");
    EXPECT_LT(outcome.seconds, seconds(kHang));
  }
}

TEST(Faulty, ADeathWithLastWordsNamesTheRank) {
  std::atomic<int> wrong{0};
  Job job;
  job.dies = 1;
  job.faults.die_at_message = 10;
  job.faults.last_words = "out of memory";
  job.deadline = 10s;
  const Outcome outcome = run(job, [&](Comm comm) { return exchange(comm, 20, 100, &wrong); });
  EXPECT_EQ(wrong, 0);
  for (const std::size_t survivor : {0u, 2u}) {
    const auto e = transport_error(outcome.errors[survivor]);
    ASSERT_TRUE(e);
    EXPECT_EQ(e->kind(), TransportError::Kind::peer_lost);
    EXPECT_EQ(e->peer(), 1);
    EXPECT_NE(std::string(e->what()).find("out of memory"), std::string::npos) << e->what();
  }
  EXPECT_LT(outcome.seconds, 5.0);  // well before the deadline
}

// All faults at once, rare ones, many seeds: right data or a typed error on every rank.
TEST(Faulty, EverySeedEnds) {
  int clean = 0;
  int broken = 0;
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    std::atomic<int> wrong{0};
    Job job;
    job.faults = {.seed = seed, .delay = 0.3, .max_delay = 300us};
    job.faults.drop = job.faults.truncate = job.faults.corrupt = job.faults.corrupt_frame = 0.002;
    if (seed % 4 == 0) {
      job.dies = static_cast<int>(seed / 4 % 3);
      job.faults.die_at_message = seed;
      if (seed % 8 == 0) job.faults.last_words = "the end";
    }
    job.deadline = 150ms;
    const Outcome outcome = run(job, [&](Comm comm) { return exchange(comm, 10, 300, &wrong); });
    EXPECT_EQ(wrong, 0) << "seed " << seed;
    EXPECT_LT(outcome.seconds, seconds(kHang)) << "seed " << seed;
    for (const std::exception_ptr& error : outcome.errors) {
      EXPECT_TRUE(!error || is_timeout(error) || transport_error(error)) << "seed " << seed;
    }
    ++(outcome.failed() == 0 ? clean : broken);
  }
  EXPECT_GT(clean, 0);
  EXPECT_GT(broken, 0);
}

TEST(Faulty, RefusesProbabilitiesThatAreNone) {
  for (const double bad : {-0.1, 1.5, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_THROW(make_tamper({.drop = bad}), UsageError);
    EXPECT_THROW(make_tamper({.corrupt = bad}), UsageError);
    ThreadsWorld world({.ranks = 1});
    EXPECT_THROW(FaultyTransport(world.transport(0), {.delay = bad}), UsageError);
  }
}

}  // namespace
}  // namespace weft
