// Data parallel in virtual time: every rank's backward hands out its gradients in an order and at times of
// its own, while buckets that are complete are in flight.
#include "data_parallel/data_parallel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "data_parallel/formula.h"
#include "sim/data_parallel_job.h"
#include "sim/sparse_job.h"
#include "weft/error.h"
#include "workload/distributions.h"

namespace weft {
namespace {

using testing::forget;
using testing::row_of;
using testing::set_values;
using testing::step_of;
using testing::values_of;
using namespace data_parallel_test;

TEST(DataParallel, DensityOneIsTheDenseSumDividedOnce) {
  for (const int ranks : {1, 2, 3, 5, 8}) {
    Job job(ranks, model(), options_of(1, ResidualRule::gres, 0), static_cast<std::uint64_t>(ranks));
    for (int t = 0; t < 2; ++t) {
      // (Positive: a sum of zero is never an entry.)
      job.fill([&](int r, int p, std::int64_t i) {
        return static_cast<float>(1 + (r * 5 + p * 11 + i * 3 + t) % 17);
      });
      ASSERT_EQ(job.step(), "");
      for (int r = 0; r < ranks; ++r) {
        ASSERT_TRUE(job[r].result.committed);
        EXPECT_EQ(job[r].result.step, t);
        Vectors visited;
        for (const auto& g : job[r].gradients) visited.emplace_back(g.size());
        job[r].dp->for_each([&](int p, std::int64_t i, float v) {
          visited[static_cast<std::size_t>(p)][static_cast<std::size_t>(i)] = v;
        });
        EXPECT_EQ(visited, job[r].outputs);
      }
      for (std::size_t p = 0; p < job[0].outputs.size(); ++p) {
        for (std::size_t i = 0; i < job[0].outputs[p].size(); ++i) {
          float sum = 0;
          for (int r = 0; r < ranks; ++r) sum += job[r].gradients[p][i];
          for (int r = 0; r < ranks; ++r) ASSERT_EQ(job[r].outputs[p][i], sum / static_cast<float>(ranks));
        }
      }
    }
  }
}

// The norm is that of what is handed out, also where buckets were dense (all of it selected, or as topkdsa
// gathers what is not sparse any more) and are sparse again.
TEST(DataParallel, SquaresAreThoseOfTheResultWhateverTheStepBeforeWas) {
  for (const char* name :
       {"dense", "dense-bf16", "spardl", "topka", "topkdsa", "gtopk", "oktopk", "powersgd"}) {
    DataParallelOptions options = options_of(0.01, ResidualRule::gres, 0);
    options.scheme.name = name;
    Job job(4, model(), options);
    std::uint32_t t = 0;
    for (const double density : {1.0, 0.25, 0.01, 0.01, 1.0}) {
      for (int r = 0; r < 4; ++r) job[r].dp->set_density(density);
      job.fill_whole(t++);
      ASSERT_EQ(job.step(), "") << name;
      double expected = 0;
      for (const std::vector<float>& output : job[0].outputs)
        for (const double value : output) expected += value * value;
      ASSERT_GT(expected, 0);
      EXPECT_NEAR(job[0].dp->squares() / expected, 1, 1e-12) << name << ", step " << t;
    }
  }
}

TEST(DataParallel, BucketsInFlightEqualBucketsAlone) {
  constexpr int kRanks = 5;
  for (std::uint64_t seed = 0; seed < 3; ++seed) {
    Job job(kRanks, model(), options_of(0.05), seed);
    // Of each bucket: the same all-reduce, one at a time.
    std::vector<std::unique_ptr<sparse_test::SparseJob>> alone;
    for (const Bucket& b : job.plan().buckets()) {
      SparseOptions options = sparse_test::options_of(b.count, ResidualRule::gres, 0, "auto", "packed");
      if (b.dense) options.algorithm = "dense";
      alone.push_back(std::make_unique<sparse_test::SparseJob>(kRanks, b.count, options, seed + 17));
    }
    ASSERT_GT(alone.size(), 4u);
    for (std::uint32_t t = 0; t < 4; ++t) {
      job.fill_whole(t);
      ASSERT_EQ(job.step(), "");
      for (int b = 0; b < job.plan().num_buckets(); ++b) {
        sparse_test::SparseJob& one = *alone[static_cast<std::size_t>(b)];
        one.options().k = job[0].dp->quotas()[static_cast<std::size_t>(b)];
        for (int r = 0; r < kRanks; ++r) {
          one.gradient(r).clear();
          for (const BucketPiece& piece : job.plan().bucket(b).pieces) {
            const std::vector<float>& g = job[r].gradients[static_cast<std::size_t>(piece.parameter)];
            one.gradient(r).insert(one.gradient(r).end(), g.begin(), g.end());
          }
        }
        one.step();
        for (int r = 0; r < kRanks; ++r) {
          std::vector<float> got(one.gradient(r).size());
          job[r].dp->result(b).add_to(got);
          ASSERT_EQ(got, one.dense(0)) << "bucket " << b << ", rank " << r << ", step " << t;
        }
      }
      for (int r = 1; r < kRanks; ++r) {
        EXPECT_EQ(job[r].dp->quotas(), job[0].dp->quotas());
        EXPECT_EQ(job[r].outputs, job[0].outputs);
      }
    }
    std::size_t most = 0;
    for (int r = 0; r < kRanks; ++r) most = std::max(most, job[r].most_in_flight);
    EXPECT_GE(most, 3u) << "backward and two buckets at once";
  }
}

TEST(DataParallel, ConservesMassAcrossBucketsAndSteps) {
  for (const int ranks : {1, 2, 3, 6}) {
    for (const ResidualRule rule : {ResidualRule::gres, ResidualRule::drop}) {
      Job job(ranks, model(), options_of(0.03, rule), static_cast<std::uint64_t>(ranks));
      EXPECT_EQ(job.run_and_weigh(5), 0.0) << ranks << " ranks, " << name_of(rule);
    }
  }
  Job lossy(4, model(), options_of(0.03, ResidualRule::lres));  // control
  EXPECT_GT(lossy.run_and_weigh(3), 0.0);
}

// Of each bucket: as many entries as its quota says, where a scheme promises that, and the quotas by length
// where they are proportional.
void expect_entries(Job& job, std::string_view name, QuotaKind kind, std::uint32_t step) {
  std::int64_t selected = 0, elements = 0;
  for (int b = 0; b < job.plan().num_buckets(); ++b) {
    const Bucket& bucket = job.plan().bucket(b);
    const std::int64_t quota = job[0].dp->quotas()[static_cast<std::size_t>(b)];
    if (!find_scheme(name).selects) continue;
    if (bucket.dense) {
      EXPECT_EQ(quota, bucket.count) << name;
      continue;
    }
    selected += quota;
    elements += bucket.count;
    const std::int64_t out = job[0].dp->result(b).num_entries();
    if (name == "topka" || name == "topkdsa") {  // each rank's selection; sums may cancel
      EXPECT_GT(out, quota) << name;
      EXPECT_LE(out, 4 * quota) << name;
    } else if (name == "oktopk" && step > 0) {
      EXPECT_GE(out, 1) << name;
    } else {
      EXPECT_EQ(out, quota) << name << ", bucket " << b << ", step " << step;
    }
    if (kind == QuotaKind::proportional || step == 0) {
      EXPECT_NEAR(static_cast<double>(quota), 0.05 * static_cast<double>(bucket.count), 2) << name;
    }
  }
  if (selected > 0) {
    EXPECT_NEAR(static_cast<double>(selected), 0.05 * static_cast<double>(elements), 1) << name;
  }
}

TEST(DataParallel, EveryAlgorithmAndKindOfQuotas) {
  for (const std::string_view name :
       {"spardl", "topka", "topkdsa", "gtopk", "oktopk", "dense", "dense-bf16"}) {
    for (const QuotaKind kind : {QuotaKind::adaptive, QuotaKind::proportional}) {
      DataParallelOptions options = options_of(0.05);
      options.scheme.name = name;
      options.scheme.quotas = kind;
      Job job(4, model(), options);
      double largest = 0;  // that is left of what was put in, over all steps
      for (std::uint32_t t = 0; t < 4; ++t) {
        job.fill_whole(t);
        const std::vector<double> in = job.mass(true);
        ASSERT_EQ(job.step(), "") << name;
        for (int r = 0; r < 4; ++r) ASSERT_EQ(job[r].outputs, job[0].outputs) << name;
        const std::vector<double> out = job.applied();
        const std::vector<double> left = job.mass(false);
        // Whole numbers sum exactly: what went in comes out or stays. (bfloat16 rounds at each of three
        // additions, by 2^-9 of sums that are below 4000.)
        const double rounding = name == "dense-bf16" ? 3 * 4000 * 0x1p-9 : 0;
        for (std::size_t i = 0; i < in.size(); ++i) {
          ASSERT_NEAR(in[i], out[i] + left[i], rounding) << name << ", element " << i << ", step " << t;
          largest = std::max(largest, std::abs(left[i]));
        }
        expect_entries(job, name, kind, t);
      }
      EXPECT_EQ(job[0].dp->state().step(), 4);
      EXPECT_EQ(largest > 0, !find_scheme(name).lossless)
          << name << ": who selects or rounds leaves something";
    }
  }
}

void expect_same_state(const std::vector<StateSnapshot>& a, const std::vector<StateSnapshot>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t r = 0; r < a.size(); ++r) {
    EXPECT_EQ(step_of(a[r]), step_of(b[r]));
    for (const StateValue& v : a[r].rows) {
      const auto& [owner, kind, name] = v.row.key;
      if (kind == "residual") {
        EXPECT_EQ(values_of(a[r], kind, name), values_of(b[r], kind, name));
      }
      if (kind == "scale") {
        EXPECT_EQ(v, row_of(b[r], kind, name));
      }
    }
  }
}

TEST(DataParallel, NanIsReportedByNameOnAllRanksAndChangesNothing) {
  for (const std::string_view algorithm :
       {"spardl", "topka", "topkdsa", "gtopk", "oktopk", "dense", "dense-bf16"}) {
    DataParallelOptions options = options_of(0.05);
    options.scheme.name = algorithm;
    Job job(4, model(), options);
    for (std::uint32_t t = 0; t < 2; ++t) {
      job.fill_whole(t);
      ASSERT_EQ(job.step(), "");
    }
    const std::vector<StateSnapshot> before = job.save();
    job.fill_whole(2);
    job[2].gradients[5][123] = std::nanf("");
    job[0].gradients[2][3] = HUGE_VALF;  // in a dense bucket
    ASSERT_EQ(job.step(), "");
    for (int r = 0; r < 4; ++r) {
      const StepResult& result = job[r].result;
      EXPECT_FALSE(result.committed);
      EXPECT_EQ(result.text, job[0].result.text);
      EXPECT_NE(result.text.find("'layer3.weight' on rank 2 holds NaN"), std::string::npos) << result.text;
      EXPECT_NE(result.text.find("'layer1.bias' on rank 0 holds infinity"), std::string::npos) << result.text;
      EXPECT_EQ(result.bad.size(), 2u) << "nobody else is to blame: " << result.text;
      EXPECT_THROW(job[r].dp->copy_to({}), UsageError);
    }
    expect_same_state(before, job.save());
    job.fill_whole(2);
    ASSERT_EQ(job.step(), "");
    for (int r = 0; r < 4; ++r) EXPECT_TRUE(job[r].result.committed) << "the next step is as good as any";
    EXPECT_EQ(job[0].dp->state().step(), 3);
  }
}

TEST(DataParallel, ASumThatOverflowsIsSaid) {
  const DataParallelOptions options = options_of(0.05);
  Job job(3, model(), options);
  job.fill([](int, int p, std::int64_t i) { return p == 1 && i == 5 ? 3e38F : 1.0F; });
  ASSERT_EQ(job.step(), "");
  for (int r = 0; r < 3; ++r) {
    EXPECT_FALSE(job[r].result.committed);
    EXPECT_TRUE(job[r].result.bad.empty());
    EXPECT_NE(job[r].result.text.find("overflows in the bucket from 'layer1.weight'"), std::string::npos)
        << job[r].result.text;
  }
}

TEST(DataParallel, AnotherPlanKeepsEveryResidual) {
  Job job(4, model(), options_of(0.02));
  EXPECT_EQ(job.run_and_weigh(3), 0.0);
  const std::vector<StateSnapshot> before = job.save();
  double kept = 0;
  for (const double v : job.mass(false)) kept += std::abs(v);
  ASSERT_GT(kept, 0) << "or there is nothing to lose";
  const std::vector<int> backwards{7, 6, 5, 4, 3, 2, 1, 0};
  for (int r = 0; r < 4; ++r) job[r].dp->replan({.bucket_bytes = 4 * 4000, .dense_below = 0}, backwards);
  EXPECT_EQ(job.plan().parameter(job.plan().bucket(0).pieces[0].parameter).name, "head");
  expect_same_state(before, job.save());
  EXPECT_EQ(job.run_and_weigh(3), 0.0);
  // Everything dense: the residuals go out with the next sum.
  for (int r = 0; r < 4; ++r) job[r].dp->replan({.bucket_bytes = 4 * 4000, .dense_below = 1'000'000});
  EXPECT_EQ(job.run_and_weigh(1), 0.0);
  for (const double v : job.mass(false)) EXPECT_EQ(v, 0.0);
  // Control: a plan without a parameter that has a residual would lose it.
  StateRegistry registry;
  ParameterState state(BucketPlan(model(), {}), registry, {.peers = {0, 4}});
  registry.load({&before[0], 1}, 0, 4);
  EXPECT_THROW(state.install(BucketPlan({{"embed", 3000, 0}}, {})), UsageError);
}

TEST(DataParallel, SnapshotsLoadOnAnyNumberOfRanks) {
  for (const auto& [from, to] : {std::pair{4, 2}, std::pair{5, 3}, std::pair{2, 5}, std::pair{3, 1}}) {
    Job old(from, model(), options_of(0.02));
    EXPECT_EQ(old.run_and_weigh(3), 0.0);
    const std::vector<StateSnapshot> saved = old.save();
    Job next(to, model(), options_of(0.02), 5);
    for (int r = 0; r < to; ++r) next[r].dp->load(saved);
    EXPECT_EQ(next.mass(false), old.mass(false)) << from << " to " << to;
    EXPECT_EQ(next[0].dp->state().step(), 3);
    EXPECT_EQ(next.run_and_weigh(2), 0.0);
  }
}

// What a job owes, as so many ranks put it out in one step that sends everything and has no gradient. Their average.
Vectors owed(const std::vector<StateSnapshot>& saved, int ranks, double momentum) {
  DataParallelOptions options = options_of(1, ResidualRule::gres, ranks);
  options.scheme.momentum_correction = momentum;
  Job job(ranks, model(), options, 5);
  for (int r = 0; r < ranks; ++r) job[r].dp->load(saved);
  job.fill([](int, int, std::int64_t) { return 0.0F; });
  EXPECT_EQ(job.step(), "");
  EXPECT_TRUE(job[0].result.committed) << job[0].result.text;
  for (const double v : job.mass(false)) EXPECT_EQ(v, 0.0) << "it owes nothing any more";
  return job[0].outputs;
}

// What two ranks had left behind, and the momentum of their gradients, move the weights as far as on two ranks.
TEST(DataParallel, WhatWasLeftBehindWeighsTheSameOnAnyNumberOfRanks) {
  for (const double momentum : {0.0, 0.5}) {
    DataParallelOptions options = options_of(0.02, ResidualRule::gres, 2);
    options.scheme.momentum_correction = momentum;
    Job old(2, model(), options);
    for (std::uint32_t t = 0; t < 3; ++t) {
      old.fill_whole(t);
      ASSERT_EQ(old.step(), "");
    }
    const std::vector<StateSnapshot> saved = old.save();
    const Vectors expected = owed(saved, 2, momentum);
    double largest = 0;
    for (const std::vector<float>& each : expected) {
      for (const float v : each) largest = std::max(largest, std::abs(static_cast<double>(v)));
    }
    ASSERT_GT(largest, 10) << "or there is nothing to weigh";
    for (const int ranks : {1, 4, 8}) EXPECT_EQ(owed(saved, ranks, momentum), expected) << ranks;
    // A rank has at most 1000 (1 + 1.5 + 1.75) left behind and half of 1750 to add, together 5125. Of two ranks both
    // are multiplied by 3/2 and added, 6 roundings of 1.5 x 5125; their sum is added up twice, over 3; then the mean.
    const Vectors of_three = owed(saved, 3, momentum);
    for (std::size_t p = 0; p < expected.size(); ++p) {
      for (std::size_t i = 0; i < expected[p].size(); ++i)
        EXPECT_NEAR(of_three[p][i], expected[p][i], ((6 * 1.5 + 2 * 3) / 3 + 1) * 5125 * 0x1p-24);
    }
    // Control: sums that are taken as they were.
    std::vector<StateSnapshot> as_of_four = saved;
    for (StateSnapshot& s : as_of_four) {
      for (StateValue& v : s.rows) v.row.divisor = v.row.rule == LayoutRule::sum ? 4 : v.row.divisor;
    }
    EXPECT_NE(owed(as_of_four, 4, momentum), expected);
  }
}

TEST(DataParallel, MergedFloatsAreConservedUpToOneRoundingEach) {
  Job old(6, model(), options_of(0.02));
  old.fill([](int r, int p, std::int64_t i) {
    return static_cast<float>(std::sin(r + 7.0 * p + 0.37 * static_cast<double>(i)));
  });
  ASSERT_EQ(old.step(), "");
  const std::vector<StateSnapshot> saved = old.save();
  Job next(2, model(), options_of(0.02));
  for (int r = 0; r < 2; ++r) next[r].dp->load(saved);
  const std::vector<double> before = old.mass(false);
  const std::vector<double> after = next.mass(false);
  double worst = 0;
  for (std::size_t i = 0; i < before.size(); ++i) worst = std::max(worst, std::abs(before[i] - after[i]));
  // gres and drop leave at most 6 on a rank; 4 additions of up to 18, each rounded by 2^-24 of that.
  EXPECT_LE(worst, 4 * 18 * 0x1p-24);
  EXPECT_GT(worst, 0) << "these values do not sum exactly, or the test is blind";
}

TEST(DataParallel, ARestoredJobGoesOnAsIfNothingHadHappened) {
  for (const std::string_view algorithm : {"spardl", "oktopk"}) {
    DataParallelOptions options = options_of(0.05);
    options.scheme.name = algorithm;
    Job job(4, model(), options);
    for (std::uint32_t t = 0; t < 3; ++t) {
      job.fill_whole(t);
      ASSERT_EQ(job.step(), "");
    }
    Job other(4, model(), options, 3);
    Job forgetful(4, model(), options, 3);  // control: begins without what was saved
    const std::vector<StateSnapshot> saved = job.save();
    for (int r = 0; r < 4; ++r) other[r].dp->load(saved);
    for (std::uint32_t t = 3; t < 6; ++t) {
      job.fill_whole(t);
      other.fill_whole(t);
      ASSERT_EQ(job.step(), "");
      ASSERT_EQ(other.step(), "");
      EXPECT_EQ(other[1].outputs, job[1].outputs) << algorithm << " step " << t;
      forgetful.fill_whole(t);
      ASSERT_EQ(forgetful.step(), "");
      EXPECT_NE(forgetful[1].outputs, job[1].outputs) << algorithm << " step " << t;
      EXPECT_EQ(other[1].dp->quotas(), job[1].dp->quotas());
    }
  }
}

// Momentum and weight decay after the sum, as on one machine.
struct Sgd {
  Vectors weights, velocity;
  explicit Sgd(const Vectors& like) : weights(like), velocity(like) {
    for (auto* all : {&weights, &velocity}) {
      for (std::vector<float>& v : *all) std::fill(v.begin(), v.end(), 0.0F);
    }
  }
  void step(const Vectors& mean) {
    for (std::size_t p = 0; p < mean.size(); ++p) {
      for (std::size_t i = 0; i < mean[p].size(); ++i) {
        const float g = mean[p][i] + 1e-2F * weights[p][i];
        velocity[p][i] = 0.9F * velocity[p][i] + g;
        weights[p][i] -= 0.1F * velocity[p][i];
      }
    }
  }
};

// Whether ten steps of four ranks end with the weights of one process that sees all their data. Gradients
// follow the weights and are whole numbers: every order of additions gives the same sum.
bool trains_like_one(double density) {
  constexpr int kRanks = 4;
  Job job(kRanks, model(), options_of(density, ResidualRule::gres, kRanks));
  Sgd one(job[0].gradients), many(job[0].gradients);
  for (int t = 0; t < 10; ++t) {
    const auto gradient = [t](const Sgd& sgd, int r, int p, std::int64_t i) {
      const float w = sgd.weights[static_cast<std::size_t>(p)][static_cast<std::size_t>(i)];
      return std::floor(8 * w) + static_cast<float>((r * 7 + p * 3 + i * 5 + t) % 23 - 11);
    };
    Vectors mean = one.weights;
    for (std::size_t p = 0; p < mean.size(); ++p) {
      for (std::size_t i = 0; i < mean[p].size(); ++i) {
        float sum = 0;
        for (int r = 0; r < kRanks; ++r)
          sum += gradient(one, r, static_cast<int>(p), static_cast<std::int64_t>(i));
        mean[p][i] = sum / kRanks;
      }
    }
    one.step(mean);
    job.fill([&](int r, int p, std::int64_t i) { return gradient(many, r, p, i); });
    EXPECT_EQ(job.step(), "");
    many.step(job[1].outputs);
  }
  return one.weights == many.weights;
}

TEST(DataParallel, DensityOneTrainsLikeOneProcess) {
  EXPECT_TRUE(trains_like_one(1));
  EXPECT_FALSE(trains_like_one(0.5));  // control
}

TEST(DataParallel, BadSnapshotsAreRefused) {
  Job job(2, model(), options_of(0.05));
  EXPECT_EQ(job.run_and_weigh(1), 0.0);
  const std::vector<StateSnapshot> good = job.save();
  EXPECT_THROW(job[0].dp->load({&good[1], 1}), UsageError) << "of another rank";
  Job alone(1, model(), options_of(0.05));
  EXPECT_THROW(alone[0].dp->load({&good[0], 1}), UsageError) << "rank 1's is missing";
  EXPECT_THROW(alone[0].dp->load({}), UsageError);
  std::vector<StateSnapshot> bad = good;
  set_values<std::int64_t>(row_of(bad[1], "step", "committed"), {9});
  EXPECT_THROW(alone[0].dp->load(bad), UsageError);
  bad = good;
  bad[1].rank = 0;
  EXPECT_THROW(alone[0].dp->load(bad), UsageError);
  bad = good;
  std::erase_if(bad[1].rows, [](const StateValue& v) { return v.row.key.kind == "residual"; });
  EXPECT_THROW(alone[0].dp->load(bad), UsageError) << "a rank's residuals are dropped";
  bad = good;
  row_of(bad[0], "residual", "embed").values<float>()[1] = std::numeric_limits<float>::infinity();
  EXPECT_THROW(job[0].dp->load({&bad[0], 1}), UsageError);
  bad = good;
  row_of(bad[0], "residual", "embed").bytes.resize(7 * sizeof(float));
  EXPECT_THROW(job[0].dp->load({&bad[0], 1}), UsageError);
  alone[0].dp->load(good);  // control: unspoiled, they load
  expect_same_state(good, job.save());
}

// A bucket's controllers are offsets and thresholds for exactly these elements.
TEST(DataParallel, StateOfParametersThatChangedIsNotTaken) {
  const BucketOptions one{.bucket_bytes = 4 * 4000, .dense_below = 0};
  const std::vector<ParameterInfo> small{{"a", 100, 0}, {"b", 50, 1}};
  const ParameterState::Options of_two{.peers = {0, 2}};
  StateRegistry registry;
  ParameterState state(BucketPlan(small, one), registry, of_two);
  Thresholds& thresholds = state.bucket(0).work().thresholds;
  thresholds = {.local = 1, .global = 1, .k = 5, .steps = 3, .regions = {0, 70, 150}};
  const StateSnapshot good = registry.save(0, 2);
  const auto loaded = [&](const std::vector<ParameterInfo>& parameters, const StateSnapshot& snapshot) {
    StateRegistry other;
    const ParameterState into(BucketPlan(parameters, one), other, of_two);
    other.load({&snapshot, 1}, 0, 2);
    return into.bucket(0).work().thresholds.regions;
  };
  EXPECT_EQ(loaded(small, good), thresholds.regions);  // control: they are taken where all is as it was
  // Another length under the same name, without a residual that would be lost.
  try {
    loaded({{"a", 100, 0}, {"b", 51, 1}}, good);
    ADD_FAILURE();
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("'b' has 50 elements in the snapshot and 51 here"),
              std::string::npos)
        << error.what();
  }
  // A bucket whose parameters do not all come with the snapshot starts anew.
  StateSnapshot less = good;
  std::erase_if(less.rows, [](const StateValue& v) { return v.row.key.name == "b"; });
  EXPECT_TRUE(loaded(small, less).empty());
  EXPECT_TRUE(loaded({{"a", 100, 0}}, good).empty());
  // Regions that do not fit.
  for (const std::vector<std::int64_t>& regions :
       {std::vector<std::int64_t>{0, 70, 151}, {1, 70, 150}, {0, 151, 150}}) {
    StateSnapshot bad = good;
    set_values(row_of(bad, "regions", bucket_name(BucketPlan(small, one), 0)), regions);
    EXPECT_THROW(loaded(small, bad), UsageError);
  }
}

