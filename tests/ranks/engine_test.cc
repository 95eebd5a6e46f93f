// The engine on threads: submissions, priorities, holding, deadlines, failures, overhead.
#include "weft/engine.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/worker_pool.h"
#include "engine/communication_thread.h"
#include "transports/endpoint.h"
#include "transports/recording.h"
#include "transports/threads.h"
#include "weft/error.h"

namespace weft {
namespace {

// Ranks with engines that run, each with a thread.
class Ranks {
 public:
  explicit Ranks(int n, const EngineOptions& options = {}, std::size_t eager_limit = 8192,
                 bool traced = false)
      : world_(ThreadsOptions{.ranks = n, .eager_limit = eager_limit, .tamper = {}}) {
    traces_.resize(static_cast<std::size_t>(n));
    for (int r = 0; r < n; ++r) {
      EngineOptions mine = options;
      if (traced) mine.trace = &traces_[static_cast<std::size_t>(r)];
      engines_.push_back(std::make_unique<Engine>(world_.transport(r), mine, &pool_));
    }
    for (auto& engine : engines_) threads_.push_back(std::make_unique<CommunicationThread>(*engine));
  }
  Engine& operator[](int r) { return *engines_[static_cast<std::size_t>(r)]; }
  void stop(int r) { threads_[static_cast<std::size_t>(r)].reset(); }
  const Trace& trace(int r) { return traces_[static_cast<std::size_t>(r)]; }

