// What holds gradient traffic back, and for how long, in virtual time: 100 MB/s, 50 us, no message leaves
// before its receiver has posted.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "weft/engine.h"
#include "weft/error.h"
#include "world/sim_ranks.h"

namespace weft {
namespace {

constexpr std::uint32_t kGradient = 1;
constexpr std::uint32_t kBlocking = 2;

class TwoRanks {
 public:
  explicit TwoRanks(Time hold_limit) : ranks_(options(hold_limit, traces_)) {}
  Engine& operator[](int r) { return ranks_.engine(r); }

  // One message of 10 kB from each rank to the other.
  void submit_gradients() {
    for (int r = 0; r < 2; ++r) {
      const auto out = std::span(gradients_[r]);
      const auto in = std::span(gradients_[2 + r]);
      gradient_[r] = (*this)[r].submit((*this)[r].world(), {.name = "gradient", .slot = kGradient},
                                       [out, in](Comm comm) { return exchange(comm, out, in); });
    }
  }
  const Ticket& gradient(int r) const { return gradient_[r]; }
  // Virtual seconds from submission to the end of rank 0's gradient.
  double gradient_seconds() {
    wait_for({gradient_[0], gradient_[1]});
    return seconds(gradient_[0].finished() - gradient_[0].submitted());
  }
  Ticket submit_blocking(int r, const SubmitOptions& options, Engine::Make make) {
    return (*this)[r].submit((*this)[r].world(), options, std::move(make));
  }
  void wait_for(const std::vector<Ticket>& tickets) {
    const auto done = [&] {
      return std::all_of(tickets.begin(), tickets.end(), [](const Ticket& t) { return t.done(); });
    };
    ASSERT_TRUE(ranks_.world().run_until(done));
  }
  void pass(Time time) {
    const Time end = (*this)[0].now() + time;
    const SubmitOptions options{.name = "clock", .slot = 9};
    wait_for({(*this)[0].submit((*this)[0].world(), options, [end](Comm comm) { return sleep(comm, end); })});
  }
  TraceReport report(int r) const { return verify_trace(traces_[static_cast<std::size_t>(r)]); }
  std::size_t holds(int r) const {
    const auto events = traces_[static_cast<std::size_t>(r)].events();
    return static_cast<std::size_t>(std::count_if(
        events.begin(), events.end(), [](const TraceEvent& e) { return e.kind == TraceEvent::Kind::hold; }));
  }

 private:
  static SimRanksOptions options(Time hold_limit, std::vector<Trace>& traces) {
    SimRanksOptions options;
    options.sim.link.ranks = 2;
    options.sim.link.latency_seconds = 50e-6;
    options.sim.link.bytes_per_second = 100e6;
    options.sim.eager_limit = 0;
    options.config.hold_limit = hold_limit;
    options.traces = &traces;
    return options;
  }
  static Task<void> exchange(Comm comm, std::span<const std::byte> out, std::span<std::byte> in) {
    Transfer received = comm.recv(comm.before(1), 0, in);
    Transfer sent = comm.send(comm.after(1), 0, out);
    co_await received;
    co_await sent;
  }
  static Task<void> sleep(Comm comm, Time until) { co_await comm.sleep_until(until); }