TEST(DataParallel, RanksWithOtherPlansAreToldSo) {
  // The lengths agree: without the comparison they would be summed without a word.
  const std::vector<ParameterInfo> twins{{"left", 2000, 0}, {"right", 2000, 1}};
  Job job(3, twins, options_of(0.05));
  for (int r = 0; r < 3; ++r) {
    const std::vector<int> use = r == 1 ? std::vector<int>{1, 0} : std::vector<int>{0, 1};
    job[r].dp->replan({.bucket_bytes = 4 * 2000, .dense_below = 100}, use);
  }
  EXPECT_NE(job.step().find("another plan of buckets"), std::string::npos);
}

TEST(DataParallel, UnusedParametersAreZerosAndBadCallsAreRefused) {
  const std::vector<float> g(3000);  // outlives the operation that it is left in
  Job job(2, model(), options_of(1));
  job.fill([](int, int, std::int64_t) { return 2.0F; });
  job[1].order = {0, 3};  // shuffled, and the others never come
  ASSERT_EQ(job.step(), "");
  EXPECT_EQ(job[0].outputs[0][7], 4.0F);
  EXPECT_EQ(job[0].outputs[1][7], 2.0F);
  EXPECT_EQ(job[1].outputs[7][7], 2.0F);
  DataParallel& dp = *job[0].dp;
  EXPECT_THROW(dp.gradient_ready(8, g), UsageError);
  EXPECT_THROW(dp.gradient_ready(1, g), UsageError);
  EXPECT_THROW(dp.finish(), UsageError);
  dp.gradient_ready(0, g);
  EXPECT_THROW(dp.gradient_ready(0, g), UsageError);
  EXPECT_THROW(static_cast<void>(dp.save()), UsageError);
  EXPECT_THROW(dp.set_density(0.5), UsageError);
  EXPECT_THROW(job[1].dp->set_density(0), UsageError);
  DataParallelOptions bad = options_of(0.1);
  bad.scheme.name = "magic";
  EXPECT_THROW(DataParallel(*job[0].engine, job[0].engine->world(), model(), bad), UsageError);
}

