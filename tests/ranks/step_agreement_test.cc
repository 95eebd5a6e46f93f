// What ranks agree on before a step: plans of groups, and announcements of blocking traffic.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <mutex>
#include <thread>

#include "data_parallel/data_parallel.h"
#include "step_toys.h"
#include "weft/collective.h"
#include "weft/error.h"
#include "weft/trace.h"
#include "weft/world.h"

namespace weft {
namespace {

// ---- plans of a group ----

// Sums one parameter over a group; says of it whatever the test wants.
class Sum final : public Strategy {
 public:
  Sum(Engine& engine, const Comm& group, PlanRow row, Exchange exchange)
      : engine_(engine), group_(group), row_(std::move(row)), exchange_(std::move(exchange)) {
    row_.group = exchange_.group = group.group_id();
  }
  std::string_view name() const override { return "sum"; }
  const Comm& group() const override { return group_; }
  std::uint32_t num_slots() const override { return 1; }
  std::vector<PlanRow> rows() const override { return {row_}; }
  std::vector<Exchange> exchanges() const override { return {exchange_}; }
  std::vector<std::string> gradients() const override { return {row_.tensor}; }
  void weave(Weaver& weaver) const override {
    const int parameter = row_.tensor == "a" ? 0 : 1;
    weaver.after({Work::backward, parameter, 0, 0}, start_inside(0));
    weaver.before({Work::update, parameter, 0, 0}, wait_of(0, weaver.last()));
  }
  void gradient_ready(int, std::span<const double> gradient) override {
    sum_.assign(gradient.begin(), gradient.end());
    const SubmitOptions submit{.name = "sum", .slot = exchange_.slot, .step = step_++};
    const Dense data(std::span<double>{sum_});
    ticket_ = engine_.submit(group_, submit, [data](Comm comm) { return all_reduce(comm, data); });
  }
  Ticket ticket(int, const When&) const override { return ticket_; }
  void result_of(int, std::span<double> out) const override { std::ranges::copy(sum_, out.begin()); }
  StepResult verdict() override {
    const bool finite = std::ranges::all_of(sum_, [](double v) { return std::isfinite(v); });
    return {.committed = finite, .step = 0, .bad = {}, .text = finite ? "" : "the sum is not finite"};
  }
  void close(bool, double) override {}

