// PowerSGD as a scheme of data parallel, in virtual time.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "data_parallel/data_parallel.h"
#include "data_parallel/formula.h"
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

constexpr double kUnit = 0x1p-24;  // one rounding of float32, relative

DataParallelOptions power(int rank, double divisor = 0, const char* wire = "float32") {
  DataParallelOptions options;
  options.scheme.wire = wire;
  options.scheme.name = "powersgd";
  options.scheme.columns = rank;
  options.divisor = divisor;
  options.scheme.all_reduce = "ring";
  options.scheme.buckets.bucket_bytes = 4 * 4000;
  return options;
}

// Smooth with some noise, so that a few directions carry most of it; other on every rank and step.
float value(int r, int p, std::int64_t i, int t) {
  const double x = static_cast<double>(i);
  Random random(11, static_cast<std::uint32_t>(p), static_cast<std::uint32_t>(r * 100 + t),
                static_cast<std::uint32_t>(i));
  return static_cast<float>(std::sin(0.011 * x + 0.3 * p + 0.05 * t) * std::cos(0.7 * x + r) +
                            0.2 * (random.uniform() - 0.5));
}

void fill(Job& job, int t) {
  job.fill([t](int r, int p, std::int64_t i) { return value(r, p, i, t); });
}

void expect_equal_ranks(Job& job) {
  for (int r = 0; r < job.size(); ++r) {
    ASSERT_TRUE(job[r].result.committed) << job[r].result.text;
    ASSERT_EQ(job[r].outputs, job[0].outputs);
    const StateSnapshot mine = job[r].dp->save();
    const StateSnapshot first = job[0].dp->save();
    for (const StateValue& v : mine.rows) {
      if (v.row.key.kind == "factor") {
        ASSERT_EQ(v.bytes, row_of(first, "factor", v.row.key.name).bytes);
      }
    }
  }
}

void expect_same_state(const std::vector<StateSnapshot>& a, const std::vector<StateSnapshot>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t r = 0; r < a.size(); ++r) {
    EXPECT_EQ(step_of(a[r]), step_of(b[r]));
    for (const StateValue& v : a[r].rows) {
      const auto& [owner, kind, name] = v.row.key;
      if (kind == "residual" || kind == "factor") {
        EXPECT_EQ(v, row_of(b[r], kind, name));
      }
    }
  }
}

// The largest excess of |sum of mean gradients - sum of outputs - mean residual| over what rounding explains,
// as a part of the latter: at most 1.
double imbalance(int ranks, int rank, bool feeds_back, const char* wire = "float32") {
  Job job(ranks, model(), power(rank, 0, wire));
  std::vector<double> balance, bound;
  for (int t = 0; t < 6; ++t) {
    fill(job, t);
    if (!feeds_back && t > 0) {
      for (int r = 0; r < ranks; ++r) {
        StateSnapshot forgets = job[r].dp->save();
        forget(forgets, "residual");
        job[r].dp->load({&forgets, 1});
      }
    }
    const std::vector<double> before = job.mass(false);
    const std::vector<double> put_in = job.mass(true);
    std::vector<double> magnitudes(before.size());
    const auto weigh = [&](bool gradients) {
      std::size_t at = 0;
      for (int p = 0; p < job.plan().num_parameters(); ++p) {
        for (std::size_t i = 0; i < static_cast<std::size_t>(job.plan().parameter(p).count); ++i, ++at) {
          for (int r = 0; r < ranks; ++r) {
            const std::span<const float> residual = job[r].dp->state().residual(p);
            const float g = gradients ? job[r].gradients[static_cast<std::size_t>(p)][i] : 0.0F;
            magnitudes[at] += std::abs(static_cast<double>(residual.empty() ? g : g + residual[i]));
          }
        }
      }
    };
    weigh(true);
    EXPECT_EQ(job.step(), "");
    expect_equal_ranks(job);
    weigh(false);
    const std::vector<double> out = job.applied();
    balance.resize(before.size());
    bound.resize(before.size());
    for (std::size_t i = 0; i < before.size(); ++i) {
      balance[i] += (put_in[i] - before[i]) / ranks - out[i];
      // Gradient + residual and the new residual round once on every rank; what is sent as it is rounds in
      // `ranks` additions and the division. y / W is rounded the same way in the output and in the residual.
      bound[i] += 1.01 * kUnit * (ranks + 2) * magnitudes[i] / ranks;
    }
  }
  const std::vector<double> left = job.mass(false);
  double worst = 0;
  double kept = 0;
  for (std::size_t i = 0; i < left.size(); ++i) {
    worst = std::max(worst, std::abs(balance[i] - left[i] / ranks) / (bound[i] + 1e-300));
    kept += std::abs(left[i]);
  }
  EXPECT_GT(kept, 1) << "or nothing was compressed";
  return worst;
}