// Of 64 steps of Ok-Topk with normal gradients: in how many some bucket sent more than its bound for a step
// that evaluates nothing, and in how many some quota moved. Both after the first 32, in which residuals grow.
struct Reuse {
  int evaluated = 0, moved = 0;
};
Reuse reuse_of_thresholds(QuotaKind kind) {
  constexpr int kRanks = 4;
  DataParallelOptions options = options_of(0.05);
  options.scheme.name = "oktopk";
  options.scheme.quotas = kind;
  Job job(kRanks, model(), options);
  Reuse reuse;
  std::vector<std::int64_t> before;
  for (std::uint32_t t = 0; t < 64; ++t) {
    std::vector<Random> random;
    for (int r = 0; r < kRanks; ++r) random.emplace_back(7, 5, static_cast<std::uint32_t>(r), t);
    // Layers whose scales drift apart, so that quotas have something to follow.
    job.fill([&](int r, int p, std::int64_t) {
      const double scale = 1 + 0.1 * std::sin(0.3 * t + p);
      Random& mine = random[static_cast<std::size_t>(r)];
      return static_cast<float>(scale * std::sqrt(-2 * std::log(mine.uniform())) *
                                std::cos(6.283185307 * mine.uniform()));
    });
    EXPECT_EQ(job.step(), "");
    const std::vector<std::int64_t> quotas = job[0].dp->quotas();
    bool evaluated = false;
    for (int b = 0; b < job.plan().num_buckets(); ++b) {
      const std::int64_t k = quotas[static_cast<std::size_t>(b)];
      if (job[0].dp->call(b).algorithm != "oktopk") continue;
      std::uint64_t sent = 0;
      for (int r = 0; r < kRanks; ++r) sent += job[r].dp->result(b).entries_sent();
      // Li and Hoefler: 3k (P-1)/P by each rank. (Who evaluates sends about k (P-1) of sums alone.)
      evaluated |= sent > static_cast<std::uint64_t>(3 * k * (kRanks - 1));
      const std::int64_t out = job[0].dp->result(b).num_entries();
      if (t > 32) {
        EXPECT_TRUE(2 * out >= k && out <= 2 * k) << out << " entries for " << k << " at " << t;
      }
    }
    if (t >= 32) {
      reuse.evaluated += evaluated ? 1 : 0;
      reuse.moved += quotas != before ? 1 : 0;
    }
    before = quotas;
  }
  return reuse;
}

