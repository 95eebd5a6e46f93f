// When experts are packed: the rule alone, on networks whose times are given.
#include "experts/packing.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "weft/error.h"
#include "weft/random.h"

namespace weft {
namespace {

// Eight ranks in two nodes, one expert each to begin with.
struct Case {
  double tokens = 1024, width = 256, choices = 2, capacity = 1.25;
  int layers = 6, slices = 2, ranks = 8;
  double expert_seconds = 1e-3;  // of a slice
  PackingNetwork network{.link = {.hop_seconds = 0, .seconds_per_byte = 1e-9},
                         .scale_up = {.hop_seconds = 0, .seconds_per_byte = 1e-10},
                         .ranks_per_node = 4};
  double move_seconds = 0;
  double wrong = 1;  // by which its figures are, of packing 1

  double slice_bytes() const { return choices * capacity * tokens * width * 4 / slices; }
  double all_to_all(int packing) const { return all_to_all_seconds(network, ranks / packing, slice_bytes()); }
  // Of a ring over the replicas, which has 2 G (P-1) / P bytes of a rank's G.
  double sums(int packing) const {
    const double gradient = layers * packing * 8 * width * width * 4;
    const LinkCost link = cost_of_group(network, packing, ranks / packing);
    return 2 * gradient * (packing - 1) / packing * link.seconds_per_byte;
  }
  std::vector<PackingChoice> choices_of() const {
    std::vector<PackingChoice> out;
    for (int p = 1; p <= ranks; p *= 2)
      out.push_back({.packing = p,
                     .all_to_all = all_to_all(p),
                     .sums = sums(p),
                     .move = move_seconds,
                     .bytes = std::int64_t{p} << 20});
    return out;
  }
  PackingController controller(const PackingOptions& options = {}) const {
    return {options, choices_of(), 4.0 * layers * slices};
  }
  PackingTimes times(int packing) const {
    return {.experts = expert_seconds, .all_to_all = (packing == 1 ? wrong : 1) * all_to_all(packing)};
  }
};

// Packings after each decision where times are what they are.
std::vector<int> course(const Case& c, PackingController controller, int decisions = 12) {
  std::vector<int> out;
  for (int i = 0; i < decisions; ++i) out.push_back(controller.decide(c.times(controller.packing())).packing);
  return out;
}
int changes(const std::vector<int>& packings) {
  int out = packings.front() != 1;
  for (std::size_t i = 1; i < packings.size(); ++i) out += packings[i] != packings[i - 1];
  return out;
}

TEST(Packing, IsDecidedBehindStep10AndEvery4) {
  const PackingController controller = Case{}.controller();
  std::vector<std::int64_t> due;
  for (std::int64_t step = 0; step < 24; ++step) {
    if (controller.due(step)) due.push_back(step);
  }
  EXPECT_EQ(due, (std::vector<std::int64_t>{10, 14, 18, 22}));
}

TEST(Packing, DoublesWhereAllToAllIsLongerAndHalvesWhereItIsHalfAsLong) {
  EXPECT_EQ(wished_packing(1, {.experts = 0.8, .all_to_all = 1}, 0.1), 2);
  EXPECT_EQ(wished_packing(1, {.experts = 0.95, .all_to_all = 1}, 0.1), 1);
  EXPECT_EQ(wished_packing(1, {.experts = 0.95, .all_to_all = 1}, 0), 2);
  EXPECT_EQ(wished_packing(4, {.experts = 2.1, .all_to_all = 1}, 0.1), 4);
  EXPECT_EQ(wished_packing(4, {.experts = 2.3, .all_to_all = 1}, 0.1), 2);
  EXPECT_EQ(wished_packing(1, {.experts = 9, .all_to_all = 1}, 0.1), 1);
}

// Two nodes: packing 2 leaves no all-to-all between them, and sums of as many values as T k cf / 8 d says.
TEST(Packing, OnTwoNodesPaysAboveEightWidthsOfTokens) {
  for (const double width : {128.0, 256.0, 512.0}) {
    for (const double capacity : {1.0, 1.25}) {
      Case c{.width = width, .capacity = capacity, .expert_seconds = 0};
      const double limit = 8 * width / (c.choices * capacity);
      // (Inside of a node the all-to-all is not free; here it is.)
      c.network.scale_up.seconds_per_byte = 1e-15;
      c.tokens = 1.02 * limit;
      EXPECT_EQ(c.controller().decide(c.times(1)).packing, 2) << width;
      c.tokens = 0.98 * limit;
      EXPECT_EQ(c.controller().decide(c.times(1)).packing, 1) << width;
      // Control: who does not count the sums packs all the same.
      EXPECT_EQ(c.controller({.costs = false}).decide(c.times(1)).packing, 2);
    }
  }
}

TEST(Packing, AMoveMustPayOverTheHorizon) {
  Case c{.tokens = 4096, .expert_seconds = 0};
  const double saved = 4 * c.layers * c.slices * (c.all_to_all(1) - c.all_to_all(2)) - c.sums(2);
  ASSERT_GT(saved, 0);
  c.move_seconds = 0.9 * 200 * saved;
  EXPECT_EQ(c.controller().decide(c.times(1)).packing, 2);
  c.move_seconds = 1.1 * 200 * saved;
  EXPECT_EQ(c.controller().decide(c.times(1)).packing, 1);
}

// Where times stay what they are it comes to rest, whatever they are, and however wrong the figures.
TEST(Packing, ComesToRestAtConstantTimes) {
  Random random(7, 1, 1);
  const auto between = [&](double low, double high) {
    return low * std::pow(high / low, static_cast<double>(random.below(1000)) / 1000);
  };
  int packed = 0, restless = 0;
  for (int i = 0; i < 3000; ++i) {
    Case c{.tokens = between(64, 65536), .expert_seconds = between(1e-6, 1)};
    c.network.ranks_per_node = i % 2 == 0 ? 4 : 1;
    c.wrong = between(0.2, 5);
    const std::vector<int> with = course(c, c.controller());
    EXPECT_LE(changes(with), 6);  // there and back at most
    EXPECT_EQ(with[with.size() - 1], with[with.size() - 5]);
    packed += with.back() > 1;
    // Control: a rule without hysteresis and costs goes back and forth.
    restless += changes(course(c, c.controller({.hysteresis = 0, .costs = false}))) > 6;
  }
  EXPECT_GT(packed, 100);
  EXPECT_GT(restless, 100);
}

// Times that are measured are never the same twice.
TEST(Packing, HysteresisStandsSmallDifferences) {
  const auto course_with = [](double hysteresis) {
    Random random(3, 1, 1);
    int at = 2, out = 0;
    for (int i = 0; i < 200; ++i) {
      const double noise = 0.92 + 0.16 * static_cast<double>(random.below(1000)) / 1000;
      // With packing 1 an all-to-all takes twice what it takes with 2: the rule's two limits meet.
      const PackingTimes times{.experts = noise, .all_to_all = at == 1 ? 1.0 : 0.5};
      const int next = std::min(2, wished_packing(at, times, hysteresis));
      out += next != at;
      at = next;
    }
    return out;
  };
  EXPECT_EQ(course_with(0.1), 0);
  EXPECT_GT(course_with(0), 10);  // control
}

// More of all-to-all over experts never packs less.
TEST(Packing, IsMonotoneInAllToAllOverExperts) {
  for (const int start : {1, 2, 4}) {
    int before = 0;
    for (double ratio = 0.05; ratio < 20; ratio *= 1.1) {
      Case c{.tokens = 2048};
      PackingController controller({}, c.choices_of(), 4.0 * c.layers * c.slices, start);
      const int now =
          controller.decide({.experts = c.all_to_all(start) / ratio, .all_to_all = c.all_to_all(start)})
              .packing;
      EXPECT_GE(now, before) << start << ", " << ratio;
      before = now;
    }
  }
  // The same where experts stay what they are and all-to-alls take longer.
  int before = 0;
  for (double seconds = 1e-5; seconds < 1; seconds *= 1.2) {
    Case c{.tokens = 2048};
    PackingController controller({}, c.choices_of(), 4.0 * c.layers * c.slices, 1);
    const int now = controller.decide({.experts = 1e-3, .all_to_all = seconds}).packing;
    EXPECT_GE(now, before);
    before = now;
  }
  EXPECT_EQ(before, 2);
}

// An all-to-all that takes longer because of what else is on the way is no reason to put more there.
TEST(Packing, ContentionIsNotSaved) {
  Case c{.expert_seconds = 0};
  c.tokens = 0.9 * 8 * c.width / (c.choices * c.capacity);
  c.wrong = 3;
  EXPECT_EQ(c.controller().decide(c.times(1)).packing, 1);
  c.tokens *= 1.5;
  EXPECT_EQ(c.controller().decide(c.times(1)).packing, 2);
}

// It goes back where experts have become slower than what they hid.
TEST(Packing, GoesBack) {
  Case c{.tokens = 4096, .expert_seconds = 1e-6};
  PackingController controller = c.controller();
  ASSERT_EQ(controller.decide(c.times(1)).packing, 2);
  // All-to-alls have become cheap, and sums have not.
  const PackingTimes cheap{.experts = 1e-2, .all_to_all = 1e-7};
  PackingController later({}, c.choices_of(), 4.0 * c.layers * c.slices, 2);
  EXPECT_EQ(later.decide(cheap).packing, 1);
}

TEST(Packing, TakesNoMoreMemoryThanThereIsAndSaysSoOnce) {
  Case c{.tokens = 16384, .expert_seconds = 1e-6};
  const std::int64_t limit = 3 << 20;  // packing 2 has 2 MiB
  PackingController controller = c.controller({.memory = limit, .costs = false});
  EXPECT_EQ(controller.decide(c.times(1)).packing, 2);
  const PackingController::Decision refused = controller.decide(c.times(2));
  EXPECT_EQ(refused.packing, 2);
  EXPECT_TRUE(refused.tells);
  EXPECT_NE(refused.why.find("packing 4 would take 4 MiB of a rank's memory, more than the 3 MiB"),
            std::string::npos)
      << refused.why;
  EXPECT_FALSE(controller.decide(c.times(2)).tells);
  EXPECT_EQ(c.controller({.costs = false}).decide(c.times(1)).packing, 2);
  // Not even the start fits.
  EXPECT_THROW(c.controller({.memory = 1 << 19}), UsageError);
}

TEST(Packing, TextsThatCannotBe) {
  const auto refused = [](const std::string& text, int ranks) {
    try {
      fixed_packing(text, ranks);
    } catch (const UsageError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(fixed_packing("2", 8), 2);
  EXPECT_TRUE(is_auto_packing("auto"));
  EXPECT_NE(refused("3", 8).find("does not divide the 8 ranks"), std::string::npos);
  EXPECT_NE(refused("16", 8).find("more than the 8 ranks"), std::string::npos);
  EXPECT_NE(refused("2", 1).find("more than the 1 rank that"), std::string::npos);
  EXPECT_NE(refused("two", 8).find("neither auto nor a number"), std::string::npos);
  EXPECT_NE(refused("0", 8).find("neither auto nor a number"), std::string::npos);
}

}  // namespace
}  // namespace weft