TEST(PowerSgd, GradientsAreOutputsAndResiduals) {
  for (const int ranks : {1, 2, 3, 4, 8}) {
    for (const int rank : {1, 2, 5}) {
      EXPECT_LE(imbalance(ranks, rank, true), 1) << ranks << " ranks, rank " << rank;
    }
  }
  EXPECT_GT(imbalance(4, 2, false), 100);  // control: residuals that are not fed back
}

// The same bound where its sums are of bfloat16 and nothing is added to them: what additions round away is lost, and how
// much that is low_rank_test says.
TEST(PowerSgd, GradientsAreOutputsAndResidualsInBfloat16) {
  for (const int rank : {1, 2, 5}) EXPECT_LE(imbalance(1, rank, true, "bf16"), 1) << "rank " << rank;
  EXPECT_GT(imbalance(1, 2, false, "bf16"), 100);  // control
}

// The largest difference from the mean over what rounding explains.
double away_from_mean(int ranks, const DataParallelOptions& options) {
  Job job(ranks, model(), options, 3);
  fill(job, 0);
  EXPECT_EQ(job.step(), "");
  expect_equal_ranks(job);
  double worst = 0;
  for (int p = 0; p < job.plan().num_parameters(); ++p) {
    const ParameterInfo& info = job.plan().parameter(p);
    std::vector<double> mean(static_cast<std::size_t>(info.count));
    double length = 0;
    for (std::size_t i = 0; i < mean.size(); ++i) {
      for (int r = 0; r < ranks; ++r) {
        mean[i] += static_cast<double>(job[r].gradients[static_cast<std::size_t>(p)][i]) / ranks;
      }
      length += mean[i] * mean[i];
    }
    // y = P P^T M. Of its n terms and min(n, m) columns each rounds a part of an element that is no longer
    // than the whole matrix; P is orthonormal to 4 min(n, m) roundings.
    const auto columns = static_cast<double>(info.rows == 0 ? 1 : info.count / info.rows);
    const double bound = kUnit * (static_cast<double>(info.rows) + 5 * columns + ranks) * std::sqrt(length);
    for (std::size_t i = 0; i < mean.size(); ++i) {
      const double out = job[0].outputs[static_cast<std::size_t>(p)][i];
      worst = std::max(worst, std::abs(out - mean[i]) / bound);
    }
  }
  return worst;
}

// Without error feedback what the factors leave behind is lost: the same gradient has the same result again, but for
// the better factors.
TEST(PowerSgd, WithoutErrorFeedbackNothingIsLeftBehind) {
  for (const bool feedback : {true, false}) {
    DataParallelOptions options = power(1);
    options.scheme.error_feedback = feedback;
    Job job(2, model(), options);
    job.fill_whole(1);
    ASSERT_EQ(job.step(), "");
    double kept = 0;
    for (const double mass : job.mass(false)) kept += std::abs(mass);
    EXPECT_EQ(kept > 1, feedback);
    EXPECT_EQ(kept == 0, !feedback);
  }
}

TEST(PowerSgd, FullRankIsTheMean) {
  DataParallelOptions options = power(1000);
  options.scheme.min_compression = 0;
  for (const int ranks : {1, 2, 3, 5}) EXPECT_LE(away_from_mean(ranks, options), 1) << ranks;
  options.scheme.columns = 6;
  EXPECT_GT(away_from_mean(3, options), 100);  // control
  // Nothing is worth compressing: everything is sent as it is.
  options = power(4);
  options.scheme.min_compression = 1e9;
  EXPECT_LE(away_from_mean(3, options), 1);
}

