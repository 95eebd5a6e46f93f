#include "weft/trace.h"

#include <gtest/gtest.h>

#include <thread>

#include "base/identity.h"

namespace weft {
namespace {

TEST(Trace, HasItsFirstEventsAndCountsTheOthers) {
  Trace trace(2);
  for (const char* name : {"a", "b", "c", "d", "e"}) trace.add({.name = name});
  ASSERT_EQ(trace.events().size(), 2u);
  EXPECT_EQ(trace.events()[1].name, "b");
  EXPECT_EQ(trace.left_out(), 3u);
  const Trace* traces[] = {&trace};
  const std::string json = chrome_trace(traces, 5);
  EXPECT_NE(json.find("\"left_out\":3}"), std::string::npos);
  EXPECT_NE(json.find("rank 5"), std::string::npos);
  EXPECT_EQ(json.find("rank 0"), std::string::npos);
}

TEST(Trace, IsFilledFromSeveralThreads) {
  Trace trace;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&trace] {
      for (int i = 0; i < 1000; ++i) trace.add({.kind = TraceEvent::Kind::computing});
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(trace.events().size(), 4000u);
}

TEST(Trace, EveryKindHasALaneWithAName) {
  Trace trace;
  trace.add({.kind = TraceEvent::Kind::micro_op, .name = "sum", .started = 2us, .finished = 3us});
  trace.add({.kind = TraceEvent::Kind::waiting, .name = "sum of block 0", .finished = 4us});
  trace.add({.kind = TraceEvent::Kind::computing, .name = "forward \"0\"", .step = 7, .finished = 1us});
  trace.add({.kind = TraceEvent::Kind::hold, .name = "hold", .started = 1us, .finished = 5us});
  const Trace* traces[] = {&trace};
  const std::string json = chrome_trace(traces, 3);
  const auto position = [&json](const std::string& text) {
    EXPECT_NE(json.find(text), std::string::npos) << text << " in\n" << json;
    return json.find(text);
  };
  const auto lane = [&](int tid, const std::string& name) {
    const std::string of = "\"pid\":3,\"tid\":" + std::to_string(tid) + ",\"args\":{";
    position("\"thread_sort_index\"," + of + "\"sort_index\":" + std::to_string(tid) + "}");
    return position("\"thread_name\"," + of + "\"name\":\"" + name + "\"}");
  };
  EXPECT_LT(lane(0, "computing"), lane(1, "waiting"));
  EXPECT_LT(lane(1, "waiting"), lane(2, "hold"));
  EXPECT_LT(lane(2, "hold"), lane(5, "gradient"));
  EXPECT_EQ(json.find("\"delayed\""), std::string::npos) << "a lane with nothing in it";
  position(
      "\"name\":\"forward \\\"0\\\"\",\"cat\":\"computing\",\"pid\":3,\"tid\":0,\"ts\":0.000,\"dur\":1.000,"
      "\"args\":{\"step\":7}");
}

TraceEvent micro_op(TrafficClass traffic, Time ready, Time started, Time finished) {
  return {.kind = TraceEvent::Kind::micro_op,
          .name = traffic == TrafficClass::blocking ? "tokens" : "sums",
          .traffic = traffic,
          .ready = ready,
          .started = started,
          .finished = finished};
}
TraceEvent operation(TrafficClass traffic, Time ready, Time finished, bool holds) {
  return {.kind = TraceEvent::Kind::operation,
          .name = "all_to_all",
          .traffic = traffic,
          .ready = ready,
          .started = ready,
          .finished = finished,
          .holds = holds};
}

// A gradient micro-op that starts at 10 us beside something else.
TraceReport beside(TraceEvent other) {
  Trace trace;
  trace.add(micro_op(TrafficClass::gradient, 1us, 10us, 30us));
  trace.add(std::move(other));
  return verify_trace(trace);
}

TEST(VerifyTrace, FindsAGradientThatStartsWhileSomethingHolds) {
  constexpr auto kBlocking = TrafficClass::blocking;
  using Found = std::vector<std::string>;
  const std::string began = "micro-op of 'sums' (gradient, step 0, hop 0) started while ";
  // Blocking traffic waits, or is in the transport.
  EXPECT_EQ(beside(micro_op(kBlocking, 9us, 11us, 12us)).breaches,
            Found{began + "a blocking micro-op of 'tokens' was not done"});
  EXPECT_EQ(beside(micro_op(kBlocking, 8us, 9us, 11us)).breaches.size(), 1u);
  EXPECT_EQ(beside(operation(kBlocking, 2us, 20us, true)).breaches,
            Found{began + "'all_to_all' was holding"});
  EXPECT_EQ(beside({.kind = TraceEvent::Kind::hold, .ready = 9us, .started = 9us, .finished = 11us}).breaches,
            Found{began + "blocking traffic was announced"});
  // What does not hold: before, after, a blocking operation that only receives, other classes, the engine's
  // own questions, computing.
  EXPECT_TRUE(beside(micro_op(kBlocking, 2us, 2us, 10us)).breaches.empty());
  EXPECT_TRUE(beside(micro_op(kBlocking, 10us, 10us, 12us)).breaches.empty());
  EXPECT_TRUE(beside(operation(kBlocking, 2us, 20us, false)).breaches.empty());
  EXPECT_TRUE(beside(micro_op(TrafficClass::prior, 2us, 2us, 20us)).breaches.empty());
  TraceEvent question = micro_op(kBlocking, 2us, 2us, 20us);
  question.hop = kAskingHop;
  EXPECT_TRUE(beside(std::move(question)).breaches.empty());
  EXPECT_TRUE(beside({.kind = TraceEvent::Kind::computing, .finished = 20us}).breaches.empty());
}

TEST(VerifyTrace, SeesALongOneBehindShortOnes) {
  Trace trace;
  trace.add(operation(TrafficClass::blocking, 1us, 100us, true));
  for (int i = 2; i < 8; ++i) {
    const Time at = i * 5us;
    trace.add(micro_op(TrafficClass::blocking, at, at, at + 1us));
    trace.add(micro_op(TrafficClass::gradient, at + 2us, at + 2us, at + 3us));
  }
  trace.add(micro_op(TrafficClass::delayed, 0us, 101us, 102us));
  EXPECT_EQ(verify_trace(trace).breaches.size(), 6u);
}

TEST(VerifyTrace, CountsStartsThatWereNotHeldAndForgivesThem) {
  Trace trace;
  trace.add(operation(TrafficClass::blocking, 1us, 100us, true));
  for (const Unheld why : {Unheld::aged, Unheld::wanted, Unheld::aged, Unheld::no}) {
    TraceEvent e = micro_op(TrafficClass::gradient, 2us, 50us, 60us);
    e.unheld = why;
    trace.add(e);
  }
  const TraceReport report = verify_trace(trace);
  EXPECT_EQ(report.aged, 2u);
  EXPECT_EQ(report.wanted, 1u);
  EXPECT_EQ(report.breaches.size(), 1u);
  const Trace* traces[] = {&trace};
  const std::string json = chrome_trace(traces);
  const auto count = [&json](const std::string& text) {
    int found = 0;
    for (std::size_t at = json.find(text); at != std::string::npos; at = json.find(text, at + 1)) ++found;
    return found;
  };
  EXPECT_EQ(count("\"aged\":true"), 2);
  EXPECT_EQ(count("\"wanted\":true"), 1);
}

// A micro-op that starts at 20 us beside one that is queued from 1 us on and starts at 30 us.
std::vector<std::string> overtakes(TrafficClass first, int first_priority, TrafficClass second,
                                   int second_priority, Unheld why = Unheld::no) {
  Trace trace;
  TraceEvent e = micro_op(first, 2us, 20us, 40us);
  e.priority = first_priority;
  e.unheld = why;
  trace.add(e);
  e = micro_op(second, 1us, 30us, 50us);
  e.priority = second_priority;
  trace.add(e);
  return verify_trace(trace).breaches;
}

TEST(VerifyTrace, FindsOneThatOvertakesAHigherOne) {
  constexpr auto kPrior = TrafficClass::prior, kGradient = TrafficClass::gradient,
                 kDelayed = TrafficClass::delayed;
  EXPECT_EQ(
      overtakes(kGradient, 0, kPrior, 9),
      std::vector<std::string>{"micro-op of 'sums' (gradient, step 0, hop 0) started before a micro-op of "
                               "'sums' (prior, step 0, hop 0), which was queued and goes first"});
  EXPECT_EQ(overtakes(kDelayed, 0, kGradient, 9).size(), 1u);
  EXPECT_EQ(overtakes(kGradient, 3, kGradient, 2).size(), 1u);
  EXPECT_TRUE(overtakes(kPrior, 9, kGradient, 0).empty());
  EXPECT_TRUE(overtakes(kGradient, 2, kGradient, 2).empty());
  EXPECT_TRUE(overtakes(kGradient, 2, kGradient, 3).empty());
  EXPECT_TRUE(overtakes(kGradient, 0, kPrior, 0, Unheld::wanted).empty());
  // One that comes or starts at the same instant is not overtaken.
  for (const Time ready : {20us, 25us}) {
    Trace trace;
    trace.add(micro_op(kGradient, 2us, 20us, 40us));
    trace.add(micro_op(kPrior, ready, 30us, 50us));
    EXPECT_TRUE(verify_trace(trace).breaches.empty());
  }
}

TEST(VerifyTrace, FindsALinkThatIdlesWhileWorkIsQueued) {
  const auto idles = [](Time ready, Time idle, const TraceEvent* more = nullptr) {
    Trace trace;
    trace.add(micro_op(TrafficClass::gradient, 0us, 0us, 10us));
    trace.add(micro_op(TrafficClass::gradient, ready, 30us, 40us));
    if (more != nullptr) trace.add(*more);
    return verify_trace(trace, idle).breaches;
  };
  EXPECT_EQ(idles(5us, 0us),
            std::vector<std::string>{"micro-op of 'sums' (gradient, step 0, hop 0) was queued "
                                     "while nothing was under way and nothing held"});
  EXPECT_EQ(idles(12us, 17us).size(), 1u);
  EXPECT_TRUE(idles(12us, 18us).empty());  // as long as one may take to see it
  EXPECT_TRUE(idles(30us, 0us).empty());   // nothing was queued
  EXPECT_TRUE(idles(5us, kNever).empty());
  const TraceEvent held = operation(TrafficClass::blocking, 10us, 30us, true);
  EXPECT_TRUE(idles(5us, 0us, &held).empty());
  const TraceEvent half = micro_op(TrafficClass::prior, 10us, 10us, 20us);
  EXPECT_EQ(idles(5us, 0us, &half).size(), 1u);
  const TraceEvent whole = micro_op(TrafficClass::prior, 10us, 10us, 30us);
  EXPECT_TRUE(idles(5us, 0us, &whole).empty());
}

TEST(VerifyTrace, SaysThatEventsWereLeftOut) {
  for (const std::size_t most : {std::size_t{2}, std::size_t{1}}) {
    Trace trace(most);
    trace.add(micro_op(TrafficClass::gradient, 1us, 10us, 30us));
    trace.add(micro_op(TrafficClass::gradient, 1us, 20us, 30us));
    const std::vector<std::string> breaches = verify_trace(trace).breaches;
    if (most == 2) {
      EXPECT_TRUE(breaches.empty());  // control: the whole trace is clean
    } else {
      EXPECT_EQ(breaches,
                std::vector<std::string>{"the trace lacks 1 of the events: what they broke is not known"});
    }
  }
}

}  // namespace
}  // namespace weft
