// Ok-Topk in virtual time: thresholds that are reused and evaluated, regions that move, and what they cost.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "collectives/sparse_allreduce/call.h"
#include "sim/sparse_job.h"
#include "weft/error.h"

namespace weft {
namespace {

using namespace sparse_test;

// Every 1024 elements are 8 times as large as those before.
void skew(SparseJob& job) {
  for (int r = 0; r < job.size(); ++r) {
    for (std::size_t i = 0; i < job.gradient(r).size(); ++i)
      job.gradient(r)[i] *= std::exp2(3 * static_cast<float>(i / 1024));
  }
}

const Thresholds& thresholds(SparseJob& job, int r) { return job.state(r).work().thresholds; }

// Runs 200 steps; from step 128 on, where the residuals have stopped to grow (5 n/k steps), every step must
// keep to the band and to the row's bounds.
void check_settled(int ranks, std::uint64_t seed) {
  const SparseAlgorithm& row = find_sparse_algorithm("oktopk");
  constexpr std::int64_t kK = 240;
  SparseJob job(ranks, 6000, method("oktopk", kK, ResidualRule::pres));
  const SparseShape shape{.size = ranks, .length = 6000, .k = kK};
  int reused = 0;
  for (std::uint32_t t = 0; t < 200; ++t) {
    fill(job, t, Data::gauss, seed);
    const float before = thresholds(job, 0).global;
    job.step();
    for (int r = 1; r < ranks; ++r) {
      ASSERT_EQ(thresholds(job, r).global, thresholds(job, 0).global) << "step " << t;
      ASSERT_EQ(thresholds(job, r).regions, thresholds(job, 0).regions) << "step " << t;
    }
    const std::int64_t count = job.result(0).num_entries();
    if (t % 32 == 0 || before == 0) {
      EXPECT_EQ(count, kK) << "evaluated: exactly k, step " << t;
      EXPECT_TRUE(t % 32 == 0 || t < 128) << "evaluated once more at step " << t;
      continue;
    }
    ++reused;
    if (t < 128) continue;
    EXPECT_GE(3 * count, 2 * kK) << "step " << t;
    EXPECT_LE(3 * count, 4 * kK) << "step " << t;
    for (int r = 0; r < ranks; ++r) {
      const OperationTraffic traffic = job.recording(r).traffic(1, job.last_step());
      EXPECT_LE(job.result(r).entries_sent(), static_cast<std::uint64_t>(row.entries(shape)))
          << "step " << t << ", rank " << r;
      EXPECT_LE(traffic.payload_bytes_sent, static_cast<std::uint64_t>(payload_bytes(row, shape)))
          << "step " << t << ", rank " << r;
      EXPECT_LE(static_cast<int>(traffic.hops.size()), row.rounds(shape));
    }
  }
  EXPECT_GE(reused, 160);
}

TEST(Oktopk, SettlesNearKAndKeepsToItsBound) {
  for (const int ranks : {1, 3, 8}) {
    for (const std::uint64_t seed : {1, 2, 99}) check_settled(ranks, seed);
  }
}

TEST(Oktopk, RegionsFollowTheDataEverySixtyFourSteps) {
  SparseJob job(4, 4096, method("oktopk", 200));
  std::vector<std::int64_t> regions;
  for (std::uint32_t t = 0; t < 130; ++t) {
    fill(job, t, Data::gauss);
    if (t >= 50) skew(job);
    job.step();
    const std::vector<std::int64_t>& now = thresholds(job, 2).regions;
    ASSERT_EQ(now.size(), 5u);
    EXPECT_EQ(now.front(), 0);
    EXPECT_EQ(now.back(), 4096);
    EXPECT_TRUE(std::is_sorted(now.begin(), now.end()));
    if (t % 64 != 0) {
      EXPECT_EQ(now, regions) << "step " << t;
    } else {
      EXPECT_NE(now, regions) << "step " << t;
    }
    if (t == 0) {
      EXPECT_NEAR(static_cast<double>(now[2]), 2048, 200) << "even data";
    }
    if (t == 64) {
      EXPECT_GT(now[1], 2048) << "nearly all is in the last quarter";
    }
    regions = now;
  }
}

TEST(Oktopk, AThresholdThatIsFarOffIsEvaluatedAtOnce) {
  for (const float jump : {1000.0F, 0.001F}) {
    SparseJob job(4, 4000, method("oktopk", 100));
    for (std::uint32_t t = 0; t < 12; ++t) {
      fill(job, t, Data::gauss);
      for (int r = 0; t >= 8 && r < 4; ++r) {
        if (t == 8)
          job.state(r) = [](SparseState old) {  // without what is left of the larger scale
            old.work().residual.assign(old.work().residual.size(), 0);
            return old;
          }(std::move(job.state(r)));
        for (float& g : job.gradient(r)) g *= jump;
      }
      job.step();
      for (int r = 0; r < 4; ++r) EXPECT_LE(job.result(r).entries_sent(), 4u * 4 * 100 * 4) << "step " << t;
      if (t == 9) {
        EXPECT_EQ(job.result(0).num_entries(), 100) << "evaluated";
      }
    }
  }
}

TEST(Oktopk, AnotherKIsEvaluatedAtOnce) {
  SparseJob job(3, 3000, method("oktopk", 90));
  for (std::uint32_t t = 0; t < 10; ++t) {
    if (t == 5) job.options().k = 30;
    fill(job, t, Data::gauss);
    job.step();
    if (t == 5) {
      EXPECT_EQ(job.result(0).num_entries(), 30);
    }
  }
}

TEST(Oktopk, RollBackTakesTheThresholdsBack) {
  SparseJob job(3, 3000, method("oktopk", 90));
  for (std::uint32_t t = 0; t < 3; ++t) {
    fill(job, t, Data::gauss);
    job.step();
  }
  const Thresholds before = thresholds(job, 1);
  job.step(false);
  const std::vector<float> once = job.dense(1);
  for (int r = 0; r < 3; ++r) job.state(r).roll_back();
  EXPECT_EQ(thresholds(job, 1).local, before.local);
  EXPECT_EQ(thresholds(job, 1).steps, before.steps);
  job.step();
  EXPECT_EQ(job.dense(1), once) << "the step again is the same step";
  EXPECT_EQ(thresholds(job, 1).steps, before.steps + 1);
}

TEST(Oktopk, RanksAtDifferentStepsFindOut) {
  SparseJob job(2, 1000, method("oktopk", 10));
  fill(job, 0, Data::gauss);
  job.step();
  job.state(1) = SparseState(1000);
  EXPECT_THROW(job.step(), TransportError);
}

}  // namespace
}  // namespace weft