// An element of a 60 x 50 matrix of rank `terms`.
float directions(int terms, std::int64_t i) {
  const auto row = static_cast<double>(i / 50);
  const auto column = static_cast<double>(i % 50);
  double sum = 0;
  for (int k = 0; k < terms; ++k) {
    sum += std::sin((k + 1) * 0.3 * row + k) * std::cos((k + 1) * 0.17 * column + 1 + k) / (k + 1);
  }
  return static_cast<float>(sum);
}

// Near those of float32: a matrix of that rank is its factors, and what they are rounded by is a part of it.
TEST(PowerSgd, RoundedFactorsAreNear) {
  constexpr int kRanks = 4;
  const std::vector<ParameterInfo> parameters{{"w", 60 * 50, 0, 60}};
  Job exact(kRanks, parameters, power(4)), rounded(kRanks, parameters, power(4, 0, "bf16"));
  double away = 0, size = 0;
  for (Job* job : {&exact, &rounded}) {
    job->fill([](int r, int, std::int64_t i) { return static_cast<float>(1 + r) * directions(1, i); });
    ASSERT_EQ(job->step(), "");
    expect_equal_ranks(*job);
  }
  for (std::size_t i = 0; i < exact[0].outputs[0].size(); ++i) {
    const double of = exact[0].outputs[0][i], difference = of - rounded[0].outputs[0][i];
    away += difference * difference;
    size += of * of;
  }
  // Elements of P and of Q round on each rank and in each addition, each time by 2^-8 of themselves at most; all ranks'
  // have one sign, so that together it is kRanks times of the sum.
  EXPECT_LE(std::sqrt(away / size), 2 * kRanks * 0x1p-8);
  EXPECT_GT(std::sqrt(away / size), 0x1p-14);  // control: something was rounded
}

// Gradients of `terms` directions, each rank with a share of its own; distance of the output from the mean
// after `steps` steps, relative to it.
double after(int steps, int rank, int terms, int zero_steps = 0) {
  constexpr int kRanks = 3;
  const std::vector<ParameterInfo> parameters{{"w", 60 * 50, 0, 60}};
  Job job(kRanks, parameters, power(rank));
  for (int t = 0; t < zero_steps + steps; ++t) {
    job.fill([&](int r, int, std::int64_t i) {
      return t < zero_steps ? 0.0F : static_cast<float>(1 + r) * directions(terms, i);
    });
    EXPECT_EQ(job.step(), "");
    expect_equal_ranks(job);
  }
  double away = 0, size = 0;
  for (std::size_t i = 0; i < job[0].outputs[0].size(); ++i) {
    double mean = 0;
    for (int r = 0; r < kRanks; ++r) mean += static_cast<double>(job[r].gradients[0][i]) / kRanks;
    away += std::pow(static_cast<double>(job[0].outputs[0][i]) - mean, 2);
    size += mean * mean;
  }
  return std::sqrt(away / size);
}

TEST(PowerSgd, AGradientOfItsRankIsCaughtAtOnce) {
  // P spans the gradient exactly; what is left is rounding: at most 60 + 50 + 10 of them on the way.
  EXPECT_LE(after(1, 1, 1), 120 * kUnit);
  EXPECT_LE(after(2, 1, 1), 120 * kUnit);
  EXPECT_LE(after(2, 4, 1), 120 * kUnit) << "columns that depend on others do no harm";
  EXPECT_LE(after(2, 3, 3), 300 * kUnit);
  EXPECT_GT(after(1, 1, 3), 0.1);  // control
}

TEST(PowerSgd, AParameterWithoutGradientsIsNotLostForEver) {
  EXPECT_LE(after(1, 1, 1, 3), 120 * kUnit);
  EXPECT_LE(after(1, 4, 2, 2), 300 * kUnit);
}