  std::vector<std::byte> gradients_[4]{std::vector<std::byte>(10000), std::vector<std::byte>(10000),
                                       std::vector<std::byte>(10000), std::vector<std::byte>(10000)};
  std::vector<Trace> traces_ = std::vector<Trace>(2);
  SimRanks ranks_;
  Ticket gradient_[2];
};

Task<void> receive(Comm comm, std::span<std::byte> in) {
  Transfer received = comm.recv(1, 0, in);
  co_await received;
}
Task<void> send_later(Comm comm, std::span<const std::byte> out, Time wait) {
  co_await comm.sleep_until(comm.now() + wait);
  Transfer sent = comm.send(0, 0, out);
  co_await sent;
}
Task<void> send(Comm comm, std::span<const std::byte> out) {
  Transfer sent = comm.send(1, 0, out);
  co_await sent;
}
Task<void> receive_later(Comm comm, std::span<std::byte> in, Time wait) {
  co_await comm.sleep_until(comm.now() + wait);
  Transfer received = comm.recv(0, 0, in);
  co_await received;
}

// Rank 0 waits for 20 ms in a blocking operation for what rank 1 sends late; seconds that its gradient takes
// meanwhile.
double beside_a_late_peer(bool holds) {
  TwoRanks ranks(3600s);
  std::vector<std::byte> in(1000);
  const std::vector<std::byte> out(1000);
  const SubmitOptions options{
      .name = "late", .traffic = TrafficClass::blocking, .slot = kBlocking, .holds = holds};
  const Ticket there = ranks.submit_blocking(0, options, [&](Comm comm) { return receive(comm, in); });
  const Ticket here =
      ranks.submit_blocking(1, options, [&](Comm comm) { return send_later(comm, out, 20ms); });
  ranks.submit_gradients();
  const double took = ranks.gradient_seconds();
  ranks.wait_for({there, here});
  for (int r = 0; r < 2; ++r) {
    EXPECT_EQ(ranks.report(r).breaches, std::vector<std::string>());
    EXPECT_EQ(ranks.report(r).aged, 0u);
    EXPECT_EQ(ranks.holds(r), holds ? 1u : 0u);
  }
  return took;
}

TEST(Holding, ABlockingReceiveThatWaitsHoldsNothing) {
  EXPECT_LT(beside_a_late_peer(false), 0.001);
  // Control: an operation that says so holds from its submission to its end.
  EXPECT_GT(beside_a_late_peer(true), 0.020);
}

TEST(Holding, ABlockingSendHoldsUntilItIsDone) {
  TwoRanks ranks(3600s);
  const std::vector<std::byte> out(200'000);
  std::vector<std::byte> in(200'000);
  const SubmitOptions options{.name = "activations", .traffic = TrafficClass::blocking, .slot = kBlocking};
  const Ticket there = ranks.submit_blocking(0, options, [&](Comm comm) { return send(comm, out); });
  const Ticket here =
      ranks.submit_blocking(1, options, [&](Comm comm) { return receive_later(comm, in, 10ms); });
  ranks.submit_gradients();
  EXPECT_GT(ranks.gradient_seconds(), 0.010 + 0.002);
  ranks.wait_for({there, here});
  EXPECT_EQ(ranks.report(0).breaches, std::vector<std::string>());
  EXPECT_EQ(ranks.holds(0), 0u) << "nothing was announced";
}

// When the gradient of rank 0 starts, although nobody releases what holds.
double aged_after(Time hold_limit, double predicted_seconds, bool by_operation) {
  TwoRanks ranks(hold_limit);
  std::vector<std::byte> in(10);
  const std::vector<std::byte> out(10);
  std::vector<Ticket> others;
  if (by_operation) {
    const SubmitOptions options{.name = "all-to-all",
                                .traffic = TrafficClass::blocking,
                                .slot = kBlocking,
                                .holds = true,
                                .predicted_seconds = predicted_seconds};
    const SubmitOptions plain{.name = "all-to-all", .traffic = TrafficClass::blocking, .slot = kBlocking};
    others.push_back(ranks.submit_blocking(0, options, [&](Comm comm) { return receive(comm, in); }));
    others.push_back(ranks.submit_blocking(1, plain, [&](Comm comm) { return send_later(comm, out, 2s); }));
  } else {
    ranks[0].hold(predicted_seconds);
  }
  ranks.submit_gradients();
  const double took = ranks.gradient_seconds();
  ranks.wait_for(others);
  EXPECT_EQ(ranks.report(0).aged, 1u);
  EXPECT_EQ(ranks.report(0).wanted, 0u);
  EXPECT_EQ(ranks.report(0).breaches, std::vector<std::string>());
  if (!by_operation) ranks[0].release();
  return took;
}

TEST(Holding, WhatIsHeldAgesByThePredictionOfWhatHolds) {
  constexpr double kTransfer = 0.001;  // more than 10 kB need
  for (const bool by_operation : {false, true}) {
    EXPECT_NEAR(aged_after(50ms, 0, by_operation), 0.050, kTransfer);
    EXPECT_NEAR(aged_after(50ms, 0.001, by_operation), 0.050, kTransfer);
    EXPECT_NEAR(aged_after(50ms, 0.100, by_operation), 0.400, kTransfer);
  }
}

// A blocking send of 80 ms, longer than hold_limit, while gradients wait: nothing ages, because the link's
// figures say how long it takes.
TEST(Holding, ALongBlockingSendAgesNothing) {
  TwoRanks ranks(50ms);
  const std::vector<std::byte> out(8'000'000);
  std::vector<std::byte> in(8'000'000);
  const SubmitOptions options{.name = "activations", .traffic = TrafficClass::blocking, .slot = kBlocking};
  const Ticket there = ranks.submit_blocking(0, options, [&](Comm comm) { return send(comm, out); });
  const Ticket here =
      ranks.submit_blocking(1, options, [&](Comm comm) { return receive_later(comm, in, 0s); });
  ranks.submit_gradients();
  EXPECT_GT(ranks.gradient_seconds(), 0.080);
  ranks.wait_for({there, here});
  EXPECT_EQ(ranks.report(0).aged, 0u);
  EXPECT_EQ(ranks.report(0).breaches, std::vector<std::string>());
}

TEST(Holding, AnAnnouncementIsASpanOfTheTrace) {
  TwoRanks ranks(50ms);
  ranks[0].hold(0.1);
  ranks.pass(1ms);
  ranks[0].hold();  // nests
  ranks.pass(1ms);
  ranks[0].release();
  ranks.pass(1ms);
  EXPECT_EQ(ranks.holds(0), 0u);
  ranks[0].release();
  ranks.pass(1ms);
  EXPECT_EQ(ranks.holds(0), 1u);
  ranks[0].hold();
  ranks.pass(1ms);
  ranks[0].shut_down(nullptr);
  EXPECT_EQ(ranks.holds(0), 2u) << "what nobody has released ends with the engine";
}

TEST(Holding, SenselessRequestsAreRefused) {
  TwoRanks ranks(50ms);
  EXPECT_THROW(ranks[0].hold(-1), UsageError);
  EXPECT_THROW(ranks[0].hold(std::numeric_limits<double>::quiet_NaN()), UsageError);
  const auto nothing = [](Comm) -> Task<void> { co_return; };
  EXPECT_THROW(ranks.submit_blocking(0, {.holds = true}, nothing), UsageError);
  EXPECT_THROW(ranks.submit_blocking(0, {.predicted_seconds = -1}, nothing), UsageError);
  ranks.submit_gradients();
  EXPECT_LT(ranks.gradient_seconds(), 0.001) << "a refused request holds nothing";
}

}  // namespace
}  // namespace weft
