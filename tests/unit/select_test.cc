// Selection against its definition: exact for any data, thresholds and arrivals, and the same for any number
// of threads.
#include "kernels/select.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kernels/scalar_sparse.h"
#include "kernels/scan.h"
#include "kernels/sparse.h"
#include "reference/data.h"
#include "weft/error.h"
#include "workload/distributions.h"

namespace weft {
namespace {

// What data may look like: name and element i of n.
struct Shape {
  const char* name;
  float (*at)(std::uint64_t hash, std::int64_t i, std::int64_t n);
};
constexpr Shape kShapes[] = {
    {"small integers",
     [](std::uint64_t h, std::int64_t, std::int64_t) { return static_cast<float>(h % 9) - 4.0f; }},
    {"any", [](std::uint64_t h, std::int64_t,
               std::int64_t) { return static_cast<float>(static_cast<std::int64_t>(h)) * 0x1p-63f; }},
    {"equal", [](std::uint64_t h, std::int64_t, std::int64_t) { return h % 2 != 0 ? 1.5f : -1.5f; }},
    {"zeros", [](std::uint64_t h, std::int64_t, std::int64_t) { return h % 2 != 0 ? 0.0f : -0.0f; }},
    {"few", [](std::uint64_t h, std::int64_t,
               std::int64_t) { return h % 997 == 0 ? static_cast<float>(h % 31) - 15.0f : 0.0f; }},
    {"subnormal", [](std::uint64_t h, std::int64_t,
                     std::int64_t) { return std::ldexp(static_cast<float>(h % 7) - 3.0f, -149); }},
    {"rising", [](std::uint64_t, std::int64_t i, std::int64_t) { return static_cast<float>(i); }},
    {"all in the last tenth",
     [](std::uint64_t h, std::int64_t i, std::int64_t n) {
       return i > n - n / 10 ? static_cast<float>(h % 1000) : 0.001f;
     }},
};

std::vector<float> make(const Shape& shape, std::int64_t n, std::uint64_t seed) {
  std::vector<float> x(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) {
    x[static_cast<std::size_t>(i)] = shape.at(reference::hash(seed, 0, static_cast<std::uint64_t>(i)), i, n);
  }
  return x;
}

std::vector<std::int64_t> quotas_of(const Deal& deal, std::int64_t k) {
  std::vector<std::int64_t> quotas;
  for (int b = 0; b < deal.blocks(); ++b) quotas.push_back(deal.quota(b, k));
  return quotas;
}

// All blocks, cut by the definition out of gradient + residual; `staged` is what is left.
std::vector<Entries> expected_of(std::span<const float> gradient, std::span<const float> residual,
                                 const Deal& deal, std::span<const std::int64_t> quotas,
                                 std::vector<float>& staged) {
  staged.resize(gradient.size());
  scalar::accumulate(gradient, residual, staged);
  std::vector<Entries> out;
  for (int b = 0; b < deal.blocks(); ++b)
    out.push_back(scalar::cut(staged, deal, b, quotas[static_cast<std::size_t>(b)]));
  return out;
}

TEST(Select, EqualsTheDefinitionForEveryShape) {
  Candidates candidates;  // one for all: nothing of an earlier step may stay
  for (const Shape& shape : kShapes) {
    for (const std::int64_t n : {0, 1, 2, 63, 64, 65, 1000, 4101, 40'000}) {
      const std::vector<float> gradient = make(shape, n, 1);
      const std::vector<float> residual = make(shape, n, 2);
      for (const int m : {1, 2, 5, 8, 33}) {
        for (const Deal::Kind kind : {Deal::Kind::dealt, Deal::Kind::contiguous}) {
          const Deal deal(kind, m, n);
          for (const std::int64_t k : {std::int64_t{1}, n / 100, n / 4, n}) {
            SCOPED_TRACE(std::string(shape.name) + " n " + std::to_string(n) + " m " + std::to_string(m) +
                         " k " + std::to_string(k));
            const std::vector<std::int64_t> quotas = quotas_of(deal, k);
            std::vector<float> left;
            const std::vector<Entries> expected = expected_of(gradient, residual, deal, quotas, left);
            std::vector<float> staged(gradient.size(), 77.0f);
            std::vector<Entries> out(static_cast<std::size_t>(m));
            EXPECT_TRUE(select_topk({gradient, residual, staged}, deal, quotas, candidates, out).finite);
            ASSERT_EQ(out, expected);
            ASSERT_EQ(staged, left);
          }
        }
      }
    }
  }
}

// A rule that takes the higher of two equal indices is not ours: the shapes above have the ties that tell
// them apart.
TEST(Select, TiesAreByIndexAndTheTestsWouldSeeIt) {
  const Deal deal(Deal::Kind::dealt, 1, 1000);
  const std::vector<float> gradient = make(kShapes[0], 1000, 1);
  std::vector<float> turned(gradient.rbegin(), gradient.rend());
  std::vector<float> staged(1000);
  Candidates candidates;
  std::vector<Entries> out(1);
  const std::vector<std::int64_t> quotas = {100};
  select_topk({gradient, {}, staged}, deal, quotas, candidates, out);
  std::vector<float> left;
  // Turned back: the highest indices of equals.
  const Entries higher = expected_of(turned, {}, deal, quotas, left)[0];
  std::vector<std::uint32_t> indices(higher.indices.rbegin(), higher.indices.rend());
  for (std::uint32_t& index : indices) index = 999 - index;
  ASSERT_EQ(indices.size(), out[0].size());
  EXPECT_NE(indices, out[0].indices);
}

TEST(Select, ThresholdsDecideAboutTimeOnly) {
  const std::int64_t n = 10'000;
  for (const Shape& shape : kShapes) {
    const std::vector<float> gradient = make(shape, n, 3);
    for (const int m : {1, 4}) {
      const Deal deal(Deal::Kind::dealt, m, n);
      const std::vector<std::int64_t> quotas = quotas_of(deal, 300);
      std::vector<float> left;
      const std::vector<Entries> expected = expected_of(gradient, {}, deal, quotas, left);
      for (const std::uint32_t threshold :
           {1u, magnitude_key(0.5f), magnitude_key(4.0f), magnitude_key(9990.0f), kInfinityKey}) {
        Candidates candidates;
        std::vector<float> staged(gradient.size());
        const StagedStep step{gradient, {}, staged};
        estimate_thresholds(step, deal, quotas, candidates);
        for (BlockCandidates& block : candidates.blocks) block.threshold = threshold;
        EXPECT_TRUE(accumulate(step, deal, candidates).finite);
        for (int b = 0; b < m; ++b) {
          Entries out;
          EXPECT_TRUE(cut(staged, deal, b, quotas[static_cast<std::size_t>(b)], candidates, out));
          ASSERT_EQ(out, expected[static_cast<std::size_t>(b)]) << shape.name << " " << threshold;
        }
        ASSERT_EQ(staged, left);
      }
    }
  }
}

// Entries for one block: a share `per_mille` of its indices, with values from `value(global index)`.
template <class Value>
Entries arrivals(const Deal& deal, int block, std::uint64_t seed, std::uint64_t per_mille, Value value) {
  Entries entries;
  for (std::int64_t i = 0; i < deal.count(block); ++i) {
    const std::int64_t at = deal.global(block, i);
    if (reference::hash(seed, 7, static_cast<std::uint64_t>(at)) % 1000 >= per_mille) continue;
    entries.push_back(static_cast<std::uint32_t>(i), value(at));
  }
  return entries;
}

TEST(Select, WhatArrivesIsPartOfTheCut) {
  const std::int64_t n = 20'000;
  for (const Shape& shape : kShapes) {
    const std::vector<float> gradient = make(shape, n, 4);
    for (const bool cancels : {false, true}) {
      for (const Deal::Kind kind : {Deal::Kind::dealt, Deal::Kind::contiguous}) {
        const Deal deal(kind, 4, n);
        const std::vector<std::int64_t> quotas = quotas_of(deal, 400);
        std::vector<float> staged(gradient.size());
        Candidates candidates;
        const StagedStep step{gradient, {}, staged};
        estimate_thresholds(step, deal, quotas, candidates);
        accumulate(step, deal, candidates);
        std::vector<float> plain(staged);
        for (int b = 0; b < 4; ++b) {
          for (std::uint64_t hop = 0; hop < 3; ++hop) {
            const auto value = [&](std::int64_t at) {  // the second kind takes away most of what is largest
              const float now = staged[static_cast<std::size_t>(at)];
              return cancels ? -now
                             : shape.at(reference::hash(hop, 9, static_cast<std::uint64_t>(at)), at, n);
            };
            const Entries entries = arrivals(deal, b, hop, cancels ? 950 : 20, value);
            scatter_add(entries, deal, b, staged);
            arrived(entries.indices, b, candidates);
            scatter_add(entries, deal, b, plain);
          }
          Entries out;
          cut(staged, deal, b, quotas[static_cast<std::size_t>(b)], candidates, out);
          ASSERT_EQ(out, scalar::cut(plain, deal, b, quotas[static_cast<std::size_t>(b)]))
              << shape.name << " block " << b;
          ASSERT_EQ(staged, plain);
        }
      }
    }
  }
}

// Control: arrivals that are not noted are missed.
TEST(Select, ArrivalsMustBeNoted) {
  const Deal deal(Deal::Kind::dealt, 1, 10'000);
  const std::vector<float> gradient = make(kShapes[1], 10'000, 5);
  std::vector<float> staged(gradient.size());
  Candidates candidates;
  const StagedStep step{gradient, {}, staged};
  const std::vector<std::int64_t> quotas = {100};
  estimate_thresholds(step, deal, quotas, candidates);
  accumulate(step, deal, candidates);
  const Entries entries = arrivals(deal, 0, 1, 20, [](std::int64_t) { return 10.0f; });
  scatter_add(entries, deal, 0, staged);
  std::vector<float> plain(staged);
  Entries out;
  cut(staged, deal, 0, 100, candidates, out);
  EXPECT_NE(out, scalar::cut(plain, deal, 0, 100));
}

TEST(Select, AnyQuotaMayBeAskedForAtTheCut) {
  const Deal deal(Deal::Kind::dealt, 3, 9000);
  const std::vector<float> gradient = make(kShapes[0], 9000, 6);
  for (const std::int64_t quota : {-1, 0, 1, 20, 100, 2999, 100'000}) {
    std::vector<float> staged(gradient.size());
    Candidates candidates;
    const StagedStep step{gradient, {}, staged};
    estimate_thresholds(step, deal, quotas_of(deal, 90), candidates);
    accumulate(step, deal, candidates);
    std::vector<float> plain(staged);
    Entries out;
    out.push_back(1, 1.0f);
    EXPECT_TRUE(cut(staged, deal, 1, quota, candidates, out));
    EXPECT_EQ(out, scalar::cut(plain, deal, 1, quota)) << quota;
    EXPECT_EQ(staged, plain);
  }
}

TEST(Select, ThreadsChangeNothing) {
  const std::int64_t n = 123'457;
  for (const Distribution distribution : kDistributions) {
    std::vector<float> gradient(static_cast<std::size_t>(n));
    std::vector<float> residual(gradient.size());
    draw({.distribution = distribution, .seed = 1}, gradient);
    draw({.distribution = distribution, .seed = 2}, residual);
    for (const int m : {1, 5}) {
      for (const Deal::Kind kind : {Deal::Kind::dealt, Deal::Kind::contiguous}) {
        const Deal deal(kind, m, n);
        const std::vector<std::int64_t> quotas = quotas_of(deal, n / 100);
        std::vector<float> left;
        const std::vector<Entries> expected = expected_of(gradient, residual, deal, quotas, left);
        Candidates candidates;
        for (const int threads : {1, 2, 3, 8, 1, 0}) {
          std::vector<float> staged(gradient.size());
          std::vector<Entries> out(static_cast<std::size_t>(m));
          select_topk({gradient, residual, staged}, deal, quotas, candidates, out, threads);
          ASSERT_EQ(out, expected) << threads << " threads, " << name_of(distribution);
          ASSERT_EQ(staged, left);
        }
      }
    }
  }
}

TEST(Select, TheFastScanIsThePlainOne) {
  for (const Shape& shape : kShapes) {
    const std::vector<float> gradient = make(shape, 3001, 7);
    const std::vector<float> residual = make(shape, 3001, 8);
    for (const bool with_residual : {false, true}) {
      for (const std::int64_t shift : {0, 1, 3}) {  // unaligned
        std::vector<std::vector<float>> staged(2, std::vector<float>(3001));
        std::vector<std::vector<std::uint32_t>> noted(2, std::vector<std::uint32_t>(3001 + 64));
        std::vector<kernels::ScanState> states(2);
        kernels::ScanBlock blocks[2];
        const std::vector<Deal::Run> runs = {
            {shift, 1, 0, 0}, {shift + 1, 64, 1, 0}, {shift + 65, 2000, 65, 0}, {shift + 2065, 900, 2065, 0}};
        for (std::size_t i = 0; i < 2; ++i) {
          blocks[i] = {.threshold = magnitude_key(1.0f),
                       .indices = noted[i].data(),
                       .count = 0,
                       .limit = 500,
                       .open = true};
          states[i] = {gradient.data(), with_residual ? residual.data() : nullptr, staged[i].data(),
                       &blocks[i], 0};
          (i == 0 ? kernels::scan_plain : kernels::fastest_scan())(runs, states[i]);
        }
        EXPECT_TRUE(reference::same_bits(staged[0], staged[1])) << shape.name;
        EXPECT_EQ(noted[0], noted[1]) << shape.name;
        EXPECT_EQ(blocks[0].count, blocks[1].count);
        EXPECT_EQ(blocks[0].open, blocks[1].open);
        EXPECT_EQ(states[0].largest, states[1].largest);
      }
    }
  }
}

TEST(Select, NaNAndInfinityAreReportedAndTheResidualIsSafe) {
  const float bad[] = {std::nanf(""), -std::nanf(""), INFINITY, -INFINITY};
  const std::int64_t n = 5000;
  for (const std::int64_t at : {std::int64_t{0}, std::int64_t{77}, n - 1}) {
    for (const float value : bad) {
      for (const int threads : {1, 3}) {
        std::vector<float> gradient = make(kShapes[1], n, 9);
        gradient[static_cast<std::size_t>(at)] = value;
        gradient[static_cast<std::size_t>(n - 1)] = value;
        const std::vector<float> residual = make(kShapes[1], n, 10);
        const std::vector<float> before(residual);
        std::vector<float> staged(gradient.size());
        Candidates candidates;
        const Deal deal(Deal::Kind::dealt, 3, n);
        std::vector<Entries> out(3);
        const Verdict verdict =
            select_topk({gradient, residual, staged}, deal, quotas_of(deal, 50), candidates, out, threads);
        EXPECT_FALSE(verdict.finite);
        EXPECT_EQ(verdict.first_non_finite, at);
        EXPECT_EQ(residual, before);
        cut(staged, deal, 0, 20, candidates, out[0]);  // arbitrary, but no crash
        EXPECT_EQ(out[0].size(), 20u);
      }
    }
  }
}

TEST(Select, OverflowIsReported) {
  const float most = std::numeric_limits<float>::max();
  const std::vector<float> gradient = {1.0f, most, 2.0f};
  std::vector<float> staged(3);
  Candidates candidates;
  const Deal deal(Deal::Kind::dealt, 1, 3);
  const std::vector<std::int64_t> quotas = {1};
  std::vector<Entries> out(1);
  EXPECT_EQ(select_topk({gradient, gradient, staged}, deal, quotas, candidates, out).first_non_finite, 1);
  // Finite here, but not with what arrives.
  const StagedStep step{gradient, {}, staged};
  estimate_thresholds(step, deal, quotas, candidates);
  EXPECT_TRUE(accumulate(step, deal, candidates).finite);
  Entries more;
  more.push_back(1, most);
  scatter_add(more, deal, 0, staged);
  arrived(more.indices, 0, candidates);
  EXPECT_FALSE(cut(staged, deal, 0, 1, candidates, out[0]));
}

TEST(Select, TheOutputMayBeTheResidualItself) {
  const Deal deal(Deal::Kind::dealt, 2, 2000);
  const std::vector<float> gradient = make(kShapes[1], 2000, 11);
  const std::vector<float> residual = make(kShapes[1], 2000, 12);
  std::vector<float> left;
  const std::vector<Entries> expected = expected_of(gradient, residual, deal, quotas_of(deal, 20), left);
  std::vector<float> in_place(residual);
  Candidates candidates;
  std::vector<Entries> out(2);
  select_topk({gradient, in_place, in_place}, deal, quotas_of(deal, 20), candidates, out);
  EXPECT_EQ(out, expected);
  EXPECT_EQ(in_place, left);
}

TEST(Select, LongVectorsKeepTheirIndices) {  // beyond 2^24, where a float no longer holds every index
  const std::int64_t n = (1 << 24) + 100'003;
  std::vector<float> gradient(static_cast<std::size_t>(n), 0.0f);
  Entries expected;
  for (std::int64_t i = 5; i < n; i += 33'333)
    expected.push_back(static_cast<std::uint32_t>(i), static_cast<float>(i % 1000) + 1);
  expected.push_back(static_cast<std::uint32_t>(n - 1), -3.0f);
  for (std::size_t i = 0; i < expected.size(); ++i) gradient[expected.indices[i]] = expected.values[i];
  std::vector<float> staged(gradient.size());
  Candidates candidates;
  std::vector<Entries> out(1);
  const std::vector<std::int64_t> quotas = {100'000};
  select_topk({gradient, {}, staged}, Deal(Deal::Kind::dealt, 1, n), quotas, candidates, out);
  EXPECT_EQ(out[0], expected);
  // Control: indices carried as floats would not come back.
  std::size_t changed = 0;
  for (const std::uint32_t index : expected.indices)
    changed += static_cast<std::uint32_t>(static_cast<float>(index)) != index ? 1 : 0;
  EXPECT_GT(changed, 0u);
}

TEST(Select, WarmStepsAskForNoMemory) {
  const std::int64_t n = 50'000;
  const Deal deal(Deal::Kind::dealt, 4, n);
  std::vector<float> gradient(static_cast<std::size_t>(n));
  std::vector<float> staged(gradient.size());
  Candidates candidates;
  std::vector<Entries> out(4);
  std::vector<const void*> before;
  for (std::uint32_t round = 0; round < 4; ++round) {
    draw({.seed = 3, .step = round}, gradient);
    select_topk({gradient, {}, staged}, deal, quotas_of(deal, 500), candidates, out);
    std::vector<const void*> now = {candidates.sample.data()};
    for (std::size_t b = 0; b < 4; ++b)
      now.insert(now.end(), {candidates.blocks[b].room.data(), out[b].indices.data(), out[b].values.data()});
    if (round > 1) {
      EXPECT_EQ(now, before);
    }
    before = now;
  }
}

// Blocks whose elements differ in scale, as residuals do where one block is owned and the others are sent: one
// sample of them all is wrong for each of them.
TEST(Select, CutsTeachTheNextStepsThresholds) {
  const std::int64_t n = 200'000;
  const Deal deal(Deal::Kind::dealt, 2, n);
  const std::vector<std::int64_t> quotas = quotas_of(deal, n / 100);
  std::vector<float> gradient(static_cast<std::size_t>(n));
  std::vector<float> staged(gradient.size());
  std::vector<Entries> out(2);
  const auto steps = [&](std::uint32_t first, std::uint32_t last, Candidates& candidates, bool forget) {
    std::int64_t before = 0;
    std::int64_t after = 0;
    for (const BlockCandidates& block : candidates.blocks) before += block.read_again;
    for (std::uint32_t round = first; round < last; ++round) {
      if (forget) {
        for (BlockCandidates& block : candidates.blocks) block.aim = 1;
      }
      draw({.seed = 9, .step = round}, gradient);
      deal.for_each_run_of(0, [&](const Deal::Run& run) {
        for (std::int64_t i = 0; i < run.length; ++i)
          gradient[static_cast<std::size_t>(run.first + i)] *= 0.8F;
      });
      select_topk({gradient, {}, staged}, deal, quotas, candidates, out);
      std::vector<float> left;
      EXPECT_EQ(out, expected_of(gradient, {}, deal, quotas, left)) << round;
    }
    for (const BlockCandidates& block : candidates.blocks) after += block.read_again;
    return after - before;
  };
  Candidates learns;
  steps(0, 20, learns, false);
  EXPECT_EQ(steps(20, 40, learns, false), 0);
  std::size_t noted = 0;
  for (const BlockCandidates& block : learns.blocks) noted += block.count;
  EXPECT_LT(noted, static_cast<std::size_t>(2 * n / 100)) << "nor by noting everything";
  Candidates forgets;
  EXPECT_EQ(steps(20, 40, forgets, true), 20) << "control: block 0, at every step";
}

double energy(const std::vector<Entries>& lists) {
  double sum = 0;
  for (const Entries& entries : lists) {
    for (const float x : entries.values) sum += static_cast<double>(x) * static_cast<double>(x);
  }
  return sum;
}
TEST(Select, DealtBlocksLoseNothingOnLayersThatDifferInScale) {
  const std::int64_t n = 1 << 19;
  std::vector<float> gradient(static_cast<std::size_t>(n));
  std::vector<float> staged(gradient.size());
  draw({.distribution = Distribution::layered, .seed = 5}, gradient);
  Candidates candidates;
  const auto captured = [&](const Deal& deal) {
    std::vector<Entries> out(static_cast<std::size_t>(deal.blocks()));
    select_topk({gradient, {}, staged}, deal, quotas_of(deal, n / 100), candidates, out);
    return energy(out);
  };
  const double best = captured(Deal(Deal::Kind::dealt, 1, n));
  EXPECT_GT(captured(Deal(Deal::Kind::dealt, 8, n)) / best, 0.99);
  EXPECT_LT(captured(Deal(Deal::Kind::contiguous, 8, n)) / best, 0.6);  // control
}

TEST(Select, RefusesLengthsThatDoNotFit) {
  const std::vector<float> gradient(10);
  std::vector<float> staged(10);
  Candidates candidates;
  const Deal deal(Deal::Kind::dealt, 2, 10);
  const std::vector<std::int64_t> quotas = {1, 1};
  EXPECT_THROW(
      estimate_thresholds({gradient, gradient, std::span(staged).first(9)}, deal, quotas, candidates),
      UsageError);
  EXPECT_THROW(
      estimate_thresholds({gradient, std::span(gradient).first(3), staged}, deal, quotas, candidates),
      UsageError);
  EXPECT_THROW(estimate_thresholds({gradient, {}, staged}, deal, std::span(quotas).first(1), candidates),
               UsageError);
  EXPECT_THROW(accumulate({gradient, {}, staged}, deal, candidates), UsageError);
  std::vector<Entries> out(1);
  EXPECT_THROW(select_topk({gradient, {}, staged}, deal, quotas, candidates, out), UsageError);
}

}  // namespace
}  // namespace weft