TEST(DataParallel, ThresholdsAreReusedWhileQuotasMove) {
  const Reuse fixed = reuse_of_thresholds(QuotaKind::proportional);  // control: nothing to follow
  EXPECT_EQ(fixed.moved, 0);
  EXPECT_GE(fixed.evaluated, 1) << "every 32 steps, or evaluations are not seen";
  EXPECT_LE(fixed.evaluated, 4);
  const Reuse adaptive = reuse_of_thresholds(QuotaKind::adaptive);
  EXPECT_GE(adaptive.moved, 24) << "or there is nothing to follow";
  EXPECT_GE(adaptive.evaluated, 1);
  EXPECT_LE(adaptive.evaluated, 4);
}

// Mean share, over the last steps, of the energy that the top k of the exact sum of gradients and residuals
// has.
double captured(int layers_per_bucket, QuotaKind kind) {
  constexpr int kRanks = 4;
  constexpr int kLayers = 16;
  constexpr std::int64_t kLayer = 4096;
  std::vector<ParameterInfo> parameters;
  for (int l = 0; l < kLayers; ++l) parameters.push_back({"layer" + std::to_string(l), kLayer, l});
  DataParallelOptions options = options_of(0.01);
  options.scheme.quotas = kind;
  options.scheme.teams = 1;
  options.scheme.buckets.bucket_bytes = static_cast<std::size_t>(4 * kLayer * layers_per_bucket);
  Job job(kRanks, parameters, options);
  EXPECT_EQ(job.plan().num_buckets(), kLayers / layers_per_bucket);
  double sum = 0;
  constexpr int kSteps = 10;
  for (int t = 0; t < kSteps; ++t) {
    for (int r = 0; r < kRanks; ++r) {
      for (int l = 0; l < kLayers; ++l) {
        const Draw what{Distribution::layered, 1, static_cast<std::uint32_t>(r),
                        static_cast<std::uint32_t>(t)};
        draw(what, kLayer * kLayers, kLayer * l, job[r].gradients[static_cast<std::size_t>(l)]);
      }
    }
    std::vector<double> exact = job.mass(true);
    EXPECT_EQ(job.step(), "");
    if (t < kSteps / 2) continue;
    const std::vector<double> out = job.applied();
    double got = 0;
    for (std::size_t i = 0; i < out.size(); ++i) got += out[i] != 0 ? exact[i] * exact[i] : 0;
    for (double& v : exact) v *= v;
    const auto k = static_cast<std::ptrdiff_t>(0.01 * static_cast<double>(exact.size()) + 0.5);
    std::nth_element(exact.begin(), exact.begin() + k, exact.end(), std::greater<>());
    sum += got / std::accumulate(exact.begin(), exact.begin() + k, 0.0);
  }
  return sum / (kSteps - kSteps / 2);
}

