// The convergence recipe of docs/recipe.md in virtual time: momentum correction and local clipping against
// plain loops, warm-up bytes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "data_parallel/data_parallel.h"
#include "sim/data_parallel_job.h"
#include "weft/error.h"

namespace weft {
namespace {

using testing::forget;
using testing::row_of;
using testing::set_values;
using testing::step_of;
using testing::values_of;
using namespace data_parallel_test;

// Sums of whole numbers below 2^12 and of their halves, quarters ... are exact for as many steps as are taken
// here: six steps add six bits.
constexpr double kHalf = 0.5;

DataParallelOptions corrected(double density, std::string_view algorithm = "spardl", double divisor = 1) {
  DataParallelOptions options = options_of(density, ResidualRule::gres, divisor);
  options.scheme.name = algorithm;
  options.scheme.momentum_correction = kHalf;
  return options;
}

// Laid end to end by parameter, of one rank.
std::vector<float> flat(const Vectors& vectors) {
  std::vector<float> out;
  for (const std::vector<float>& v : vectors) out.insert(out.end(), v.begin(), v.end());
  return out;
}
std::vector<float> velocity_of(Worker& w) {
  std::vector<float> out;
  for (int p = 0; p < w.dp->plan().num_parameters(); ++p) {
    const std::span<const float> v = w.dp->state().velocity(p);
    const auto count = static_cast<std::size_t>(w.dp->plan().parameter(p).count);
    if (v.empty())
      out.insert(out.end(), count, 0.0F);
    else
      out.insert(out.end(), v.begin(), v.end());
  }
  return out;
}

// Whether six steps give what SGD with momentum would do with the averaged gradient.
bool is_sgd_with_momentum(int ranks, const DataParallelOptions& options) {
  Job job(ranks, model(), options);
  std::vector<float> buffer(flat(job[0].gradients).size());
  bool same = true;
  for (std::uint32_t t = 0; t < 6; ++t) {
    job.fill_whole(t);
    for (std::size_t i = 0; i < buffer.size(); ++i) buffer[i] *= 0.5F;
    for (int r = 0; r < ranks; ++r) {
      const std::vector<float> mine = flat(job[r].gradients);
      for (std::size_t i = 0; i < buffer.size(); ++i) buffer[i] += mine[i];
    }
    EXPECT_EQ(job.step(), "");
    const std::vector<float> out = flat(job[0].outputs);
    for (std::size_t i = 0; i < buffer.size(); ++i) same &= out[i] == buffer[i] / static_cast<float>(ranks);
  }
  return same;
}

TEST(Recipe, WhereNothingIsLeftBehindItIsSgdWithMomentum) {
  for (const int ranks : {1, 2, 3, 4}) {
    EXPECT_TRUE(is_sgd_with_momentum(ranks, corrected(1, "spardl", 0))) << ranks;
    EXPECT_TRUE(is_sgd_with_momentum(ranks, corrected(1, "oktopk", 0))) << ranks;
    EXPECT_FALSE(is_sgd_with_momentum(ranks, options_of(1, ResidualRule::gres, 0))) << ranks;  // control
    EXPECT_FALSE(is_sgd_with_momentum(ranks, corrected(0.9, "spardl", 0))) << ranks;           // control
  }
}

TEST(Recipe, WhatTheSelectionSentHasNoVelocityOnAnyRank) {
  for (const std::string_view algorithm : {"spardl", "topka", "topkdsa", "gtopk", "oktopk"}) {
    for (const int ranks : {1, 3, 4}) {
      Job job(ranks, model(), corrected(0.05, algorithm));
      std::vector<bool> selects;  // of each element: its bucket is not dense
      for (int p = 0; p < job.plan().num_parameters(); ++p) {
        const bool sparse = !job.plan().bucket(job.plan().bucket_of(p)).dense;
        selects.insert(selects.end(), static_cast<std::size_t>(job.plan().parameter(p).count), sparse);
      }
      Vectors expected(static_cast<std::size_t>(ranks), std::vector<float>(selects.size()));
      std::size_t masked = 0, kept = 0;
      for (std::uint32_t t = 0; t < 5; ++t) {
        job.fill_whole(t);
        ASSERT_EQ(job.step(), "");
        const std::vector<float> out = flat(job[0].outputs);
        for (int r = 0; r < ranks; ++r) {
          std::vector<float>& u = expected[static_cast<std::size_t>(r)];
          const std::vector<float> g = flat(job[r].gradients);
          for (std::size_t i = 0; i < u.size(); ++i) {
            u[i] = 0.5F * u[i] + g[i];
            const bool sent = selects[i] && out[i] != 0;
            if (sent) u[i] = 0;
            sent ? ++masked : ++kept;
          }
          ASSERT_EQ(velocity_of(job[r]), u) << algorithm << ", rank " << r << ", step " << t;
        }
      }
      EXPECT_GT(masked, 0u);
      EXPECT_GT(kept, masked);
    }
  }
}

// One rank, one bucket: the method as its paper writes it, with a full sort. Values have no ties.
TEST(Recipe, OneRankIsDeepGradientCompressionToTheBit) {
  constexpr std::int64_t kCount = 3000;
  DataParallelOptions options = corrected(0.02);
  options.scheme.momentum_correction = 0.9;
  for (const bool control : {false, true}) {
    Job job(1, {{"w", kCount, 0}}, options);
    std::vector<float> u(kCount), v(kCount), out(kCount);
    bool same = true;
    for (int t = 0; t < 12; ++t) {
      job.fill([t](int, int, std::int64_t i) {
        return static_cast<float>(
            std::sin(1.7 * t + 0.37 * static_cast<double>(i * i % 1009) + 1e-3 * static_cast<double>(i)));
      });
      ASSERT_EQ(job.step(), "");
      const std::vector<float>& g = job[0].gradients[0];
      std::vector<std::size_t> order(kCount);
      std::iota(order.begin(), order.end(), std::size_t{0});
      for (std::size_t i = 0; i < u.size(); ++i) {
        const float decayed = 0.9F * u[i];
        u[i] = decayed + g[i];
        v[i] += u[i];
      }
      std::sort(order.begin(), order.end(),
                [&](std::size_t a, std::size_t b) { return std::abs(v[a]) > std::abs(v[b]); });
      std::fill(out.begin(), out.end(), 0.0F);
      for (std::size_t n = 0; n < 60; ++n) {
        const std::size_t i = order[n];
        out[i] = v[i];
        v[i] = 0;
        if (!control) u[i] = 0;  // the control masks nothing
      }
      same &= job[0].outputs[0] == out;
    }
    EXPECT_EQ(same, !control);
  }
}

// What goes in is the velocity: sum of velocities before the mask + old residuals = result + new residuals.
double worst_loss_of_mass(int ranks, ResidualRule rule, bool weigh_gradients) {
  DataParallelOptions options = corrected(0.03);
  options.scheme.residual = rule;
  Job job(ranks, model(), options);
  double worst = 0;
  for (std::uint32_t t = 0; t < 5; ++t) {
    job.fill_whole(t);
    std::vector<double> before = job.mass(true);
    for (int r = 0; r < ranks && !weigh_gradients; ++r) {
      const std::vector<float> u = velocity_of(job[r]);
      for (std::size_t i = 0; i < u.size(); ++i) before[i] += 0.5 * static_cast<double>(u[i]);
    }
    EXPECT_EQ(job.step(), "");
    const std::vector<double> after = job.mass(false);
    const std::vector<double> out = job.applied();
    for (std::size_t i = 0; i < out.size(); ++i)
      worst = std::max(worst, std::abs(before[i] - after[i] - out[i]));
  }
  return worst;
}

TEST(Recipe, MassIsConserved) {
  for (const int ranks : {1, 2, 3, 6}) {
    EXPECT_EQ(worst_loss_of_mass(ranks, ResidualRule::gres, false), 0.0) << ranks;
    EXPECT_EQ(worst_loss_of_mass(ranks, ResidualRule::drop, false), 0.0) << ranks;
  }
  EXPECT_GT(worst_loss_of_mass(3, ResidualRule::gres, true), 0.0);   // control: not the gradient
  EXPECT_GT(worst_loss_of_mass(4, ResidualRule::lres, false), 0.0);  // control: a rule that loses
}

TEST(Recipe, ASkippedStepLeavesTheVelocity) {
  Job job(3, model(), corrected(0.05));
  for (std::uint32_t t = 0; t < 2; ++t) {
    job.fill_whole(t);
    ASSERT_EQ(job.step(), "");
  }
  const std::vector<float> before = velocity_of(job[1]);
  job.fill_whole(2);
  job[2].gradients[3][7] = std::nanf("");
  ASSERT_EQ(job.step(), "");
  EXPECT_FALSE(job[1].result.committed);
  EXPECT_NE(job[1].result.text.find("'layer2.weight' on rank 2 holds NaN"), std::string::npos)
      << job[1].result.text;
  EXPECT_EQ(velocity_of(job[1]), before);
  job.fill_whole(2);
  ASSERT_EQ(job.step(), "");
  EXPECT_TRUE(job[1].result.committed);
  EXPECT_NE(velocity_of(job[1]), before);  // control
}

std::vector<double> sum_of_velocities(Job& job) {
  std::vector<double> sum;
  for (int r = 0; r < job.size(); ++r) {
    const std::vector<float> u = velocity_of(job[r]);
    sum.resize(u.size());
    for (std::size_t i = 0; i < u.size(); ++i) sum[i] += static_cast<double>(u[i]);
  }
  return sum;
}

TEST(Recipe, VelocitiesAreSavedAndDealtToAnyNumberOfRanks) {
  Job job(4, model(), corrected(0.03));
  for (std::uint32_t t = 0; t < 3; ++t) {
    job.fill_whole(t);
    ASSERT_EQ(job.step(), "");
  }
  const std::vector<StateSnapshot> saved = job.save();
  for (const int to : {1, 2, 3, 6}) {
    Job next(to, model(), corrected(0.03));
    for (int r = 0; r < to; ++r) next[r].dp->load(saved);
    EXPECT_EQ(sum_of_velocities(next), sum_of_velocities(job)) << to;
  }
  Job same(4, model(), corrected(0.03), 3);
  Job forgetful(4, model(), corrected(0.03), 3);  // control
  for (int r = 0; r < 4; ++r) {
    StateSnapshot without = saved[static_cast<std::size_t>(r)];
    same[r].dp->load({&without, 1});
    forget(without, "velocity");
    forgetful[r].dp->load({&without, 1});
  }
  for (Job* each : {&job, &same, &forgetful}) {
    each->fill_whole(3);
    ASSERT_EQ(each->step(), "");
  }
  EXPECT_EQ(same[1].outputs, job[1].outputs);
  EXPECT_NE(forgetful[1].outputs, job[1].outputs);
  // Another plan keeps them too.
  const std::vector<float> before = velocity_of(job[2]);
  for (int r = 0; r < 4; ++r) job[r].dp->replan({.bucket_bytes = 4 * 4000, .dense_below = 0});
  EXPECT_EQ(velocity_of(job[2]), before);
}

TEST(Recipe, WhatCannotBeMeantIsRefused) {
  Job job(2, model(), corrected(0.05));
  const auto refused = [&](const char* part, auto change) {
    DataParallelOptions options = corrected(0.05);
    change(options);
    try {
      const DataParallel dp(*job[0].engine, job[0].engine->world(), model(), options);
      ADD_FAILURE() << part;
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  };
  refused("schemes that select entries, not for 'dense'", [](auto& o) { o.scheme.name = "dense"; });
  refused("not for 'dense-bf16'", [](auto& o) { o.scheme.name = "dense-bf16"; });
  refused("not for 'powersgd'", [](auto& o) { o.scheme.name = "powersgd"; });
  refused("below 1", [](auto& o) { o.scheme.momentum_correction = 1; });
  refused("at least 0", [](auto& o) { o.scheme.momentum_correction = std::nan(""); });
  refused("clip_local", [](auto& o) { o.clip_local = -1; });
  refused("clip_local", [](auto& o) { o.clip_local = HUGE_VAL; });
  job.fill_whole(0);
  ASSERT_EQ(job.step(), "");
  const StateSnapshot moving = job[0].dp->save();
  Job plain(2, model(), options_of(0.05));
  EXPECT_THROW(plain[0].dp->load({&moving, 1}), UsageError);
}

// The ranks' norms differ by far: some are clipped, some not.
void fill_uneven(Job& job) {
  job.fill([](int r, int p, std::int64_t i) {
    return static_cast<float>((r + 1) * (r + 1)) *
           static_cast<float>(std::sin(r + 3.0 * p + 0.7 * static_cast<double>(i)));
  });
}

TEST(Recipe, LocalClippingIsThatOfEachRanksShare) {
  for (const int ranks : {1, 3, 4}) {
    constexpr double kClip = 40;
    DataParallelOptions options = options_of(1, ResidualRule::gres, 0);
    options.clip_local = kClip;
    Job job(ranks, model(), options);
    fill_uneven(job);
    std::vector<double> expected(flat(job[0].gradients).size()), magnitude(expected.size());
    double share = 0;
    int clipped = 0;
    const double limit = kClip / std::sqrt(ranks);
    for (int r = 0; r < ranks; ++r) {
      const std::vector<float> g = flat(job[r].gradients);
      double squares = 0;
      for (const float v : g) squares += static_cast<double>(v) * static_cast<double>(v);
      share = std::sqrt(squares) / ranks;
      clipped += share > limit ? 1 : 0;
      const double scale = std::min(1.0, limit / share);
      for (std::size_t i = 0; i < g.size(); ++i) {
        expected[i] += scale * static_cast<double>(g[i]) / ranks;
        magnitude[i] += scale * static_cast<double>(std::abs(g[i])) / ranks;
      }
    }
    ASSERT_EQ(job.step(), "");
    EXPECT_NEAR(job[ranks - 1].dp->local_norm(), share, 1e-9 * share);
    EXPECT_GT(clipped, 0);
    EXPECT_EQ(clipped == ranks, ranks == 1);
    const std::vector<float> out = flat(job[0].outputs);
    double squares = 0;
    for (std::size_t i = 0; i < out.size(); ++i) {
      squares += static_cast<double>(out[i]) * static_cast<double>(out[i]);
      // The factor, each product, ranks - 1 sums and the division are rounded by 2^-24 each.
      ASSERT_NEAR(out[i], expected[i], (ranks + 3) * 0x1p-24 * magnitude[i] + 1e-30) << i;
    }
    EXPECT_LE(std::sqrt(squares), kClip * std::sqrt(ranks) * (1 + 1e-6));
    // Control: without it the result is another.
    Job plain(ranks, model(), options_of(1, ResidualRule::gres, 0));
    fill_uneven(plain);
    ASSERT_EQ(plain.step(), "");
    EXPECT_NE(plain[0].outputs, job[0].outputs);
  }
}

TEST(Recipe, LocalClippingComesBeforeVelocityAndResidual) {
  DataParallelOptions options = corrected(0.05);
  options.clip_local = 1;
  Job job(2, model(), options);
  job.fill([](int, int, std::int64_t) { return 2.0F; });
  job[1].order = {1, 2, 3};  // the others never come
  ASSERT_EQ(job.step(), "");
  double squares = 0;
  for (int p = 0; p < job.plan().num_parameters(); ++p) {
    for (const float v : job[0].dp->state().residual(p))
      squares += static_cast<double>(v) * static_cast<double>(v);
  }
  EXPECT_GT(squares, 0);
  EXPECT_LE(squares, 0.5 * (1 + 1e-5));  // (1 / sqrt 2)^2, the divisor being 1
  // What is not finite is named as ever.
  fill_uneven(job);
  job[1].order = {0, 1, 2, 3, 4, 5, 6, 7};
  job[1].gradients[0][5] = HUGE_VALF;
  ASSERT_EQ(job.step(), "");
  EXPECT_NE(job[0].result.text.find("'embed' on rank 1 holds infinity"), std::string::npos)
      << job[0].result.text;
  EXPECT_EQ(job[0].result.bad.size(), 1u);
}

std::uint64_t sent_by(Worker& w) {
  std::uint64_t sum = 0;
  for (int b = 0; b < w.dp->plan().num_buckets(); ++b) sum += w.dp->result(b).entry_bytes_sent();
  return sum;
}

TEST(Recipe, WarmUpBytesAreThoseOfTheDensityAndDenseSchemesHaveNone) {
  for (const std::string_view algorithm : {"spardl", "gtopk", "dense", "dense-bf16", "powersgd"}) {
    DataParallelOptions options = options_of(0.01);
    options.scheme.name = algorithm;
    Job job(4, model(), options);
    std::vector<std::uint64_t> sent;
    for (const double density : {0.25, 0.05, 0.01}) {
      for (int r = 0; r < 4; ++r) job[r].dp->set_density(density);
      job.fill_whole(0);
      ASSERT_EQ(job.step(), "");
      sent.push_back(sent_by(job[0]));
    }
    const bool selects = algorithm == "spardl" || algorithm == "gtopk";
    EXPECT_EQ(sent[0] > 2 * sent[1] && sent[1] > sent[2], selects) << algorithm;
    EXPECT_EQ(sent[0] == sent[1] && sent[1] == sent[2], !selects) << algorithm;
  }
}

// What earlier steps left behind may bring a parameter something that no rank used: it must be applied then.
TEST(Recipe, AParameterThatNobodyUsesIsUpdatedOnlyWithWhatWasLeftBehind) {
  DataParallelOptions options = options_of(0.05);
  options.find_unused = true;
  Job job(3, model(), options);
  job.fill_whole(0);
  ASSERT_EQ(job.step(), "");
  int moved = 0, rested = 0;
  for (int t = 0; t < 40; ++t) {
    job.fill_whole(0);
    for (int r = 0; r < 3; ++r) job[r].order = {1};
    ASSERT_EQ(job.step(), "");
    for (int p = 0; p < job.plan().num_parameters(); ++p) {
      const std::vector<float>& out = job[0].outputs[static_cast<std::size_t>(p)];
      const bool something = std::any_of(out.begin(), out.end(), [](float v) { return v != 0; });
      for (int r = 0; r < 3; ++r) ASSERT_EQ(job[r].dp->used(p), p == 1 || something);
      if (p != 1) something ? ++moved : ++rested;
    }
  }
  EXPECT_GT(moved, 0);
  EXPECT_GT(rested, 0);
}

}  // namespace
}  // namespace weft
