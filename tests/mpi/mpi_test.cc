// The mpi transport as 2..4 processes.
//
// `mpi_test --funneled` (or --serialized, --multiple) initialises MPI itself with that thread level, and
// checks only whether weft takes it.
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <thread>

#include "base/worker_pool.h"
#include "engine/communication_thread.h"
#include "mpi/mpi_fixture.h"
#include "weft/collective.h"
#include "weft/engine.h"

namespace weft {
namespace {

std::uint64_t seed_of(int from, int to, std::uint32_t hop) {
  return static_cast<std::uint64_t>(from) * 64 + static_cast<std::uint64_t>(to) + hop * 4096ull;
}

// One message of `length` bytes from everybody to everybody, self included.
Task<void> all_pairs(Comm comm, std::size_t length, std::uint32_t hop) {
  std::vector<Bytes> out;
  std::vector<Bytes> in;
  std::vector<Transfer> transfers;
  for (int peer = 0; peer < comm.size(); ++peer) {
    out.push_back(pattern(length, seed_of(comm.rank(), peer, hop)));
    in.emplace_back(length);
  }
  for (int peer = 0; peer < comm.size(); ++peer) {
    const auto p = static_cast<std::size_t>(peer);
    transfers.push_back(comm.recv(peer, hop, in[p]));
    transfers.push_back(comm.send(peer, hop, view(out[p])));
  }
  for (Transfer& transfer : transfers) co_await transfer;
  for (int peer = 0; peer < comm.size(); ++peer) {
    EXPECT_EQ(in[static_cast<std::size_t>(peer)], pattern(length, seed_of(peer, comm.rank(), hop)))
        << length << " from " << peer;
  }
}

Task<void> every_length(Comm comm, std::vector<std::size_t> lengths) {
  std::uint32_t hop = 0;
  for (const std::size_t length : lengths) co_await all_pairs(comm, length, hop++);
}

TEST_F(Mpi, CarriesEveryLength) {
  const TrafficCounters before = shared()->counters();
  const std::vector<std::size_t> lengths{0, 1, 63, 64, 3967, 3968, 3969, 65536, (3u << 20) + 7};
  run(*shared(), [&](Comm comm) { return every_length(comm, lengths); }, 1);
  const TrafficCounters after = shared()->counters();
  const auto messages = lengths.size() * static_cast<std::size_t>(size());
  const std::size_t bytes =
      std::accumulate(lengths.begin(), lengths.end(), std::size_t{0}) * static_cast<std::size_t>(size());
  EXPECT_EQ(after.messages_sent - before.messages_sent, messages);
  EXPECT_EQ(after.messages_received - before.messages_received, messages);
  EXPECT_EQ(after.payload_bytes_sent - before.payload_bytes_sent, bytes);
  EXPECT_EQ(after.payload_bytes_received - before.payload_bytes_received, bytes);
  EXPECT_EQ(after.wire_bytes_sent - before.wire_bytes_sent, bytes + 64 * messages);
}

TEST_F(Mpi, CutsLongMessages) {
  const auto tiny = open_tiny();
  const std::vector<std::size_t> lengths{0, 1, 99, 100, 101, 999, 1000, 1001, 2000, 123457, 1u << 20};
  run(*tiny, [&](Comm comm) { return every_length(comm, lengths); }, 1);
}

// Sends and receives of many identities, each rank in an order of its own.
Task<void> shuffled(Comm comm, std::uint32_t hops) {
  struct Item {
    int peer;
    std::uint32_t hop;
    bool receive;
    Bytes bytes;
  };
  const auto length = [](std::uint32_t hop) { return std::size_t{hop % 7 == 0 ? 9000u : hop * 3u}; };
  std::vector<Item> items;
  for (std::uint32_t hop = 0; hop < hops; ++hop) {
    for (int peer = 0; peer < comm.size(); ++peer) {
      items.push_back({peer, hop, true, Bytes(length(hop))});
      items.push_back({peer, hop, false, pattern(length(hop), seed_of(comm.rank(), peer, hop))});
    }
  }
  std::mt19937 random(static_cast<unsigned>(comm.rank()) + 5);
  std::shuffle(items.begin(), items.end(), random);
  std::vector<Transfer> transfers;
  for (Item& item : items) {
    transfers.push_back(item.receive ? comm.recv(item.peer, item.hop, item.bytes)
                                     : comm.send(item.peer, item.hop, view(item.bytes)));
  }
  for (Transfer& transfer : transfers) co_await transfer;
  for (const Item& item : items) {
    if (!item.receive) continue;
    EXPECT_EQ(item.bytes, pattern(length(item.hop), seed_of(item.peer, comm.rank(), item.hop)));
  }
}

TEST_F(Mpi, ManyIdentitiesInAnyOrder) {
  run(*shared(), [](Comm comm) { return shuffled(comm, 200); }, 2);
  const auto tiny = open_tiny();
  run(*tiny, [](Comm comm) { return shuffled(comm, 100); }, kUnnamed | 70000);
}

// Forty messages of one identity, of mixed sizes; some receives are posted before anything is sent, some
// after.
Task<void> in_order(Comm comm) {
  constexpr std::size_t kMessages = 40;
  const auto length = [](std::size_t i) { return i % 3 == 0 ? 20000 + i : i % 3 == 1 ? i : 0; };
  std::vector<Bytes> out;
  std::vector<Bytes> in;
  std::vector<Transfer> transfers;
  for (std::size_t i = 0; i < kMessages; ++i) {
    out.push_back(pattern(length(i), 100 * i + static_cast<std::uint64_t>(comm.rank())));
    in.emplace_back(length(i));
  }
  const auto receive = [&](std::size_t from, std::size_t to) {
    for (std::size_t i = from; i < to; ++i) transfers.push_back(comm.recv(comm.before(1), 9, in[i]));
  };
  receive(0, kMessages / 2);
  for (const Bytes& bytes : out) transfers.push_back(comm.send(comm.after(1), 9, view(bytes)));
  co_await comm.sleep_until(comm.now() + 20ms);
  receive(kMessages / 2, kMessages);
  for (Transfer& transfer : transfers) co_await transfer;
  for (std::size_t i = 0; i < kMessages; ++i) {
    EXPECT_EQ(in[i], pattern(length(i), 100 * i + static_cast<std::uint64_t>(comm.before(1)))) << i;
  }
}

TEST_F(Mpi, KeepsTheOrderOfOneIdentity) {
  run(*shared(), in_order, 3);
  const auto tiny = open_tiny();
  run(*tiny, in_order, 3);
}

Task<void> all_sinks(Comm comm, std::size_t count) {
  const auto me = static_cast<float>(comm.rank());
  const auto other = static_cast<float>(comm.before(1));
  std::vector<float> mine(count, me + 1);
  std::vector<float> sum(count, 100);
  const Dense sent(std::span<float>{mine});
  const Dense summed(std::span<float>{sum});
  std::size_t consumed = 0;
  float seen = -1;
  const auto consume = [&](std::span<const std::byte> bytes) {
    consumed = bytes.size();
    std::memcpy(&seen, bytes.data(), sizeof seen);
  };
  Transfer folded = comm.recv_fold(comm.before(1), 0, summed, Reduction::sum);
  Transfer consuming = comm.recv_with(comm.before(1), 1, 4 * count + 100, consume);
  Transfer keeping = comm.recv_any(comm.before(1), 2, 4 * count);
  Transfer s0 = comm.send(comm.after(1), 0, sent);
  Transfer s1 = comm.send(comm.after(1), 1, sent.bytes());
  Transfer s2 = comm.send(comm.after(1), 2, sent.bytes());
  co_await folded;
  co_await consuming;
  co_await keeping;
  const Buffer kept = keeping.take();
  co_await s0;
  co_await s1;
  co_await s2;
  EXPECT_EQ(sum, std::vector<float>(count, 100 + other + 1));
  EXPECT_EQ(consumed, 4 * count);
  EXPECT_EQ(seen, other + 1);
  EXPECT_EQ(kept.size(), 4 * count);
  EXPECT_EQ(kept.as<float>()[count - 1], other + 1);
}

TEST_F(Mpi, FillsEveryKindOfSink) {
  run(*shared(), [](Comm comm) { return all_sinks(comm, 16); }, 4);
  run(*shared(), [](Comm comm) { return all_sinks(comm, 100000); }, 4, 1);
}

// Pairs {r, r+1}: every rank but the first and last is in two groups, and both carry the same slot and hops
// at once.
Task<void> overlapping(Comm comm) {
  std::vector<Comm> groups;
  for (int r = 0; r + 1 < comm.size(); ++r) {
    if (comm.rank() == r || comm.rank() == r + 1) groups.push_back(comm.subgroup({r + 1, r}));
  }
  std::vector<Task<void>> tasks;
  for (const Comm& group : groups) {
    EXPECT_EQ(group.size(), 2);
    tasks.push_back(all_pairs(group, 5000, 1));
    tasks.push_back(all_pairs(group, 5, 2));
  }
  tasks.push_back(all_pairs(comm, 77, 1));
  co_await when_all(tasks);
}

TEST_F(Mpi, GroupsMayOverlap) { run(*shared(), overlapping, 5); }

// Ranks 0 and 1 disagree; what the receiver gets.
Task<void> disagree(Comm comm, std::size_t sent, std::size_t expected) {
  static Bytes out(1u << 20);  // mpi keeps a refused payload until the process ends
  if (comm.rank() == 0) {
    Transfer transfer = comm.send(1, 3, std::span(out).first(sent));
    if (sent < 100) co_await transfer;
  }
  if (comm.rank() == 1) {
    Bytes in(expected);
    Transfer transfer = comm.recv(0, 3, in);
    co_await transfer;
  }
}

TEST_F(Mpi, LengthsThatDifferAreAnErrorOfTheReceiver) {
  for (const auto& [sent, expected] :
       {std::pair<std::size_t, std::size_t>{10, 11}, {11, 10}, {90000, 10}, {10, 90000}}) {
    const auto other = open_tiny();
    if (rank() == 1) {
      try {
        run(*other, [&](Comm comm) { return disagree(comm, sent, expected); }, 6);
        FAIL() << "no error for " << sent << " bytes into " << expected;
      } catch (const TransportError& e) {
        EXPECT_EQ(e.kind(), TransportError::Kind::mismatch) << e.what();
        EXPECT_EQ(e.peer(), 0);
      }
    } else {
      run(*other, [&](Comm comm) { return disagree(comm, sent, expected); }, 6);
    }
    MPI_Barrier(MPI_COMM_WORLD);
  }
}

Task<void> say(Comm comm, std::size_t length) {
  if (comm.rank() == 0) {
    const Bytes out = pattern(length, 1);
    Transfer transfer = comm.send(1, 0, view(out));
    co_await transfer;
  } else if (comm.rank() == 1) {
    Bytes in(length);
    Transfer transfer = comm.recv(0, 0, in);
    co_await transfer;
    EXPECT_EQ(in, pattern(length, 1));
  }
}

// Rank 1 waits for step 4 of a slot; that of step 0, which comes first, is left to its own receive.
TEST_F(Mpi, AMessageOfAnotherStepIsNotTaken) {
  if (rank() == 1) {
    run(*shared(), [](Comm comm) { return say(comm, 60); }, 7, 4);
    run(*shared(), [](Comm comm) { return say(comm, 50); }, 7, 0);
  } else {
    run(*shared(), [](Comm comm) { return say(comm, 50); }, 7, 0);
    run(*shared(), [](Comm comm) { return say(comm, 60); }, 7, 4);
  }
  // Control: what nobody sends does not come, though messages of other steps do.
  if (rank() == 1) {
    EXPECT_THROW(run(*shared(), [](Comm comm) { return say(comm, 50); }, 7, 9, 100ms), TimeoutError);
    run(*shared(), [](Comm comm) { return say(comm, 50); }, 7, 8);
  } else {
    run(*shared(), [](Comm comm) { return say(comm, 50); }, 7, 8);
  }
}

TEST_F(Mpi, AnySlotAndAnyHop) {
  for (const std::uint32_t slot : {1u << 12, 70000u, kUnnamed - 1, kUnnamed | 0x7fff'ffffu}) {
    run(*shared(), [](Comm comm) { return all_pairs(comm, 500, 0xffff'fffe); }, slot, 0xffff'ffff);
  }
}

Task<void> wait_for_nothing(Comm comm) {
  Bytes in(10);
  Transfer transfer = comm.recv(comm.before(1), 0, in);
  co_await transfer;
}

TEST_F(Mpi, AGoodbyeWithAReasonReachesEveryPeer) {
  const auto other = open_tiny();
  if (rank() == 0) {
    other->close("the disk is full");
    EXPECT_NE(other->failure(), nullptr);
    EXPECT_THROW(run(*other, wait_for_nothing, 8), TransportError);
  } else {
    try {
      run(*other, wait_for_nothing, 8);
      FAIL() << "nothing was noticed";
    } catch (const TransportError& e) {
      EXPECT_EQ(e.kind(), TransportError::Kind::peer_lost);
      EXPECT_EQ(e.peer(), 0);
      EXPECT_NE(std::string(e.what()).find("the disk is full"), std::string::npos) << e.what();
    }
  }
}

// A receive that was given up leaves its message to the next one, whether it had arrived or not.
Task<void> give_up_then_receive(Comm comm) {
  Bytes in(10);
  if (comm.rank() == 1) {
    for (std::uint32_t hop = 0; hop < 20; ++hop) {
      const Transfer dropped = comm.recv(0, hop, in);
      EXPECT_FALSE(dropped.done());
    }
    Bytes go(1);
    Transfer told = comm.send(0, 100, view(go));
    co_await told;
    for (std::uint32_t hop = 0; hop < 20; ++hop) {
      Transfer transfer = comm.recv(0, hop, in);
      co_await transfer;
      EXPECT_EQ(in, pattern(10, hop));
    }
  } else if (comm.rank() == 0) {
    Bytes go(1);
    Transfer told = comm.recv(1, 100, go);
    co_await told;
    for (std::uint32_t hop = 0; hop < 20; ++hop) {
      const Bytes out = pattern(10, hop);
      Transfer transfer = comm.send(1, hop, view(out));
      co_await transfer;
    }
  }
}

TEST_F(Mpi, AReceiveCanBeGivenUp) { run(*shared(), give_up_then_receive, 9); }

// A receive of many pieces that is given up at some moment: before, while or after its payload arrives.
// Whatever had begun is taken to its end, so that the lanes stay in step; what had not stays for the next
// receive.
Task<void> give_up_at_random(Comm comm) {
  constexpr std::uint32_t kMessages = 60;
  constexpr std::size_t kLength = 300000;
  static const Bytes out = pattern(kLength, 77);  // mpi may keep it until the process ends
  std::vector<Transfer> transfers;
  if (comm.rank() == 0) {
    for (std::uint32_t hop = 0; hop < kMessages; ++hop) transfers.push_back(comm.send(1, hop, view(out)));
    Bytes go(1);
    Transfer over = comm.recv(1, kMessages, std::span(go));
    co_await over;
  } else if (comm.rank() == 1) {
    std::mt19937 random(3);
    for (std::uint32_t hop = 0; hop < kMessages; ++hop) {
      Bytes in(kLength);
      const Time end = comm.now() + Time(random() % 3'000'000);
      const Transfer transfer = comm.recv(0, hop, std::span(in));
      while (comm.now() < end) co_await comm.sleep_until(std::min(end, comm.now() + 20us));
      EXPECT_TRUE(!transfer.done() || in == out);
    }
    const Bytes go(1);
    Transfer over = comm.send(0, kMessages, view(go));
    co_await over;
  }
}

TEST_F(Mpi, AReceiveCanBeGivenUpWhileItArrives) {
  const auto tiny = open_tiny();
  run(*tiny, give_up_at_random, 13);
  EXPECT_EQ(tiny->failure(), nullptr);
}

// Rank 1 gives a receive up in a failed job while its payload comes; whoever owns the memory then uses it.
// Gives whether somebody else wrote into it.
bool written_after_it_was_given_back(Transport& transport) {
  constexpr std::size_t kLength = 4 << 20;
  static const Bytes out = pattern(kLength, 78);  // mpi may keep it until the process ends
  static Bytes in(kLength);
  BareRank rank(transport);
  const Time end = transport.clock().now() + 300ms;
  bool written = false;
  rank.start(
      [&](Comm comm) -> Task<void> {
        if (comm.rank() == 0) {
          const Transfer transfer = comm.send(1, 0, view(out));
          while (comm.now() < end) co_await comm.sleep_until(comm.now() + 20us);
        } else if (comm.rank() == 1) {
          std::fill(in.begin(), in.end(), std::byte{0});
          {
            const Transfer transfer = comm.recv(0, 0, std::span(in));
            while (comm.now() < end && !transfer.done() && in.front() == std::byte{0})
              co_await comm.sleep_until(comm.now() + 1us);
            transport.close("as the test says");
          }
          std::fill(in.begin(), in.end(), std::byte{0xee});
          int found = 0;
          while (comm.now() < end)  // lets MPI work
            MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &found, MPI_STATUS_IGNORE);
          written = std::any_of(in.begin(), in.end(), [](std::byte b) { return b != std::byte{0xee}; });
        }
      },
      14);
  while (!rank.done()) {
    if (!rank.poll()) transport.wait(rank.next_deadline());
  }
  return written;
}

TEST_F(Mpi, AFailedJobWritesIntoNoMemoryThatWasGivenBack) {
  for (int i = 0; i < 5; ++i) {
    const auto transport = open_mpi({.job = 8, .bounce_bytes = 100, .piece_limit = std::size_t{1} << 18});
    EXPECT_FALSE(written_after_it_was_given_back(*transport));
    MPI_Barrier(MPI_COMM_WORLD);
  }
}

// Long, short and long messages of one identity, whose checksums are computed here and there.
Task<void> long_and_short(Comm comm, std::vector<std::thread::id>& consumers) {
  constexpr std::size_t kLengths[] = {3 << 20, 10, 2 << 20, 5000, 0, 1 << 20};
  std::vector<Bytes> out;
  std::vector<Transfer> transfers;
  for (const std::size_t length : kLengths) out.push_back(pattern(length, length));
  if (comm.rank() == 0) {
    for (const Bytes& bytes : out) transfers.push_back(comm.send(1, 0, view(bytes)));
    for (Transfer& transfer : transfers) co_await transfer;
  } else if (comm.rank() == 1) {
    for (const Bytes& expected : out) {
      const auto consume = [&](std::span<const std::byte> bytes) {
        consumers.push_back(std::this_thread::get_id());
        EXPECT_TRUE(std::ranges::equal(bytes, expected)) << expected.size();
      };
      Transfer transfer = comm.recv_with(0, 0, std::size_t{3} << 20, consume);
      co_await transfer;
    }
  }
}

TEST_F(Mpi, LongPayloadsAreCheckedAndConsumedOnThePool) {
  for (const bool with_pool : {true, false}) {
    WorkerPool pool(2);
    std::vector<std::thread::id> consumers;
    BareRank bare(*shared(), with_pool ? &pool : nullptr);
    bare.start([&](Comm comm) { return long_and_short(comm, consumers); }, 15, with_pool ? 1 : 0);
    bare.run();
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank() != 1) continue;
    ASSERT_EQ(consumers.size(), 6u);
    const std::thread::id here = std::this_thread::get_id();
    for (const std::size_t i : {0, 2, 5}) EXPECT_EQ(consumers[i] != here, with_pool) << i;
    for (const std::size_t i : {1, 3, 4}) EXPECT_EQ(consumers[i], here) << i;
  }
}

TEST_F(Mpi, ALateOperationEndsInATimeoutAndTheNextOneWorks) {
  EXPECT_THROW(run(*shared(), wait_for_nothing, 10, 0, 50ms), TimeoutError);
  EXPECT_EQ(shared()->failure(), nullptr);
  MPI_Barrier(MPI_COMM_WORLD);
  run(*shared(), [](Comm comm) { return all_pairs(comm, 10, 0); }, 10);
}

// At three ranks a ring and a Rabenseifner all-reduce wait for different peers: see engine/inquiry.h.
TEST_F(Mpi, ARankThatCallsSomethingElseIsNamed) {
  const auto tiny = open_tiny();
  Engine engine(*tiny, {.operation_timeout = 2s}, nullptr);
  const CommunicationThread thread(engine);
  std::vector<float> data(60);
  const auto call = [&](Comm comm) {
    return all_reduce(comm, Dense(std::span(data)), {.algorithm = rank() == 1 ? "ring" : "rabenseifner"});
  };
  try {
    engine.submit(engine.world(), {}, call).wait();
    engine.submit(engine.world(), {}, [](Comm comm) { return barrier(comm); }).wait();
    FAIL() << "this rank went on";
  } catch (const TransportError& e) {
    EXPECT_NE(std::string(e.what()).find("disagree about an operation"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("rank 1"), std::string::npos) << e.what();
  }
}

TEST_F(Mpi, OptionsThatDifferAreRefusedOnEveryRank) {
  MpiOptions options{.job = 3};
  options.bounce_bytes = rank() == 1 ? 200 : 100;
  try {
    const auto transport = open_mpi(options);
    FAIL() << "accepted";
  } catch (const UsageError& e) {
    EXPECT_NE(std::string(e.what()).find("bounce_bytes is 100 on rank 0 and 200 on rank 1"),
              std::string::npos)
        << e.what();
  }
  EXPECT_THROW(open_mpi({.piece_limit = 0}), UsageError);
  EXPECT_THROW(open_mpi({.piece_limit = std::size_t{1} << 31}), UsageError);
}

// A program that has initialised MPI itself. 0 if what weft says of its level is right.
int with_level(int asked, const char* name, bool enough) {
  int level = 0;
  MPI_Init_thread(nullptr, nullptr, asked, &level);
  int result = enough ? 0 : 1;
  try {
    const auto transport = open_mpi({});
    std::printf("accepted\n");
  } catch (const UsageError& e) {
    result = enough || std::string(e.what()).find(name) == std::string::npos ? 2 : 0;
    std::printf("%s\n", e.what());
  }
  MPI_Finalize();
  return result;
}

}  // namespace
}  // namespace weft

int main(int argc, char** argv) {
  const std::string level = argc > 1 ? argv[1] : "";
  if (level == "--funneled") return weft::with_level(MPI_THREAD_FUNNELED, "MPI_THREAD_FUNNELED", false);
  if (level == "--serialized") return weft::with_level(MPI_THREAD_SERIALIZED, "MPI_THREAD_SERIALIZED", false);
  if (level == "--multiple") return weft::with_level(MPI_THREAD_MULTIPLE, "", true);
  testing::InitGoogleTest(&argc, argv);
  weft::shared() = weft::open_mpi({});
  if (weft::shared()->size() < 2) {
    std::printf("the mpi suite needs at least two ranks\n");
    return 77;
  }
  const int result = RUN_ALL_TESTS();
  if (result != 0) MPI_Abort(MPI_COMM_WORLD, result);  // the others may wait for this rank
  weft::shared().reset();
  return result;
}