TEST(DataParallel, AdaptiveQuotasCaptureTheEnergyOfOneBucket) {
  const double one = captured(16, QuotaKind::adaptive);
  const double proportional = captured(1, QuotaKind::proportional);
  const double adaptive = captured(1, QuotaKind::adaptive);
  std::printf(
      "captured energy, 16 layers, scales 1 to 1/100, 4 ranks, 1 %%: one bucket %.3f, proportional %.3f, "
      "adaptive %.3f\n",
      one, proportional, adaptive);
  EXPECT_GT(adaptive, 0.9 * one);
  EXPECT_LT(proportional, 0.7 * one);  // control
}

// Packed indices of some quotas take more bytes than those of others: the bound that is told at any step is
// one for all of them.
TEST(DataParallel, BytesAreBelowTheirBoundWhereverQuotasGo) {
  constexpr int kRanks = 4;
  constexpr std::int64_t kLayer = 4096;
  std::vector<ParameterInfo> parameters;
  for (int l = 0; l < 8; ++l) parameters.push_back({"layer" + std::to_string(l), kLayer, l});
  DataParallelOptions options = options_of(0.01);
  options.scheme.name = "topka";
  options.scheme.buckets.bucket_bytes = 4 * kLayer;
  Job job(kRanks, parameters, options);
  std::int64_t least_bound = std::numeric_limits<std::int64_t>::max(), least_by_quotas = least_bound;
  double most_sent = 0;
  for (std::uint32_t t = 0; t < 16; ++t) {
    Random random(3, 9, t);
    // Equal layers at first, so that quotas are; then layers that take what others had.
    job.fill([&](int, int p, std::int64_t) {
      return static_cast<float>((random.uniform() - 0.5) * (t < 4 ? 1 : std::pow(8.0, p % 4)));
    });
    ASSERT_EQ(job.step(), "");
    double sent = 0;
    for (int b = 0; b < job.plan().num_buckets(); ++b)
      sent += static_cast<double>(job[0].dp->result(b).entry_bytes_sent());
    most_sent = std::max(most_sent, sent);
    least_bound = std::min(least_bound, formula_bytes(*job[0].dp, kRanks, {}, std::size_t{1} << 20));
    std::int64_t by_quotas = 0;
    for (int b = 0; b < job.plan().num_buckets(); ++b)
      by_quotas += cost_of(*job[0].dp, b, kRanks, {}, std::size_t{1} << 20).bytes;
    least_by_quotas = std::min(least_by_quotas, by_quotas);
  }
  EXPECT_LE(most_sent, static_cast<double>(least_bound));
  EXPECT_GE(most_sent, 0.9 * static_cast<double>(least_bound));
  EXPECT_GT(most_sent, static_cast<double>(least_by_quotas));  // control: of one step's quotas it is no bound
}