TEST(PowerSgd, TheSumIsDividedOnce) {
  Job sum(4, model(), power(2, 1));
  Job mean(4, model(), power(2));
  for (int t = 0; t < 3; ++t) {
    fill(sum, t);
    fill(mean, t);
    ASSERT_EQ(sum.step(), "");
    ASSERT_EQ(mean.step(), "");
    for (Vectors* all : {&sum[0].outputs}) {
      for (std::vector<float>& v : *all) {
        for (float& x : v) x /= 4;
      }
    }
    EXPECT_EQ(sum[0].outputs, mean[0].outputs);
    Vectors visited;
    for (const auto& g : mean[1].gradients) visited.emplace_back(g.size());
    mean[1].dp->for_each([&](int p, std::int64_t i, float v) {
      visited[static_cast<std::size_t>(p)][static_cast<std::size_t>(i)] = v;
    });
    EXPECT_EQ(visited, mean[1].outputs);
    std::vector<float> one(3000);
    mean[2].dp->result_of(0, one);
    EXPECT_EQ(one, mean[0].outputs[0]);
  }
}

void what_is_not_finite_is_named(const char* wire) {
  Job job(4, model(), power(2, 0, wire));
  Job clean(4, model(), power(2, 0, wire), 5);
  for (int t = 0; t < 2; ++t) {
    fill(job, t);
    fill(clean, t);
    ASSERT_EQ(job.step(), "");
    ASSERT_EQ(clean.step(), "");
  }
  const std::vector<StateSnapshot> before = job.save();
  ASSERT_EQ(row_of(before[0], "factor", "embed").row.shard, Shard::whole({2, 50}));
  ASSERT_EQ(before[0].find("factor", "layer1.bias"), nullptr);
  fill(job, 2);
  job[2].gradients[5][123] = std::nanf("");
  job[0].gradients[2][3] = HUGE_VALF;
  job[1].gradients[0][2999] = -HUGE_VALF;
  ASSERT_EQ(job.step(), "");
  for (int r = 0; r < 4; ++r) {
    const StepResult& result = job[r].result;
    EXPECT_FALSE(result.committed);
    EXPECT_EQ(result.text, job[0].result.text);
    EXPECT_NE(result.text.find("'layer3.weight' on rank 2 holds NaN"), std::string::npos) << result.text;
    EXPECT_NE(result.text.find("'layer1.bias' on rank 0 holds infinity"), std::string::npos) << result.text;
    EXPECT_NE(result.text.find("'embed' on rank 1 holds infinity"), std::string::npos) << result.text;
    EXPECT_EQ(result.bad.size(), 3u) << result.text;
  }
  expect_same_state(before, job.save());
  // Finite on every rank, and even the sum is; but a residual might not be.
  fill(job, 2);
  job[0].gradients[0][7] = 2e38F;
  job[1].gradients[0][7] = -2e38F;
  ASSERT_EQ(job.step(), "");
  for (int r = 0; r < 4; ++r) {
    EXPECT_FALSE(job[r].result.committed);
    EXPECT_TRUE(job[r].result.bad.empty());
    EXPECT_NE(job[r].result.text.find("overflows in the bucket from 'embed'"), std::string::npos);
  }
  expect_same_state(before, job.save());
  // The same step without them: as if nothing had happened.
  fill(job, 2);
  fill(clean, 2);
  ASSERT_EQ(job.step(), "");
  ASSERT_EQ(clean.step(), "");
  EXPECT_EQ(job[3].outputs, clean[3].outputs);
  expect_same_state(job.save(), clean.save());
}

TEST(PowerSgd, WhatIsNotFiniteIsNamedAndChangesNothing) {
  for (const char* wire : {"float32", "bf16"}) what_is_not_finite_is_named(wire);
}

TEST(PowerSgd, LargeFiniteValuesGiveFiniteStateOrNoStep) {
  for (const float large : {1e18F, 1e30F, 5e36F, 5e37F, 8e37F, 1.5e38F, -1e30F, -5e37F, -8e37F, -1.5e38F}) {
    const float size = std::abs(large);
    Job job(2, model(), power(2, 0, large < 0 ? "bf16" : "float32"));
    for (int t = 0; t < 3; ++t) {
      job.fill([&](int r, int p, std::int64_t i) { return size * value(r, p, i, t); });
      ASSERT_EQ(job.step(), "") << size;
      EXPECT_EQ(job[0].result.committed, job[1].result.committed);
      for (const StateSnapshot& s : job.save()) {
        for (const StateValue& v : s.rows) ASSERT_TRUE(all_finite(v.row.dtype, v.bytes)) << size;
      }
    }
    EXPECT_TRUE(job[0].result.committed || size > 1e31F) << size;
  }
}

