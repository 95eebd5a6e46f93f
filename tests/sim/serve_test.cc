// Serving with experts in virtual time: the walk of a layer against plain loops, and how placements compare.
#include "workload/serve.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "base/statistics.h"
#include "experts/serving.h"
#include "message_of.h"
#include "weft/random.h"
#include "world/sim_ranks.h"

namespace weft {
namespace {

using ::testing::HasSubstr;
using testing::message_of;

// ---- the walk ----

constexpr int kRanks = 5, kExperts = 7, kLayers = 4, kChoices = 2, kWidth = 3;

// Tokens of a rank; one has none.
std::int64_t tokens_of(int rank) { return rank == 2 ? 0 : 6 + 5 * rank; }

// Expert e of layer l makes (e + 1) x + l of every value x.
class Toy final : public ServingDriver {
 public:
  explicit Toy(int rank, bool wrong) : rank_(rank), wrong_(wrong) {}

  // The value of a copy in column 0 says whose it is, the others follow.
  static double value(int rank, std::int64_t copy, int column) {
    return 1000 * rank + static_cast<double>(copy) + column;
  }

  Dense rows_to_send(int, std::span<const std::int64_t> copies) override {
    sent_.clear();
    order.assign(copies.begin(), copies.end());
    for (const std::int64_t copy : copies) {
      for (int c = 0; c < kWidth; ++c) sent_.push_back(value(rank_, copy, c));
    }
    return Dense(std::span(sent_));
  }
  Dense room(int, std::int64_t rows) override {
    here_.resize(static_cast<std::size_t>(rows) * kWidth);
    return Dense(std::span(here_));
  }
  Dense room_for_return(int, std::int64_t rows) override {
    back.resize(static_cast<std::size_t>(rows) * kWidth);
    return Dense(std::span(back));
  }
  Task<void> compute(Comm, int layer, std::span<const std::int64_t> counts) override {
    std::size_t at = 0;
    for (std::size_t i = 0; i < counts.size(); ++i) {
      const auto expert = static_cast<double>(wrong_ ? rank_ : static_cast<int>(i % kExperts));
      for (std::int64_t n = counts[i] * kWidth; n > 0; --n, ++at)
        here_[at] = (expert + 1) * here_[at] + layer;
    }
    co_return;
  }

  std::vector<std::int64_t> order;
  std::vector<double> back;