// Gradients get ready faster than the link takes them.
TEST(DataParallel, TheFirstThatForwardNeedsOvertakesUnlessAllAreAwaitedTogether) {
  constexpr int kLayers = 6;
  std::vector<ParameterInfo> parameters;
  for (int l = 0; l < kLayers; ++l) parameters.push_back({"layer" + std::to_string(l), 300'000, l});
  for (const bool together : {false, true}) {
    DataParallelOptions options = options_of(0.01);
    options.scheme.name = "dense";
    options.scheme.buckets.bucket_bytes = 4;  // one for each layer
    options.awaited_together = together;
    Trace trace;
    Job job(3, parameters, options, 0, {.window_bytes = 1, .operation_timeout = 10s, .trace = &trace});
    ASSERT_EQ(job.plan().num_buckets(), kLayers);
    ASSERT_EQ(job.step(), "");
    std::vector<Time> ended(kLayers);
    for (const TraceEvent& e : trace.events()) {
      if (e.kind != TraceEvent::Kind::operation || !e.name.starts_with("gradients of bucket ")) continue;
      Time& last = ended.at(static_cast<std::size_t>(e.name.at(20) - '0'));
      last = std::max(last, e.finished);
    }
    if (together)
      EXPECT_LT(ended.back(), ended.front());
    else
      EXPECT_LT(ended.front(), ended.back());
  }
}

}  // namespace
}  // namespace weft