void a_restored_job_goes_on(const char* wire) {
  const DataParallelOptions options = power(2, 0, wire);
  Job job(4, model(), options);
  for (int t = 0; t < 3; ++t) {
    fill(job, t);
    ASSERT_EQ(job.step(), "");
  }
  const std::vector<StateSnapshot> saved = job.save();
  Job other(4, model(), options, 3);
  Job forgetful(4, model(), options, 3);  // control: without the factors
  for (int r = 0; r < 4; ++r) {
    StateSnapshot mine = saved[static_cast<std::size_t>(r)];
    other[r].dp->load({&mine, 1});
    forget(mine, "factor");
    forgetful[r].dp->load({&mine, 1});
  }
  for (int t = 3; t < 6; ++t) {
    for (Job* each : {&job, &other, &forgetful}) {
      fill(*each, t);
      ASSERT_EQ(each->step(), "");
    }
    EXPECT_EQ(other[1].outputs, job[1].outputs) << t;
    EXPECT_NE(forgetful[1].outputs, job[1].outputs) << t;
  }
  expect_same_state(other.save(), job.save());
}

TEST(PowerSgd, ARestoredJobGoesOnAsIfNothingHadHappened) {
  for (const char* wire : {"float32", "bf16"}) a_restored_job_goes_on(wire);
}

TEST(PowerSgd, OtherRanksAndPlansKeepResidualsAndFactors) {
  Job old(4, model(), power(2));
  for (int t = 0; t < 3; ++t) {
    fill(old, t);
    ASSERT_EQ(old.step(), "");
  }
  const std::vector<StateSnapshot> saved = old.save();
  Job next(8, model(), power(2), 5);
  for (int r = 0; r < 8; ++r) next[r].dp->load(saved);
  std::vector<double> twice = old.mass(false);  // as much of an average over twice as many
  for (double& v : twice) v *= 2;
  EXPECT_EQ(next.mass(false), twice);
  EXPECT_EQ(row_of(next[5].dp->save(), "factor", "embed").bytes, row_of(saved[0], "factor", "embed").bytes);
  fill(next, 3);
  ASSERT_EQ(next.step(), "");
  expect_equal_ranks(next);
  // One bucket for everything, and back to front.
  const std::vector<int> backwards{7, 6, 5, 4, 3, 2, 1, 0};
  for (int r = 0; r < 4; ++r) old[r].dp->replan({.bucket_bytes = 1 << 20}, backwards);
  EXPECT_EQ(old.plan().num_buckets(), 1) << "dense_below makes no dense ones";
  expect_same_state(saved, old.save());
  fill(old, 3);
  ASSERT_EQ(old.step(), "");
  expect_equal_ranks(old);
  // Another rank: the factors start anew, the residuals stay.
  Job wider(4, model(), power(3), 5);
  for (int r = 0; r < 4; ++r) wider[r].dp->load(saved);
  fill(wider, 3);
  ASSERT_EQ(wider.step(), "");
  EXPECT_EQ(row_of(wider[0].dp->save(), "factor", "embed").row.shard.shape[0], 3);
  // Bad snapshots.
  StateSnapshot bad = saved[0];
  row_of(bad, "factor", "embed").values<float>()[3] = std::nanf("");
  EXPECT_THROW(wider[0].dp->load({&bad, 1}), UsageError);
  bad = saved[0];
  row_of(bad, "factor", "embed").bytes.resize(99 * sizeof(float));
  EXPECT_THROW(wider[0].dp->load({&bad, 1}), UsageError);
  std::vector<StateSnapshot> differ = saved;
  row_of(differ[1], "factor", "embed").values<float>()[3] += 1;
  Job fewer(2, model(), power(2), 5);
  EXPECT_THROW(fewer[0].dp->load(differ), UsageError);
  fewer[0].dp->load(saved);  // control
}

