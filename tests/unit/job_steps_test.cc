#include "workload/job_steps.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace weft {
namespace {

using Ranks = std::vector<std::vector<double>>;

TEST(JobSteps, DelaysInTurnCountOnce) {
  // Both have computed for 6 when the last step ends, and each was late by 2 once.
  const Ranks ranks{{3, 1, 2}, {1, 3, 2}};
  EXPECT_EQ(job_steps(ranks), (std::vector<double>{3, 1, 2}));
  double slowest = 0, job = 0;
  for (std::size_t i = 0; i < 3; ++i) {
    slowest += std::max(ranks[0][i], ranks[1][i]);
    job += job_steps(ranks)[i];
  }
  EXPECT_EQ(job, 6);
  EXPECT_EQ(slowest, 8);  // control: what it must not be
}

TEST(JobSteps, RanksBeginTogetherBehindAPause) {
  const Ranks ranks{{3, 1, 1}, {1, 1, 3}};
  const std::vector<std::int64_t> pauses{2, 3};  // the one behind the last step has nothing to say
  EXPECT_EQ(job_steps(ranks, pauses), (std::vector<double>{3, 1, 3}));
  EXPECT_EQ(job_steps(ranks), (std::vector<double>{3, 1, 1}));
}

TEST(JobSteps, OneRankIsTheJob) {
  EXPECT_EQ(job_steps(Ranks{{2, 1, 4}}), (std::vector<double>{2, 1, 4}));
  EXPECT_TRUE(job_steps(Ranks{{}, {}}).empty());
}

}  // namespace
}  // namespace weft
