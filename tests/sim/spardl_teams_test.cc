// SparDL's teams in virtual time: bits, mass and the controller of B-SAG, each with a control that must fail.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "collectives/sparse_allreduce/call.h"
#include "collectives/sparse_allreduce/spar_operation.h"
#include "sim/sparse_job.h"

namespace weft {
namespace {

using namespace sparse_test;

struct Layout {
  int ranks;
  int teams;
  std::string_view gather;
};

SparseOptions call_of(const Layout& l, std::int64_t k, ResidualRule rule = ResidualRule::gres) {
  return options_of(k, rule, l.teams, l.gather);
}

TEST(SpardlTeams, ConserveExactlyForEveryNumberOfTeams) {
  std::vector<Layout> layouts = {
      {8, 2, "r-sag"}, {8, 4, "r-sag"}, {8, 8, "r-sag"}, {16, 8, "r-sag"}, {16, 16, "r-sag"}};
  for (int teams = 2; teams <= 16; ++teams) {
    layouts.push_back({teams, teams, "b-sag"});
    layouts.push_back({2 * teams, teams, "b-sag"});
  }
  for (const Layout& l : layouts) {
    for (const ResidualRule rule : {ResidualRule::gres, ResidualRule::drop}) {
      SparseJob job(l.ranks, 2000, call_of(l, 90, rule));
      EXPECT_EQ(run_and_weigh(job, 3, Data::whole), 0.0)
          << l.ranks << " ranks, " << l.teams << " teams, " << l.gather << ", " << name_of(rule);
      EXPECT_LE(job.result(0).num_entries(), 90);
    }
  }
}

// Why a discard goes whole to one member: what `sharers` members hold of it if each keeps `share`.
float kept(float discard, int sharers, float share) {
  float sum = 0;
  for (int i = 0; i < sharers; ++i) sum += discard * share;
  return sum;
}

TEST(SpardlTeams, ControlSharesOfADiscardAreNotExact) {
  for (const int teams : {3, 5, 7}) {
    int inexact = 0;
    for (int v = 1; v <= 1000; ++v) {
      const auto value = static_cast<float>(v);
      inexact += kept(value, teams, 1 / static_cast<float>(teams)) != value ? 1 : 0;
    }
    EXPECT_GT(inexact, 0) << teams;
  }
  // Half at every step of R-SAG: right between two, wrong as soon as 2^(s+1) members know it.
  EXPECT_EQ(kept(12, 2, 0.5F), 12.0F);
  EXPECT_NE(kept(12, 4, 0.5F), 12.0F);
}

// Few magnitudes, either sign: most cuts end in a tie.
void fill_ties(SparseJob& job, std::uint32_t step) {
  for (int r = 0; r < job.size(); ++r) {
    Random random(3, 6, static_cast<std::uint32_t>(r), step);
    for (float& g : job.gradient(r)) {
      g = 0.1F * static_cast<float>(random.below(4)) * (random.below(2) == 0 ? 1.0F : -1.0F);
    }
  }
}

TEST(SpardlTeams, SameBitsOnAllRanksWithFloatsAndTies) {
  for (const Layout& l : {Layout{6, 3, "b-sag"}, Layout{10, 5, "b-sag"}, Layout{14, 7, "b-sag"},
                          Layout{8, 8, "b-sag"}, Layout{8, 4, "r-sag"}, Layout{16, 8, "r-sag"}}) {
    for (const bool ties : {false, true}) {
      std::vector<float> first;
      for (std::uint64_t seed = 0; seed < 3; ++seed) {
        SparseJob job(l.ranks, 2000, call_of(l, 90), seed);
        for (std::uint32_t t = 0; t < 4; ++t) {
          if (ties)
            fill_ties(job, t);
          else
            fill(job, t, Data::gauss);
          job.step();
          for (int r = 1; r < l.ranks; ++r) {
            ASSERT_EQ(job.dense(r), job.dense(0)) << l.ranks << " ranks, " << l.teams << " teams";
          }
        }
        if (seed == 0) first = job.dense(0);
        EXPECT_EQ(job.dense(0), first) << "another timing";
      }
    }
  }
}

TEST(SpardlTeams, ListsAreAddedInTeamOrder) {
  for (const int teams : {3, 5, 7}) {
    SparseJob job(teams, 300, call_of({teams, teams, "b-sag"}, 300));  // a team is a rank, and all is sent
    fill(job, 0, Data::gauss);
    const auto sum_from = [&](int first) {
      std::vector<float> sum(300);
      for (int t = 0; t < teams; ++t) {
        for (std::size_t i = 0; i < 300; ++i) sum[i] += job.gradient((first + t) % teams)[i];
      }
      return sum;
    };
    job.step();
    EXPECT_EQ(job.dense(teams - 1), sum_from(0));
    EXPECT_NE(sum_from(1), sum_from(0)) << "control: each team beginning with its own gives other bits";
  }
}

// The first step with the gradients of rank r taken from place[r].
std::vector<float> placed(const Layout& l, const std::vector<int>& place) {
  SparseJob job(l.ranks, 2000, call_of(l, 90));
  fill(job, 0, Data::whole);
  std::vector<std::vector<float>> gradients;
  for (int r = 0; r < l.ranks; ++r) gradients.push_back(job.gradient(r));
  for (int r = 0; r < l.ranks; ++r) {
    job.gradient(r) = gradients[static_cast<std::size_t>(place[static_cast<std::size_t>(r)])];
  }
  job.step();
  return job.dense(0);
}

TEST(SpardlTeams, ANameOfATeamMeansNothing) {
  // (R-SAG adds up in pairs: names may be exchanged inside a pair, and pairs with each other.)
  for (const auto& [l, names] : {std::pair{Layout{6, 3, "b-sag"}, std::vector{2, 0, 1}},
                                 std::pair{Layout{10, 5, "b-sag"}, std::vector{3, 1, 4, 0, 2}},
                                 std::pair{Layout{8, 4, "r-sag"}, std::vector{3, 2, 0, 1}}}) {
    const int members = l.ranks / l.teams;
    std::vector<int> same(static_cast<std::size_t>(l.ranks));
    std::iota(same.begin(), same.end(), 0);
    std::vector<int> renamed;
    for (const int t : names) {
      for (int r = 0; r < members; ++r) renamed.push_back(t * members + r);
    }
    EXPECT_EQ(placed(l, renamed), placed(l, same)) << l.teams << " teams";
    std::vector<int> mixed = same;  // control: other members, not only another name
    std::swap(mixed[0], mixed[static_cast<std::size_t>(members)]);
    EXPECT_NE(placed(l, mixed), placed(l, same)) << l.teams << " teams";
  }
}

TEST(SpardlTeams, TheQuotaOfATeamIsEqualInItsGroupAndStaysInItsBounds) {
  const Layout l{12, 4, "b-sag"};
  const int members = l.ranks / l.teams;
  constexpr std::int64_t kK = 300;
  SparseJob job(l.ranks, 6000, call_of(l, kK));
  const Deal deal(Deal::Kind::dealt, members, 6000);
  bool moved = false;
  for (std::uint32_t t = 0; t < 30; ++t) {
    fill(job, t, Data::gauss);
    job.step();
    for (int r = 0; r < l.ranks; ++r) {
      const TeamQuota& mine = job.state(r).work().team_quota;
      EXPECT_EQ(mine, job.state(r % members).work().team_quota) << "rank " << r << ", step " << t;
      const std::int64_t quota = deal.quota(r % members, kK);
      EXPECT_GE(mine.entries, quota / l.teams);
      EXPECT_LE(mine.entries, quota);
      moved = moved || mine.entries != quota / l.teams;
    }
  }
  EXPECT_TRUE(moved) << "or there was nothing to see";
}

TEST(SpardlTeams, ControlWithoutItsClampTheControllerLeavesTheBounds) {
  // Full overlap: the union is what each member sends, and never exceeds the quota while h does not.
  constexpr std::int64_t kQuota = 1000;
  std::int64_t h = 200, step = 8;
  bool inertia = false;
  std::int64_t most = 0;
  for (int t = 0; t < 200; ++t) {
    const bool right_way = (h > kQuota) != (step > 0);
    if (right_way) {
      if (inertia) step *= 2;
      inertia = !inertia;
    } else {
      step = std::abs(step) > 1 ? -step / 2 : -step;
      inertia = false;
    }
    h = std::max<std::int64_t>(h + step, 200);
    most = std::max(most, h);
  }
  EXPECT_GT(most, kQuota);
}

// Each rank's vector is not zero in a part of its own, or all have the same one. Elements large enough for a
// list that is as long as the quota.
void fill_overlapping(SparseJob& job, bool overlapping) {
  for (int r = 0; r < job.size(); ++r) {
    Random random(8, 0, overlapping ? 0 : static_cast<std::uint32_t>(r), job.last_step() + 1);
    for (std::size_t i = 0; i < job.gradient(r).size(); ++i) {
      const bool mine =
          overlapping || i % static_cast<std::size_t>(job.size()) == static_cast<std::size_t>(r);
      const auto value = static_cast<float>(1 + random.below(1000));
      job.gradient(r)[i] = mine ? value : 0;
    }
  }
}

// 6 ranks at 1 Gbit/s with 130 kB of entries: rounds cost little. At its bound B-SAG sends the fewest entries
// with two teams (4/3 k + 1/3 k); lists that meet nowhere are shortest with six (5/6 k). So six are taken once
// that is known, on all ranks alike, and what was rolled back does not count. Where lists begin to overlap,
// fewer are taken again, for good.
TEST(SpardlTeams, TheirNumberFollowsWhatWasMeasured) {
  const auto teams_of = [](SparseJob& job, int r) { return 6 / job.result(r).contents().deal.blocks(); };
  const auto figures_of = [](SparseJob& job, int r) { return job.state(r).work().team_figures; };
  const auto run = [&](SparseJob& job, std::int64_t steps, bool overlapping) {
    for (std::int64_t t = 0; t < steps; ++t) {
      fill_overlapping(job, overlapping);
      job.step();
      for (int r = 1; r < 6; ++r) ASSERT_EQ(teams_of(job, r), teams_of(job, 0)) << t;
      // Members of a SAG group cut alike.
      const int members = 6 / teams_of(job, 0);
      for (int r = members; r < 6; ++r)
        ASSERT_EQ(job.state(r).work().team_quota, job.state(r % members).work().team_quota) << t;
    }
  };
  for (const bool overlapping : {false, true}) {
    SparseJob job(6, 200'000, options_of(20'000, ResidualRule::gres, 0, "b-sag", "packed"));
    for (int r = 0; r < 6; ++r) job.plan_by(r, {.hop_seconds = 50e-6, .seconds_per_byte = 8e-9});
    run(job, TeamFigures::kPeriod - 1, overlapping);
    job.step(false);
    EXPECT_EQ(figures_of(job, 0).operations, TeamFigures::kPeriod - 1);
    EXPECT_EQ(figures_of(job, 0).entry_bytes, 0);
    EXPECT_EQ(teams_of(job, 0), 2);
    run(job, 2, overlapping);
    const TeamFigures after = figures_of(job, 0);
    EXPECT_GT(after.entry_bytes, 4);
    EXPECT_LT(after.entry_bytes, 6);  // 32 bits, and about 4.5 of an index one in ten
    EXPECT_NEAR(after.overlap, overlapping ? 1 : 0, 0.05);
    EXPECT_EQ(teams_of(job, 0), overlapping ? 2 : 6);
    if (overlapping) continue;
    run(job, 2 * TeamFigures::kPeriod, true);
    EXPECT_LT(teams_of(job, 0), 6);
    run(job, 2 * TeamFigures::kPeriod, false);
    EXPECT_LT(teams_of(job, 0), 6);
  }
}

// Nor does another way to gather that is asked for.
TEST(SpardlTeams, GatherAsTheyAreAskedToFromThenOn) {
  SparseJob job(8, 2000, options_of(90, ResidualRule::gres, 0, "r-sag"));
  for (const std::string_view gather : {"r-sag", "b-sag", "r-sag"}) {
    job.options().gather = gather;
    for (int t = 0; t < 2; ++t) {
      fill(job, static_cast<std::uint32_t>(t), Data::whole);
      job.step();
      const TeamFigures& figures = job.state(3).work().team_figures;
      EXPECT_GT(figures.choice.teams, 1);
      EXPECT_EQ(figures.choice.recursive, gather == "r-sag");
      EXPECT_EQ(figures.operations, t + 1);
    }
  }
}

// Another k (a warm-up's end) does not wait for a period.
TEST(SpardlTeams, TheirNumberFollowsK) {
  const LinkCost far{.hop_seconds = 5e-3, .seconds_per_byte = 8e-9};
  SparseJob job(6, 200'000, options_of(200'000, ResidualRule::gres, 0, "auto", "packed"));
  for (int r = 0; r < 6; ++r) job.plan_by(r, far);
  for (const std::int64_t k : {200'000, 120'000, 200}) {
    job.options().k = k;
    fill_overlapping(job, true);
    job.step();
    const TeamChoice expected = choose_teams(6, 200'000, k == 120'000 ? 200'000 : k, far);
    EXPECT_EQ(job.state(0).work().team_figures.choice, expected) << k;
  }
  EXPECT_NE(choose_teams(6, 200'000, 200, far), choose_teams(6, 200'000, 200'000, far));
}

}  // namespace
}  // namespace weft