TEST(PowerSgd, BytesAreTheFormula) {
  constexpr int kRank = 4;
  // Lengths that 4 ranks divide: then all of them send the same.
  const std::vector<ParameterInfo> parameters{
      {"embed", 128 * 64, 0, 128}, {"w1", 64 * 64, 1, 64}, {"b1", 64, 2},
      {"w2", 64 * 32, 3, 64},      {"small", 8 * 8, 4, 8}, {"b2", 32, 5}};
  const double elements = kRank * (128 + 64) + kRank * (64 + 64) + 64 + kRank * (64 + 32) + 64 + 32;
  for (const int ranks : {1, 2, 4}) {
    Job job(ranks, parameters, power(kRank));
    ASSERT_GT(job.plan().num_buckets(), 2);
    for (int t = 0; t < 2; ++t) {
      fill(job, t);
      ASSERT_EQ(job.step(), "");
    }
    for (int r = 0; r < ranks; ++r) {
      EXPECT_EQ(job[r].dp->low_rank_bytes(), 2.0 * (ranks - 1) / ranks * 4 * elements);
      double sent = 0;
      for (int b = 0; b < job.plan().num_buckets(); ++b) {
        sent += static_cast<double>(job[r].dp->result(b).entry_bytes_sent());
      }
      EXPECT_EQ(sent, job[r].dp->low_rank_bytes());
      const std::int64_t formula = formula_bytes(*job[r].dp, ranks, {}, std::size_t{1} << 20);
      EXPECT_EQ(sent, static_cast<double>(formula));
      EXPECT_EQ(job[r].dp->call(0).algorithm, "powersgd");
    }
  }
  // In bfloat16 half of them, of every rank and bucket, as integers; and the rows say so.
  Job whole_sums(4, parameters, power(kRank)), half_sums(4, parameters, power(kRank, 0, "bf16"));
  for (Job* each : {&whole_sums, &half_sums}) {
    fill(*each, 0);
    ASSERT_EQ(each->step(), "");
  }
  for (int r = 0; r < 4; ++r) {
    DataParallel &half = *half_sums[r].dp, &whole_one = *whole_sums[r].dp;
    EXPECT_EQ(2 * half.low_rank_bytes(), whole_one.low_rank_bytes());
    EXPECT_EQ(2 * formula_bytes(half, 4, {}, std::size_t{1} << 20),
              formula_bytes(whole_one, 4, {}, std::size_t{1} << 20));
    for (int b = 0; b < half.plan().num_buckets(); ++b)
      EXPECT_EQ(2 * half.result(b).entry_bytes_sent(), whole_one.result(b).entry_bytes_sent());
    EXPECT_EQ(half.rows()[0].codec, "bf16");
    EXPECT_EQ(half.exchanges()[1].codec, "bf16");
    EXPECT_EQ(whole_one.rows()[0].codec, "");
  }
  // Control: sent as they are, they take more.
  DataParallelOptions whole = power(kRank);
  whole.scheme.min_compression = 1e9;
  Job job(4, parameters, whole);
  EXPECT_GT(job[0].dp->low_rank_bytes(), 2 * 2.0 * 3 / 4 * 4 * elements);
}

TEST(PowerSgd, ManyBucketsInAnyOrder) {
  constexpr int kRanks = 4;
  std::vector<ParameterInfo> parameters;
  for (int l = 0; l < 32; ++l) {
    parameters.push_back({"layer" + std::to_string(l), 40 * (20 + l), l, 40});
    parameters.push_back({"bias" + std::to_string(l), 1 + l % 7, l});
  }
  DataParallelOptions options = power(2);
  options.scheme.buckets.bucket_bytes = 4 * 40 * 20 + 4 * 7;
  std::vector<Vectors> expected;
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    // A window of one small message against one without a limit worth mentioning.
    const std::size_t window = seed == 0 ? std::size_t{1} << 30 : 64;
    Job job(kRanks, parameters, options, seed, {.window_bytes = window, .operation_timeout = 10s});
    ASSERT_GE(job.plan().num_buckets(), 32);
    for (std::size_t t = 0; t < 3; ++t) {
      fill(job, static_cast<int>(t));
      ASSERT_EQ(job.step(), "") << "seed " << seed;
      EXPECT_NE(job[0].order, job[1].order) << "or the test is blind";
      expect_equal_ranks(job);
      if (seed == 0) expected.push_back(job[0].outputs);
      EXPECT_EQ(job[2].outputs, expected[t]) << "seed " << seed;
    }
    std::size_t most = 0;
    for (int r = 0; r < kRanks; ++r) most = std::max(most, job[r].most_in_flight);
    EXPECT_GE(most, 8u) << "backward and seven buckets at once";
  }
}