 private:
  int rank_;
  bool wrong_;
  std::vector<double> sent_, here_;
};

struct Walked {
  std::vector<std::vector<ExpertPlacement>> placements;  // of each rank and batch, of the last layer
  std::uint64_t bytes = 0;
  std::int64_t formula = 0;
  int wrong = 0;  // values
};

std::int32_t drawn(int batch, int rank, int layer, std::int64_t copy) {
  Random random(static_cast<std::uint64_t>(batch), static_cast<std::uint32_t>(rank),
                static_cast<std::uint32_t>(layer), static_cast<std::uint32_t>(copy / kChoices));
  const auto first =
      static_cast<std::int32_t>(random.below(4) > 0 ? random.below(2) : random.below(kExperts));
  const auto step = static_cast<std::int32_t>(1 + random.below(kExperts - 1));
  return copy % kChoices == 0 ? first : (first + step) % kExperts;
}

Task<void> walk(Comm comm, ExpertServing* serving, Toy* toy, Walked* into) {
  for (int batch = 0; batch < 6; ++batch) {
    const auto base = static_cast<std::uint32_t>(batch) * 16 * ExpertServing::kHops;
    serving->begin(tokens_of(comm.rank()));
    for (int l = 0; l < kLayers; ++l) {
      std::vector<std::int32_t> chosen;
      for (std::int64_t c = 0; c < tokens_of(comm.rank()) * kChoices; ++c)
        chosen.push_back(drawn(batch, comm.rank(), l, c));
      co_await serving->pass(comm.hops_from(base + static_cast<std::uint32_t>(l) * ExpertServing::kHops), l,
                             chosen);
      EXPECT_EQ(toy->order.size(), chosen.size());
      for (std::size_t i = 0; i < toy->order.size(); ++i) {
        const std::int64_t copy = toy->order[i];
        for (int c = 0; c < kWidth; ++c) {
          const double expected =
              (chosen[static_cast<std::size_t>(copy)] + 1) * Toy::value(comm.rank(), copy, c) + l;
          into->wrong += toy->back[i * kWidth + static_cast<std::size_t>(c)] == expected ? 0 : 1;
        }
      }
    }
    co_await serving->end(comm.hops_from(base + 8 * ExpertServing::kHops));
    into->placements[static_cast<std::size_t>(comm.rank())].push_back(
        serving->placer().placement(kLayers - 1));
  }
}

Walked walked(const std::string& placement, bool wrong = false, std::int64_t weight_bytes = 0) {
  Popularity profile({.layers = kLayers, .experts = kExperts, .path = 2, .choices = kChoices});
  for (std::int64_t t = 0; t < 50; ++t) {
    std::vector<std::int32_t> chosen;
    for (int l = 0; l < kLayers; ++l) {
      for (int c = 0; c < kChoices; ++c) chosen.push_back(drawn(77, 0, l, t * kChoices + c));
    }
    profile.record(chosen);
  }
  ServingOptions options;
  options.width = kWidth;
  options.placer = {.placement = placement,
                    .place = {.ranks = kRanks, .experts = kExperts},
                    .layers = kLayers,
                    .choices = kChoices,
                    .window = 2,
                    .every = 2};
  options.profile = std::make_shared<const Popularity>(profile);
  options.weight_bytes = weight_bytes;
  SimRanksOptions sim;
  sim.sim.link.ranks = kRanks;
  SimRanks ranks(sim);
  Walked out;
  out.placements.resize(kRanks);
  std::vector<std::unique_ptr<Toy>> toys;
  std::vector<std::unique_ptr<ExpertServing>> all;
  for (int r = 0; r < kRanks; ++r) {
    toys.push_back(std::make_unique<Toy>(r, wrong));
    all.push_back(
        std::make_unique<ExpertServing>(ranks.engine(r), ranks.engine(r).world(), options, *toys.back()));
  }
  ranks.run({.name = "batches", .traffic = TrafficClass::blocking}, [&](Comm comm, int r) {
    const auto i = static_cast<std::size_t>(r);
    return walk(comm, all[i].get(), toys[i].get(), &out);
  });
  for (const std::unique_ptr<ExpertServing>& each : all) {
    out.bytes += each->row_bytes();
    out.formula += each->formula_bytes();
  }
  return out;
}

TEST(ExpertServing, RowsMeetTheirExpertsUnderEveryPlacement) {
  for (const char* placement : {"static", "history", "lina"}) {
    for (const std::int64_t weight_bytes : {0, 1000}) {
      const Walked run = walked(placement, false, weight_bytes);
      EXPECT_EQ(run.wrong, 0) << placement;
      EXPECT_EQ(run.bytes, static_cast<std::uint64_t>(run.formula)) << placement;
      EXPECT_GT(run.bytes, 0u);
      for (int r = 1; r < kRanks; ++r)
        EXPECT_EQ(run.placements[static_cast<std::size_t>(r)], run.placements[0]);
    }
  }
  EXPECT_GT(walked("lina", /*wrong=*/true).wrong, 0);  // control: an expert that is told by its rank
}

TEST(ExpertServing, ReplicasAreThereOnlyWherePlacementsAreMade) {
  const auto replicated = [](const Walked& run) {
    return std::ranges::any_of(run.placements[0].back().replicas,
                               [](const auto& on) { return on.size() > 1; });
  };
  EXPECT_FALSE(replicated(walked("static")));
  EXPECT_TRUE(replicated(walked("history")));
  EXPECT_TRUE(replicated(walked("lina")));
}

TEST(ExpertServing, RefusesWhatDoesNotFit) {
  ServingOptions options;
  options.placer = {.placement = "lina", .place = {.ranks = 2, .experts = 4}};
  EXPECT_THAT(message_of([&] { check(options); }), HasSubstr("goes by a profile"));
  options.profile = std::make_shared<const Popularity>(PopularityOptions{.layers = 1, .experts = 3});
  EXPECT_THAT(message_of([&] { check(options); }), HasSubstr("the profile is of 1 layers of 3 experts"));
}

// ---- how placements compare ----

ServeOptions serve_options(bool drifts) {
  ServeOptions out;
  out.router = {.layers = 6, .drifts = drifts};
  out.times.layers.assign(6, {.dense_seconds = 3e-3, .row_seconds = 60e-6, .merge_seconds = 10e-6});
  out.times.last_seconds = 1e-3;
  out.tokens = 128;
  out.width = 256;
  out.requests = 64;
  out.warmup = 16;
  out.placer.layers = 6;
  // A row of 256 values takes 20.48 us there and back on kLink, and 60 us of an expert.
  out.placer.place = {.ranks = 8, .experts = 8, .remote_rows = 20.48 / 60};
  out.plan_seconds = 50e-6;
  out.profile = fitted_profile(DrawnRouter(out.router), 100, 64, {.layers = 6, .experts = 8});
  return out;
}
constexpr EmulatedLink kLink{.bytes_per_second = 100e6, .latency_seconds = 20e-6};

// Of each placement: p95 over requests of the slowest rank's seconds.
std::vector<double> p95_of(const std::vector<std::vector<Served>>& ranks) {
  std::vector<double> out;
  for (std::size_t p = 0; p < ranks.front().size(); ++p) {
    std::vector<double> slowest = ranks.front()[p].seconds;
    for (const std::vector<Served>& rank : ranks) {
      for (std::size_t i = 0; i < slowest.size(); ++i) slowest[i] = std::max(slowest[i], rank[p].seconds[i]);
    }
    out.push_back(quantile(slowest, 0.95));
  }
  return out;
}

TEST(Serving, PathsBalanceBothRoutersAndHistoryTheStationaryOneOnly) {
  for (const bool drifts : {false, true}) {
    const ServeOptions options = serve_options(drifts);  // static, history, lina, ideal
    const std::vector<std::vector<Served>> ranks = serve_simulated(8, kLink, options);
    const std::vector<double> p95 = p95_of(ranks);
    EXPECT_GT(p95[0] / p95[2], 1.6);
    EXPECT_GT(p95[1] / p95[2], drifts ? 1.1 : 0.97);
    EXPECT_LT(p95[3], p95[2]);
    EXPECT_GT(p95[3] / p95[2], 0.85);  // near the limit
    EXPECT_NEAR(quantile(ranks[0][3].load, 1), 1, 1e-12);
    EXPECT_GT(median(ranks[0][0].load), 2);
    EXPECT_LT(quantile(ranks[0][2].load, 0.95), 1.15);
    for (const std::vector<Served>& rank : ranks) {
      for (const Served& served : rank) {
        EXPECT_EQ(served.payload_bytes, static_cast<std::uint64_t>(served.formula_bytes));
        EXPECT_EQ(served.moved_bytes, 0u);
        EXPECT_EQ(served.seconds.size(), 64u);
      }
      EXPECT_EQ(rank[2].replans, ranks[0][2].replans);  // all decide the same
      EXPECT_EQ(rank[2].checks, 64 * 6);
    }
    EXPECT_LT(ranks[0][2].replans, 64 * 6 / 4);
  }
}

TEST(Serving, TheCheckSavesWhatAWrongProfileWouldSpoil) {
  ServeOptions options = serve_options(true);
  options.placements = {"lina"};
  options.requests = 24;
  DrawnRouterOptions other = options.router;
  other.seed = 5;  // another table: its hot experts are others
  options.profile = fitted_profile(DrawnRouter(other), 100, 16, {.layers = 6, .experts = 8});
  const std::vector<std::vector<Served>> checked = serve_simulated(8, kLink, options);
  EXPECT_GT(checked[0][0].replans, 24 * 6 * 3 / 4);
  EXPECT_LT(quantile(checked[0][0].load, 0.95), 1.2);
  options.placer.tolerance = 1e9;  // control: never planned again
  const std::vector<std::vector<Served>> trusted = serve_simulated(8, kLink, options);
  EXPECT_EQ(trusted[0][0].replans, 0);
  EXPECT_GT(p95_of(trusted)[0], 1.3 * p95_of(checked)[0]);
}

TEST(Serving, IsTheSameEveryTime) {
  ServeOptions options = serve_options(true);
  options.requests = 6;
  EXPECT_EQ(p95_of(serve_simulated(8, kLink, options)), p95_of(serve_simulated(8, kLink, options)));
}

TEST(Serving, WeightsThatMoveAreCountedAndTakeTheirTime) {
  ServeOptions options = serve_options(true);
  options.placements = {"lina", "static"};
  options.requests = 8;
  options.placer.place.most = 2;
  const std::vector<double> resident = p95_of(serve_simulated(8, kLink, options));
  options.weight_bytes = 200'000;
  const std::vector<std::vector<Served>> moved = serve_simulated(8, kLink, options);
  std::uint64_t bytes = 0;
  for (const std::vector<Served>& rank : moved) {
    bytes += rank[0].moved_bytes;
    EXPECT_EQ(rank[1].moved_bytes, 0u);
  }
  EXPECT_GT(bytes, 0u);
  EXPECT_EQ(bytes % 200'000, 0u);
  EXPECT_GT(p95_of(moved)[0], resident[0]);
  EXPECT_EQ(p95_of(moved)[1], resident[1]);
}

TEST(Serving, PlanningCountsInARequestsTime) {
  ServeOptions options = serve_options(true);
  options.placements = {"lina"};
  options.requests = 8;
  const double quick = p95_of(serve_simulated(8, kLink, options))[0];
  options.plan_seconds = 20e-3;
  EXPECT_GT(p95_of(serve_simulated(8, kLink, options))[0], quick + 10e-3);
}

TEST(Serving, TimesComeFromAnOutline) {
  Outline outline;
  outline.model = "gpt-moe";
  outline.blocks = {{.name = "embedding", .forward_seconds = 1},
                    {.name = "layer.0", .forward_seconds = 2},
                    {.name = "layer.1", .forward_seconds = 4},
                    {.name = "layer.2", .forward_seconds = 8},
                    {.name = "head", .forward_seconds = 100}};
  outline.experts = {{.name = "layer.1.experts",
                      .block = 2,
                      .gate_forward_seconds = 16,
                      .row_forward_seconds = 0.5,
                      .merge_forward_seconds = 32}};
  const ServeTimes times = serve_times(outline, 10);
  ASSERT_EQ(times.layers.size(), 1u);
  EXPECT_EQ(times.layers[0].dense_seconds, 1 + 2 + 4 + 16);
  EXPECT_EQ(times.layers[0].row_seconds, 0.5);
  EXPECT_EQ(times.layers[0].merge_seconds, 32);
  EXPECT_EQ(times.last_seconds, 8 + 10);
  outline.experts.clear();
  EXPECT_THAT(message_of([&] { serve_times(outline, 10); }), HasSubstr("does not tell experts apart"));
}

}  // namespace
}  // namespace weft