 private:
  Engine& engine_;
  Comm group_;
  PlanRow row_;
  Exchange exchange_;
  std::uint32_t step_ = 0;
  Ticket ticket_;
  std::vector<double> sum_;
};

struct Sums final : WaitingDriver {
  Sums(World& world, const StepOptions& options, const ModelShape& shape)
      : strategies(world.engine(), world.comm(), shape, options), walker(*this, strategies) {}
  void add(Engine& engine, const Comm& group, PlanRow row, Exchange exchange) {
    exchange.slot = row.slot = strategies.next_slot(group);
    if (exchange.reads.empty()) exchange.reads = exchange.writes = {{TensorName::Of::gradient, row.tensor}};
    strategies.add(std::make_unique<Sum>(engine, group, std::move(row), std::move(exchange)));
  }
  void run(int steps) {
    for (int step = 0; step < steps; ++step) {
      strategies.number_step(step);
      strategies.batch_known({.tokens = 1});
      walker.walk(strategies.next_table(1));
      if (strategies.result()) committed.push_back(strategies.result()->committed);
    }
    walker.walk(strategies.tables(1).settle);
    if (strategies.result()) committed.push_back(strategies.result()->committed);
  }
  Task<void> compute(Piece piece) override {
    if (piece.work == Work::forward) strategies.loss_known(1);
    if (piece.work == Work::backward) {
      const auto value = std::array{1.0, strategies.step() == bad_step ? std::nan("") : 1.0};
      gradients[static_cast<std::size_t>(piece.block)] = value;
      strategies.gradient_ready(piece.block,
                                std::span<const double>(gradients[static_cast<std::size_t>(piece.block)]));
    }
    co_return;
  }
  Strategies strategies;
  Walker walker;
  std::array<std::array<double, 2>, 2> gradients{};
  std::uint32_t bad_step = 1000;
  std::vector<bool> committed;
};

// Of every rank, what ended it; "" where nothing did.
template <class F>
std::vector<std::string> texts_of(int size, const F& f) {
  std::vector<std::string> texts(static_cast<std::size_t>(size));
  try {
    run_ranks(size, [&](World& world) {
      try {
        f(world);
      } catch (const Error& e) {
        texts[static_cast<std::size_t>(world.rank())] = e.what();
        world.engine().abandon(std::current_exception());
        throw;
      }
    });
  } catch (const Error&) {
    return texts;
  }
  return texts;
}

TEST(Plans, RanksThatDifferInAnyFieldOfARowOrAnExchangeAreNamed) {
  using Change = std::function<void(PlanRow&, Exchange&)>;
  const std::vector<std::pair<const char*, Change>> changes{
      {"nothing", [](PlanRow&, Exchange&) {}},
      {"count", [](PlanRow& r, Exchange&) { r.count = 3; }},
      {"strategy", [](PlanRow& r, Exchange&) { r.strategy = "other"; }},
      {"ranks", [](PlanRow& r, Exchange&) { r.ranks = 3; }},
      {"divisor", [](PlanRow& r, Exchange&) { r.divisor = 4; }},
      {"scheme", [](PlanRow& r, Exchange&) { r.scheme = "spardl"; }},
      {"codec", [](PlanRow& r, Exchange&) { r.codec = "coo"; }},
      {"class", [](PlanRow& r, Exchange&) { r.traffic = TrafficClass::prior; }},
      {"bytes", [](PlanRow& r, Exchange&) { r.bytes = 1; }},
      {"seconds", [](PlanRow& r, Exchange&) { r.seconds = 1; }},
      {"why", [](PlanRow& r, Exchange&) { r.why = "for another reason"; }},
      {"exchange", [](PlanRow&, Exchange& e) { e.name = "other"; }},
      {"codec of the exchange", [](PlanRow&, Exchange& e) { e.codec = "coo"; }},
      {"class of the exchange", [](PlanRow&, Exchange& e) { e.traffic = TrafficClass::prior; }},
      {"tensors",
       [](PlanRow&, Exchange& e) {
         e.reads = {{TensorName::Of::gradient, "a"}, {TensorName::Of::other, "x"}},
         e.writes = {{TensorName::Of::gradient, "a"}};
       }},
  };
  for (const auto& [field, change] : changes) {
    const auto texts = texts_of(2, [&](World& world) {
      Sums sums(world, {}, chain_shape("one", {{"a", {{"a", {2}}}}}));
      PlanRow row{.tensor = "a", .count = 2, .strategy = "sum", .ranks = 2, .divisor = 2, .scheme = "dense"};
      Exchange exchange{.name = "sum of a"};
      if (world.rank() == 1) change(row, exchange);
      sums.add(world.engine(), world.comm(), row, exchange);
      sums.strategies.install();
      sums.run(2);
    });
    const bool differs = std::string(field) != "nothing";
    EXPECT_EQ(texts[0].find("has another plan of the step") != std::string::npos, differs)
        << field << ": " << texts[0];
  }
}

// A second strategy that only some ranks have, on their own group: its plans are compared, and what it finds
// is everybody's verdict.
TEST(Plans, RanksMayBelongToDifferentGroups) {
  for (const bool differs : {false, true}) {
    std::array<std::vector<bool>, 4> committed;
    const auto texts = texts_of(4, [&](World& world) {
      const bool both = world.rank() >= 2;
      Comm pair;
      if (both) pair = world.subgroup({2, 3}, 1);
      std::vector<ChainBlock> blocks{{"a", {{"a", {2}}}}};
      if (both) blocks.push_back({"b", {{"b", {2}}}});
      Sums sums(world, {.skip_not_finite = true}, chain_shape("sums", blocks));
      const PlanRow row{.tensor = "a", .count = 2, .strategy = "sum", .divisor = 4, .scheme = "dense"};
      Exchange exchange;
      exchange.name = "sum";
      sums.add(world.engine(), world.comm(), row, exchange);
      PlanRow second = row;
      second.tensor = "b";
      if (differs && world.rank() == 3) second.divisor = 2;
      if (both) sums.add(world.engine(), pair, second, exchange);
      sums.strategies.install();
      if (world.rank() == 3) sums.bad_step = 1;
      sums.run(3);
      committed[static_cast<std::size_t>(world.rank())] = sums.committed;
    });
    if (differs) {
      EXPECT_NE(texts[2].find("has another plan of the step"), std::string::npos) << texts[2];
      continue;
    }
    for (const std::string& text : texts) EXPECT_EQ(text, "");
    for (const auto& steps : committed) EXPECT_EQ(steps, (std::vector<bool>{true, false, true}));
  }
}

// ---- announcements ----

// Gradients that are ready while letters are announced start when the letters are through. Nobody waits for
// them in between, which would let them go.
struct Announced final : Driver {
  bool breaks = false;  // between an announcement and the start of its letters
  Announced(World& world, double predicted) : strategies(world.engine(), world.comm(), shape(), {}) {
    DataParallelOptions o;
    o.scheme.name = "dense";
    o.scheme.buckets.bucket_bytes = 4000;
    o.first_slot = strategies.next_slot(world.comm());
    const std::vector<ParameterInfo> parameters{{"first", 1000, 0}, {"second", 1000, 1}};
    strategies.add(
        std::make_unique<DataParallel>(world.engine(), world.comm(), parameters, o, &strategies.state()));
    strategies.add(std::make_unique<Courier>(world.engine(), world.comm(), strategies.next_slot(world.comm()),
                                             Courier::Awaits::before_backward, predicted));
    strategies.install();
    walker = std::make_unique<Walker>(*this, strategies);
  }
  static ModelShape shape() {
    return chain_shape("toy", {{"first", {{"first", {1000}}}}, {"second", {{"second", {1000}}}}});
  }
  Task<void> compute(Piece piece) override {
    if (piece.work == Work::forward && piece.block == 1) strategies.loss_known(1);
    if (piece.work == Work::backward) {
      auto& gradient = gradients[static_cast<std::size_t>(piece.block)];
      gradient.assign(1000, 1.0F);
      strategies.gradient_ready(piece.block, std::span<const float>(gradient));
      if (piece.block == 1 && breaks) throw std::runtime_error("the model broke");
      if (piece.block == 1) std::this_thread::sleep_for(80ms);  // longer than gradients are held by default
    }
    if (piece.work == Work::update) {
      std::vector<float> averaged(1000);
      strategies.result_of(piece.block, std::span(averaged));
    }
    co_return;
  }
  Task<void> wait(Ticket ticket) override {
    while (!ticket.done()) std::this_thread::sleep_for(200us);
    ticket.wait();
    co_return;
  }
  Dense tensor(const TensorName&) override { return Dense(std::span<double>(letter)); }
  Strategies strategies;
  std::unique_ptr<Walker> walker;
  std::array<std::vector<float>, 2> gradients;
  std::vector<double> letter = std::vector<double>(1);
};

// What of "gradients of bucket 1" started while letters were announced, aged and not.
TraceReport announced(double predicted) {
  std::vector<Trace> traces;
  RunOptions options;
  options.traces = &traces;
  run_ranks(2, options, [&](World& world) {
    Announced toy(world, predicted);
    for (int step = 0; step < 3; ++step) {
      toy.strategies.number_step(step);
      toy.strategies.batch_known({.tokens = 1});
      toy.walker->walk(toy.strategies.next_table(1));
    }
    toy.walker->walk(toy.strategies.tables(1).settle);
  });
  TraceReport report = verify_trace(traces[0]);
  const auto holds = std::ranges::count_if(traces[0].events(), [](const TraceEvent& e) {
    return e.kind == TraceEvent::Kind::hold && e.finished - e.started >= 70ms;
  });
  if (predicted > 0) {
    EXPECT_EQ(holds, 3);
  }
  return report;
}

// A program that catches its model's error and goes on with its engine is not held up by letters that will
// never be sent.
TEST(Announcements, EndWithTheirStrategies) {
  RunOptions options;
  options.config.hold_limit = 3600s;
  run_ranks(2, options, [&](World& world) {
    const auto sum_in_time = [&](std::uint32_t slot, int milliseconds) {
      std::vector<float> x(10);
      const Dense data{std::span(x)};
      const Ticket ticket = world.engine().submit(world.comm(), {.name = "sum", .slot = slot},
                                                  [data](Comm comm) { return all_reduce(comm, data); });
      for (int i = 0; i < milliseconds && !ticket.done(); ++i) std::this_thread::sleep_for(1ms);
      const bool in_time = ticket.done();
      ticket.wait();  // lets it go
      return in_time;
    };
    auto toy = std::make_unique<Announced>(world, 0);
    toy->breaks = true;
    toy->strategies.batch_known({.tokens = 1});
    EXPECT_THROW(toy->walker->walk(toy->strategies.next_table(1)), std::runtime_error);
    for (const Ticket& ticket : toy->strategies.tickets()) ticket.wait();
    EXPECT_FALSE(sum_in_time(1000, 200));  // control
    toy.reset();
    EXPECT_TRUE(sum_in_time(1001, 10'000));
  });
}

TEST(Announcements, HoldGradientsForAsLongAsTheyPredict) {
  const TraceReport report = announced(0.2);
  EXPECT_EQ(report.breaches, std::vector<std::string>{});
  EXPECT_EQ(report.aged, 0U);
  EXPECT_GT(announced(0).aged, 0U);  // control: nothing was predicted, so they aged after 50 ms
}

}  // namespace
}  // namespace weft