// The part of a gradient of five directions that two columns miss in the sixth step, nothing being fed back.
double missed(bool warm) {
  const std::vector<ParameterInfo> parameters{{"w", 60 * 50, 0, 60}};
  Job job(2, parameters, power(2));
  for (int t = 0; t < 6; ++t) {
    for (int r = 0; r < 2; ++r) {
      StateSnapshot start = job[r].dp->save();
      forget(start, "residual");
      if (!warm) forget(start, "factor");
      job[r].dp->load({&start, 1});
    }
    job.fill([&](int, int, std::int64_t i) { return directions(5, i); });
    EXPECT_EQ(job.step(), "");
  }
  double left = 0, size = 0;
  const std::vector<double> residual = job.mass(false);
  for (std::size_t i = 0; i < residual.size(); ++i) {
    left += std::pow(residual[i] / 2, 2);
    size += std::pow(static_cast<double>(job[0].gradients[0][i]), 2);
  }
  return std::sqrt(left / size);
}

TEST(PowerSgd, WarmStartFollowsTheGradient) { EXPECT_LT(missed(true), 0.9 * missed(false)); }

TEST(PowerSgd, BadCallsAreRefused) {
  Job job(2, model(), power(2));
  Engine& engine = *job[0].engine;
  const auto make = [&](DataParallelOptions options, std::vector<ParameterInfo> parameters = model()) {
    options.first_slot = 100;
    DataParallel(engine, engine.world(), std::move(parameters), options);
  };
  EXPECT_THROW(make(power(0)), UsageError);
  DataParallelOptions bad = power(2);
  bad.scheme.min_compression = -1;
  EXPECT_THROW(make(bad), UsageError);
  bad = power(2);
  bad.dtype = DType::float64;
  EXPECT_THROW(make(bad), UsageError);
  bad = power(2, 0, "float23");
  EXPECT_THROW(make(bad), UsageError);
  bad = power(2);
  bad.scheme.all_reduce = "rink";
  EXPECT_THROW(make(bad), UsageError);
  EXPECT_THROW(make(power(2), {{"w", 10, 0, 3}}), UsageError);
  EXPECT_THROW(make(power(2), {{"w", 10, 0, -1}}), UsageError);
  bad = power(2);
  bad.scheme.name = "powersdg";
  try {
    make(bad);
    ADD_FAILURE();
  } catch (const UsageError& e) {
    EXPECT_NE(std::string(e.what()).find("did you mean 'powersgd'"), std::string::npos) << e.what();
  }
}

TEST(PowerSgd, RanksWithOtherOptionsAreToldSo) {
  const auto with = [](const DataParallelOptions& other) {
    Job job(2, model(), power(2));
    for (int r = 0; r < 2; ++r) {
      DataParallelOptions options = r == 0 ? power(2) : other;
      options.first_slot = 100;
      job[r].dp = std::make_unique<DataParallel>(*job[r].engine, job[r].engine->world(), model(), options);
    }
    fill(job, 0);
    return job.step();
  };
  DataParallelOptions other = power(2);
  EXPECT_EQ(with(other), "");  // control: the same options
  other.scheme.seed = 9;  // the lengths agree: without the comparison they would be summed without a word
  EXPECT_NE(with(other).find("another plan of buckets"), std::string::npos);
  EXPECT_NE(with(power(3)), "");
  EXPECT_NE(with(power(2, 0, "bf16")).find("another plan of buckets"), std::string::npos);
  EXPECT_EQ(with(power(2, 0, "auto")), "") << "that is float32";
}

}  // namespace
}  // namespace weft