 private:
  ThreadsWorld world_;
  WorkerPool pool_{1};
  std::vector<Trace> traces_;
  std::vector<std::unique_ptr<Engine>> engines_;
  std::vector<std::unique_ptr<CommunicationThread>> threads_;
};

Task<void> compute_for(Comm comm, std::chrono::milliseconds time, bool busy) {
  auto work = [time, busy] {
    if (!busy) return std::this_thread::sleep_for(time);
    timespec t{};
    const auto spent = [&t] {
      ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
      return std::chrono::seconds(t.tv_sec) + std::chrono::nanoseconds(t.tv_nsec);
    };
    const auto start = spent();
    while (spent() - start < time) continue;
  };
  co_await comm.compute(work);
  co_await comm.compute(work);
}

// Each rank gives its number to the next; `got` is the previous one's.
Task<void> shift(Comm comm, int& got) {
  const int mine = comm.rank();
  const auto out = std::as_bytes(std::span(&mine, 1));
  const auto in = std::as_writable_bytes(std::span(&got, 1));
  Transfer received = comm.recv(comm.before(1), 0, in);
  Transfer sent = comm.send(comm.after(1), 0, out);
  co_await received;
  co_await sent;
}

Task<void> shift_bytes(Comm comm, std::span<const std::byte> out, std::span<std::byte> in, int hops) {
  for (int hop = 0; hop < hops; ++hop) {
    const auto h = static_cast<std::uint32_t>(hop);
    Transfer received = comm.recv(comm.before(1), h, in);
    Transfer sent = comm.send(comm.after(1), h, out);
    co_await received;
    co_await sent;
  }
}

std::string error_of(const Ticket& ticket) {
  try {
    ticket.wait();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "";
}

TEST(Engine, CountsTheProcessorTimeOfComputations) {
  Ranks ranks(1);
  const auto seconds_of = [&](bool busy) {
    const Ticket ticket =
        ranks[0].submit(ranks[0].world(), {}, [busy](Comm comm) { return compute_for(comm, 30ms, busy); });
    ticket.wait();
    return ticket.computed_seconds();
  };
  EXPECT_GE(seconds_of(true), 0.06);
  EXPECT_LT(seconds_of(false), 0.03);  // control: who sleeps takes none
}

TEST(Engine, OperationsMatchByIdentityWhateverTheOrder) {
  constexpr int kOps = 50;
  Ranks ranks(3);
  std::vector<std::vector<int>> got(3, std::vector<int>(kOps, -1));
  std::vector<Ticket> tickets;
  for (int r = 0; r < 3; ++r) {
    for (int i = 0; i < kOps; ++i) {
      const int op = r == 1 ? kOps - 1 - i : (r == 2 ? (i * 7) % kOps : i);  // another order on each rank
      int& mine = got[static_cast<std::size_t>(r)][static_cast<std::size_t>(op)];
      tickets.push_back(ranks[r].submit(ranks[r].world(),
                                        {.name = "shift", .slot = static_cast<std::uint32_t>(op), .step = 3},
                                        [&mine](Comm comm) { return shift(comm, mine); }));
    }
  }
  for (const Ticket& t : tickets) t.wait();
  for (int r = 0; r < 3; ++r) {
    for (const int g : got[static_cast<std::size_t>(r)]) EXPECT_EQ(g, (r + 2) % 3);
  }
  EXPECT_LE(tickets[0].submitted(), tickets[0].started());
  EXPECT_LE(tickets[0].started(), tickets[0].finished());
}

TEST(Engine, AnIdentityInFlightIsRefusedUntilItHasEnded) {
  Ranks ranks(2);
  int a[2] = {-1, -1}, other[5] = {};
  Engine& engine = ranks[0];
  const Comm world = engine.world();
  const SubmitOptions first{.name = "first", .slot = 3, .step = 7};
  const Ticket open = engine.submit(world, first, [&](Comm c) { return shift(c, a[0]); });
  const auto try_again = [&](const Comm& comm, const SubmitOptions& options, int& got) {
    return engine.submit(comm, options, [&got](Comm c) { return shift(c, got); });
  };
  try {
    try_again(world, {.name = "second", .slot = 3, .step = 7}, other[0]);
    FAIL() << "must throw";
  } catch (const UsageError& e) {
    for (const char* part : {"second", "slot 3", "step 7", "first"})
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << part << " in: " << e.what();
  }
  // Control: another slot, step or group, or none, is another operation.
  const Comm group = world.subgroup({0, 1}, 5);
  std::vector<Ticket> mine = {try_again(world, {.slot = 4, .step = 7}, other[0]),
                              try_again(world, {.slot = 3, .step = 8}, other[1]),
                              try_again(group, {.slot = 3, .step = 7}, other[2]),
                              try_again(world, {}, other[3]), try_again(world, {}, other[4])};
  const Comm there = ranks[1].world();
  const Comm group_there = there.subgroup({0, 1}, 5);
  int theirs[7] = {};
  const auto answer = [&](const Comm& comm, const SubmitOptions& options, int& got) {
    mine.push_back(ranks[1].submit(comm, options, [&got](Comm c) { return shift(c, got); }));
  };
  answer(there, {.slot = 3, .step = 7}, theirs[0]);
  answer(there, {.slot = 4, .step = 7}, theirs[1]);
  answer(there, {.slot = 3, .step = 8}, theirs[2]);
  answer(group_there, {.slot = 3, .step = 7}, theirs[3]);
  answer(there, {}, theirs[4]);
  answer(there, {}, theirs[5]);
  open.wait();
  for (const Ticket& ticket : mine) ticket.wait();
  EXPECT_EQ(a[0], 1);
  // What has ended may come again.
  mine = {try_again(world, first, a[1])};
  answer(there, {.slot = 3, .step = 7}, theirs[6]);
  for (const Ticket& ticket : mine) ticket.wait();
  EXPECT_EQ(a[1], 1);
}

TEST(Engine, WhatSendsNothingHasNoIdentity) {
  Ranks ranks(2);
  int got[2] = {-1, -1};
  const Ticket open =
      ranks[0].submit(ranks[0].world(), {.slot = 0}, [&](Comm comm) { return shift(comm, got[0]); });
  const Ticket settled[2] = {ranks[0].settled(), ranks[0].settled()};
  // Control: one that says it sends nothing cannot.
  int none = -1;
  const Ticket liar = ranks[0].submit(ranks[0].world(), {.name = "liar", .local = true},
                                      [&](Comm comm) { return shift(comm, none); });
  EXPECT_THROW(liar.wait(), UsageError);
  EXPECT_NE(error_of(liar).find("liar was submitted as local"), std::string::npos) << error_of(liar);
  ranks[1].submit(ranks[1].world(), {.slot = 0}, [&](Comm comm) { return shift(comm, got[1]); }).wait();
  for (const Ticket& ticket : settled) ticket.wait();
  EXPECT_TRUE(open.done());
}

TEST(Engine, ASelfSendAndAWorldOfOne) {
  Ranks ranks(1);
  int got = -1;
  ranks[0].submit(ranks[0].world(), {}, [&](Comm comm) { return shift(comm, got); }).wait();
  EXPECT_EQ(got, 0);
}

TEST(Engine, LongMessagesWithoutBufferingAndOnThePool) {
  for (const std::size_t eager : {std::size_t{0}, std::size_t{8192}}) {
    Ranks ranks(2, {}, eager);
    const std::size_t n = 3u << 20;
    std::vector<std::vector<std::byte>> out(2, std::vector<std::byte>(n));
    std::vector<std::vector<std::byte>> in(2, std::vector<std::byte>(n));
    std::vector<Ticket> tickets;
    for (std::size_t r = 0; r < 2; ++r) {
      std::fill(out[r].begin(), out[r].end(), static_cast<std::byte>(r + 1));
      Engine& engine = ranks[static_cast<int>(r)];
      tickets.push_back(engine.submit(engine.world(), {},
                                      [&, r](Comm comm) { return shift_bytes(comm, out[r], in[r], 3); }));
    }
    for (std::size_t r = 0; r < 2; ++r) {
      tickets[r].wait();
      // Poison: whoever still read this after the ticket would hand on other bytes.
      std::fill(out[r].begin(), out[r].end(), std::byte{0xee});
    }
    for (std::size_t r = 0; r < 2; ++r) {
      EXPECT_EQ(in[r], std::vector<std::byte>(n, static_cast<std::byte>(2 - r)));
    }
  }
}

Task<void> bad_call(Comm comm) {
  Transfer t = comm.send(99, 0, std::span<const std::byte>());
  co_await t;
}

TEST(Engine, AUsageErrorFailsItsOwnTicketOnly) {
  Ranks ranks(2);
  const Ticket bad = ranks[0].submit(ranks[0].world(), {.slot = 1}, [](Comm comm) { return bad_call(comm); });
  EXPECT_NE(error_of(bad).find("peer 99 is outside"), std::string::npos);
  int a = -1;
  int b = -1;
  const Ticket ta = ranks[0].submit(ranks[0].world(), {.slot = 2}, [&](Comm comm) { return shift(comm, a); });
  const Ticket tb = ranks[1].submit(ranks[1].world(), {.slot = 2}, [&](Comm comm) { return shift(comm, b); });
  ta.wait();
  tb.wait();
  EXPECT_EQ(a, 1);
}

TEST(Engine, ADeadlineNamesOperationStepAndPeerAndFailsEverythingInFlight) {
  Ranks ranks(3);
  int got = 0;
  const Ticket late =
      ranks[0].submit(ranks[0].world(), {.name = "lonely", .slot = 4, .step = 12, .timeout = 100ms},
                      [&](Comm comm) { return shift(comm, got); });
  int other = 0;
  const Ticket innocent = ranks[0].submit(ranks[0].world(), {.name = "bystander", .slot = 5, .step = 12},
                                          [&](Comm comm) { return shift(comm, other); });
  const std::string what = error_of(late);
  for (const char* part : {"rank 0", "lonely", "slot 4", "step 12", "waiting for rank 2", "hop 0", "0.1"}) {
    EXPECT_NE(what.find(part), std::string::npos) << part << " in: " << what;
  }
  EXPECT_EQ(error_of(innocent), what) << "one cause for all";
  EXPECT_THROW(late.wait(), TimeoutError);
  // The peers stop too, and quote the cause. (What rank 0 had sent before may still arrive: this needs more
  // from it.)
  std::vector<std::byte> never(sizeof(int));
  const Ticket peer = ranks[1].submit(ranks[1].world(), {.name = "peer", .slot = 4, .step = 12},
                                      [&](Comm comm) { return shift_bytes(comm, never, never, 2); });
  const std::string theirs = error_of(peer);
  EXPECT_NE(theirs.find("rank 0 has left the job"), std::string::npos) << theirs;
  EXPECT_NE(theirs.find("lonely"), std::string::npos) << theirs;
  const Ticket after =
      ranks[0].submit(ranks[0].world(), {.slot = 9}, [&](Comm comm) { return shift(comm, got); });
  EXPECT_EQ(error_of(after), what) << "later submissions fail with the same cause";
}

TEST(Engine, AMismatchIsToldOnTheRankConcerned) {
  Ranks ranks(2);
  std::vector<std::byte> small(8);
  std::vector<std::byte> large(16);
  const Ticket a = ranks[0].submit(ranks[0].world(), {.slot = 1},
                                   [&](Comm comm) { return shift_bytes(comm, small, small, 1); });
  const Ticket b = ranks[1].submit(ranks[1].world(), {.slot = 1},
                                   [&](Comm comm) { return shift_bytes(comm, large, large, 1); });
  const std::string what = error_of(a) + " | " + error_of(b);
  EXPECT_NE(what.find("length"), std::string::npos) << what;
}

TEST(Engine, StoppingARankFailsTheOthersThatNeedIt) {
  Ranks ranks(2);
  int got = 0;
  const Ticket t = ranks[0].submit(ranks[0].world(), {.name = "needs rank 1", .slot = 1},
                                   [&](Comm comm) { return shift(comm, got); });
  ranks.stop(1);
  EXPECT_NE(error_of(t).find("rank 1 has left the job"), std::string::npos);
  EXPECT_THROW(t.wait(), TransportError);
}

TEST(Engine, DestroyingAnEngineFailsWhatIsInFlight) {
  int got = 0;
  Ticket t;
  {
    Ranks ranks(2);
    t = ranks[0].submit(ranks[0].world(), {.slot = 1}, [&](Comm comm) { return shift(comm, got); });
  }
  EXPECT_TRUE(t.done());
  EXPECT_THROW(t.wait(), TransportError);
}

Task<void> await_two(Ticket a, Ticket b, std::atomic<int>& state) {
  co_await a;
  co_await b;
  state = 1;
}

TEST(Engine, SettledWaitsForWhatWasSubmittedBeforeEvenWhereItIsHeldOrFails) {
  Ranks ranks(2, {.hold_limit = 3600s});
  for (int r = 0; r < 2; ++r) ranks[r].hold();
  ranks[0].settled().wait();  // nothing in flight
  std::vector<int> got(2, -1);
  std::vector<Ticket> shifts;
  const Ticket wrong = ranks[0].submit(ranks[0].world(), {.slot = 9},
                                       [](Comm) -> Task<void> { throw UsageError("this call only"); });
  for (int r = 0; r < 2; ++r) {
    int& mine = got[static_cast<std::size_t>(r)];
    shifts.push_back(
        ranks[r].submit(ranks[r].world(), {.slot = 1}, [&mine](Comm c) { return shift(c, mine); }));
  }
  std::this_thread::sleep_for(20ms);
  EXPECT_FALSE(shifts[0].done());  // held
  const std::vector<Ticket> settled = {ranks[0].settled(), ranks[1].settled()};
  for (const Ticket& ticket : settled) ticket.wait();
  EXPECT_TRUE(shifts[0].done() && shifts[1].done() && wrong.done());
  EXPECT_EQ(got, (std::vector<int>{1, 0}));
}

TEST(Ticket, CoroutinesAwaitAndContinuationsRun) {
  Ranks ranks(2);
  int g[4] = {-1, -1, -1, -1};
  std::vector<Ticket> tickets;
  std::atomic<int> continued{0};
  for (std::uint32_t slot = 0; slot < 2; ++slot) {
    for (int r = 0; r < 2; ++r) {
      int& mine = g[2 * slot + static_cast<unsigned>(r)];
      tickets.push_back(ranks[r].submit(ranks[r].world(), {.slot = slot},
                                        [&mine](Comm comm) { return shift(comm, mine); }));
      tickets.back().then([&] { continued.fetch_add(1); });
    }
  }
  std::atomic<int> state{0};
  const Ticket a = tickets[0];
  const Ticket b = tickets[2];
  ranks[0].submit(ranks[0].world(), {.slot = 7}, [&](Comm) { return await_two(a, b, state); }).wait();
  EXPECT_EQ(state.load(), 1);
  for (const Ticket& t : tickets) t.wait();
  for (int i = 0; i < 1000 && continued.load() < 4; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(continued.load(), 4);
}

Task<void> await_one(Ticket ticket) { co_await ticket; }

TEST(Ticket, WhoAwaitsOneKeepsItsOwnDeadline) {
  Ranks ranks(2);
  int got = 0;
  const Ticket stuck = ranks[0].submit(ranks[0].world(), {.name = "stuck", .slot = 1, .timeout = 60s},
                                       [&](Comm comm) { return shift(comm, got); });
  const auto start = std::chrono::steady_clock::now();
  const Ticket waiter = ranks[0].submit(ranks[0].world(), {.name = "waiter", .local = true, .timeout = 100ms},
                                        [stuck](Comm) { return await_one(stuck); });
  EXPECT_NE(error_of(waiter).find("waiter did not end within 0.1"), std::string::npos) << error_of(waiter);
  EXPECT_THROW(waiter.wait(), TimeoutError);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 30s);
  EXPECT_EQ(error_of(stuck), error_of(waiter)) << "one cause for all";
}

TEST(Ticket, AContinuationThatThrowsFailsTheEngineAndNotTheProcess) {
  Ranks ranks(1);
  int got = -1;
  std::atomic<bool> other{false};
  ranks[0].hold();  // until both continuations are there
  const Ticket ticket = ranks[0].submit(ranks[0].world(), {.slot = 1},
                                        [&](Comm comm) { return compute_for(comm, 20ms, false); });
  ticket.then([] { throw std::runtime_error("a bad continuation"); });
  ticket.then([&] { other = true; });
  EXPECT_EQ(error_of(ticket), "") << "the operation itself went well";
  const Ticket after = ranks[0].submit(ranks[0].world(), {.slot = 2}, [&](Comm c) { return shift(c, got); });
  EXPECT_EQ(error_of(after), "a bad continuation");
  EXPECT_TRUE(other);
}

// One message every 200 ms: late for a limit on the whole, never for one that counts from the last progress.
Task<void> slow_talk(Comm comm, std::span<std::byte> memory) {
  for (std::uint32_t hop = 0; hop < 8; ++hop) {
    if (comm.rank() == 0) co_await comm.sleep_until(comm.now() + 200ms);
    Transfer received = comm.recv(comm.before(1), hop, memory.first(1));
    Transfer sent = comm.send(comm.after(1), hop, memory.last(1));
    co_await received;
    co_await sent;
  }
}

TEST(Engine, ADeadlineCountsFromTheLastProgress) {
  for (const Time limit : {Time(kNever), Time(1s)}) {
    Ranks ranks(2);
    std::vector<std::byte> memory[2] = {std::vector<std::byte>(2), std::vector<std::byte>(2)};
    std::vector<Ticket> tickets;
    for (int r = 0; r < 2; ++r) {
      const std::span<std::byte> mine(memory[r]);
      tickets.push_back(ranks[r].submit(ranks[r].world(),
                                        {.name = "slow", .slot = 1, .timeout = 1s, .time_limit = limit},
                                        [mine](Comm comm) { return slow_talk(comm, mine); }));
    }
    const std::string errors[2] = {error_of(tickets[0]), error_of(tickets[1])};
    if (limit == kNever) {
      EXPECT_EQ(errors[0] + errors[1], "");
    } else {
      EXPECT_NE((errors[0] + errors[1]).find("did not end within 1.0"), std::string::npos) << errors[0];
    }
  }
}

// Gradients in flight while blocking operations come and go: the trace shows that nothing started when it
// must not.
void mixed_traffic(Ranks& ranks) {
  const std::size_t n = 1u << 14;
  std::vector<std::vector<std::byte>> out(2, std::vector<std::byte>(n));
  std::vector<std::vector<std::byte>> in(2, std::vector<std::byte>(n * 40));
  std::vector<Ticket> gradients;
  std::vector<Ticket> urgent;
  for (std::uint32_t i = 0; i < 20; ++i) {
    for (int r = 0; r < 2; ++r) {
      Engine& engine = ranks[r];
      const auto rank = static_cast<std::size_t>(r);
      const auto piece = std::span(in[rank]).subspan(n * i, n);
      gradients.push_back(
          engine.submit(engine.world(), {.name = "gradient", .slot = i},
                        [&, rank, piece](Comm comm) { return shift_bytes(comm, out[rank], piece, 20); }));
    }
    if (i % 4 == 3) {
      for (int r = 0; r < 2; ++r) {
        Engine& engine = ranks[r];
        const auto rank = static_cast<std::size_t>(r);
        const auto piece = std::span(in[rank]).subspan(n * (20 + i), n);
        urgent.push_back(engine.submit(
            engine.world(), {.name = "urgent", .traffic = TrafficClass::blocking, .slot = 100 + i},
            [&, rank, piece](Comm comm) { return shift_bytes(comm, out[rank], piece, 5); }));
      }
    }
  }
  for (const Ticket& t : urgent) t.wait();
  for (const Ticket& t : gradients) t.wait();
}

TEST(Scheduler, GradientsGiveWayAndTheTraceShowsIt) {
  std::size_t micro_ops = 0;
  {
    Ranks ranks(2, {.window_bytes = 1u << 15}, 0, true);
    mixed_traffic(ranks);
    ranks.stop(0);
    ranks.stop(1);
    for (int r = 0; r < 2; ++r) {
      EXPECT_EQ(verify_trace(ranks.trace(r)).breaches, std::vector<std::string>());
      for (const TraceEvent& e : ranks.trace(r).events())
        micro_ops += e.kind == TraceEvent::Kind::micro_op ? 1u : 0u;
    }
  }
  EXPECT_EQ(micro_ops, 2u * (20 * 20 + 5 * 5));
  // Control: without priorities the same traffic breaks the rule, so the verifier can see it.
  Ranks ranks(2, {.priority = false, .window_bytes = 1u << 15}, 0, true);
  mixed_traffic(ranks);
  ranks.stop(0);
  ranks.stop(1);
  EXPECT_FALSE(verify_trace(ranks.trace(0)).breaches.empty() &&
               verify_trace(ranks.trace(1)).breaches.empty());
  const Trace* traces[] = {&ranks.trace(0), &ranks.trace(1)};
  const std::string json = chrome_trace(traces);
  EXPECT_NE(json.find("\"ph\":\"X\""), std::string::npos);
  EXPECT_NE(json.find("rank 1"), std::string::npos);
  EXPECT_NE(json.find("\"left_out\":0}"), std::string::npos);
}

TEST(Scheduler, HoldDelaysGradientsAndAgingBoundsIt) {
  Ranks ranks(2, {.hold_limit = 60ms}, 0, true);
  ranks[0].hold();
  int a = -1;
  int b = -1;
  const Ticket ta = ranks[0].submit(ranks[0].world(), {.slot = 1}, [&](Comm comm) { return shift(comm, a); });
  const Ticket tb = ranks[1].submit(ranks[1].world(), {.slot = 1}, [&](Comm comm) { return shift(comm, b); });
  std::atomic<bool> ended{false};
  ta.then([&] { ended = true; });  // no wait: the gradient stays held
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(ended.load());
  const auto start = std::chrono::steady_clock::now();
  while (!ended.load() && std::chrono::steady_clock::now() - start < std::chrono::seconds(10)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_TRUE(ended.load());
  EXPECT_GE(ta.finished() - ta.started(), 55ms);
  tb.wait();
  ranks[0].release();
  ranks.stop(0);
  const TraceReport report = verify_trace(ranks.trace(0));
  EXPECT_GT(report.aged, 0u);
  EXPECT_EQ(report.wanted, 0u);
}

TEST(Scheduler, SomebodyWhoWaitsEndsTheHold) {
  Ranks ranks(2, {.hold_limit = 10s}, 0, true);
  ranks[0].hold();
  int a = -1;
  int b = -1;
  const Ticket ta = ranks[0].submit(ranks[0].world(), {.slot = 1}, [&](Comm comm) { return shift(comm, a); });
  const Ticket tb = ranks[1].submit(ranks[1].world(), {.slot = 1}, [&](Comm comm) { return shift(comm, b); });
  ta.wait();
  tb.wait();
  EXPECT_LT(ta.finished() - ta.submitted(), 5s);
  ranks[0].release();
  ranks.stop(0);
  const TraceReport report = verify_trace(ranks.trace(0));
  EXPECT_GT(report.wanted, 0u);
  EXPECT_EQ(report.aged, 0u);
}

TEST(Scheduler, AWindowOfOneMessageDoesNotDeadlock) {
  // Opposite orders on the two ranks, no buffering, one message at a time: only giving back stalled places
  // gets through.
  Ranks ranks(2, {.window_bytes = 1, .stall_limit = 1ms}, 0);
  const std::size_t n = 4096;
  std::vector<std::vector<std::byte>> out(2, std::vector<std::byte>(n));
  std::vector<std::vector<std::byte>> in(2, std::vector<std::byte>(n * 8));
  std::vector<Ticket> tickets;
  for (std::uint32_t i = 0; i < 8; ++i) {
    for (int r = 0; r < 2; ++r) {
      const auto rank = static_cast<std::size_t>(r);
      const std::uint32_t op = r == 0 ? i : 7 - i;
      const auto piece = std::span(in[rank]).subspan(n * op, n);
      tickets.push_back(
          ranks[r].submit(ranks[r].world(), {.slot = op, .timeout = 20s},
                          [&, rank, piece](Comm comm) { return shift_bytes(comm, out[rank], piece, 4); }));
    }
  }
  for (const Ticket& t : tickets) EXPECT_EQ(error_of(t), "");
}

Task<void> send_all(Comm comm, std::span<const std::byte> out, int messages) {
  std::vector<Transfer> sends;
  for (int i = 0; i < messages; ++i) sends.push_back(comm.send(1, static_cast<std::uint32_t>(i), out));
  for (Transfer& sent : sends) co_await sent;
}

// Messages of a micro-op that rank 0 hands to its transport for a peer that takes none of them.
std::uint64_t handed_over(Time quiet) {
  constexpr std::size_t kMicroOp = 1024;
  constexpr int kMessages = 40;
  ThreadsWorld world(ThreadsOptions{.ranks = 2, .eager_limit = 0, .tamper = {}});
  RecordingTransport recorded(world.transport(0));
  const EngineOptions options{.stall_limit = kNever};
  Engine engine(recorded, options, nullptr);
  engine.world().endpoint().set_micro_op_bytes(kMicroOp);
  const std::vector<std::byte> out(kMicroOp);
  const auto poll_for = [&engine](Time time) {
    for (const auto start = std::chrono::steady_clock::now();
         std::chrono::steady_clock::now() - start < time;)
      engine.poll();
  };
  poll_for(quiet);
  engine.submit(engine.world(), {.slot = 2}, [&](Comm comm) { return send_all(comm, out, kMessages); });
  poll_for(5ms);
  return recorded.traffic(2, 0).payload_bytes_sent / kMicroOp;
}

TEST(Scheduler, TheWindowIsWideWhereNothingIsUrgent) {
  EXPECT_EQ(handed_over(0ms), 2U);
  EXPECT_EQ(handed_over(1050ms), 16U);
}

TEST(Engine, SteadyStateAllocatesNothingPerMessage) {
  Ranks ranks(2);
  std::vector<std::byte> out(1000);
  std::vector<std::vector<std::byte>> in(2, std::vector<std::byte>(1000));
  const auto round = [&](std::uint32_t step) {
    std::vector<Ticket> tickets;
    for (int r = 0; r < 2; ++r) {
      const auto rank = static_cast<std::size_t>(r);
      tickets.push_back(ranks[r].submit(ranks[r].world(), {.slot = 1, .step = step}, [&, rank](Comm comm) {
        return shift_bytes(comm, out, in[rank], 50);
      }));
    }
    for (const Ticket& t : tickets) t.wait();
  };
  for (std::uint32_t step = 0; step < 20; ++step) round(step);
  const std::uint64_t before = ranks[0].world().arena().fresh();
  for (std::uint32_t step = 20; step < 60; ++step) round(step);
  EXPECT_LE(ranks[0].world().arena().fresh() - before, 2u) << "2,000 messages";
}

Task<void> compute_there(Comm comm, std::thread::id& where, bool fail) {
  auto work = [&where, fail] {
    where = std::this_thread::get_id();
    if (fail) throw UsageError("this computation cannot be done");
  };
  co_await comm.compute(work);
}

TEST(Compute, RunsOnAWorkerAndThrowsWhereItIsAwaited) {
  Ranks ranks(1);
  std::thread::id where;
  std::thread::id engine_thread;
  ranks[0]
      .submit(ranks[0].world(), {.slot = 1},
              [&](Comm comm) {
                engine_thread = std::this_thread::get_id();
                return compute_there(comm, where, false);
              })
      .wait();
  EXPECT_NE(where, std::thread::id());
  EXPECT_NE(where, engine_thread);
  const Ticket bad = ranks[0].submit(ranks[0].world(), {.slot = 2},
                                     [&](Comm comm) { return compute_there(comm, where, true); });
  EXPECT_EQ(error_of(bad), "this computation cannot be done");
}

double thread_cpu_of_process() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         1e-6 * static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

TEST(CommunicationThread, AnIdleOneSleeps) {
  Ranks ranks(8);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const double before = thread_cpu_of_process();
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  const double share = (thread_cpu_of_process() - before) / 0.5;
  EXPECT_LT(share, 8 * 0.01) << "eight idle threads, 1 % of a core each";
}

}  // namespace
}  // namespace weft
