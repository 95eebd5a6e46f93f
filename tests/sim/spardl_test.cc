// SparDL in virtual time, against plain loops: the invariants of its paper, each with a control that must
// fail.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "collectives/sparse_allreduce/call.h"
#include "collectives/sparse_allreduce/spar_operation.h"
#include "patterns/bruck.h"
#include "sim/sparse_job.h"
#include "weft/error.h"

namespace weft {
namespace {

using namespace sparse_test;

TEST(Spardl, ConservesMassExactlyUnderGresAndDrop) {
  for (const int ranks : {1, 2, 3, 5, 6, 8, 14}) {
    for (const ResidualRule rule : {ResidualRule::gres, ResidualRule::drop}) {
      for (const std::string_view blocks : {"dealt", "contiguous"}) {
        SparseJob job(ranks, 3000, options_of(60, rule, 1, "auto", "packed", blocks),
                      static_cast<std::uint64_t>(ranks));
        EXPECT_EQ(run_and_weigh(job, 4, Data::whole), 0.0)
            << ranks << " ranks, " << name_of(rule) << ", " << blocks;
      }
    }
  }
}

TEST(Spardl, TheLossyRulesLose) {  // controls of the test above
  for (const int ranks : {2, 3, 8}) {
    SparseJob local(ranks, 3000, options_of(60, ResidualRule::lres));
    EXPECT_GT(run_and_weigh(local, 3, Data::whole), 0.0) << ranks << " ranks";
  }
  for (const int ranks : {2, 3, 8}) {
    int lost = 0;
    for (std::uint64_t seed = 0; seed < 8; ++seed) {
      SparseJob partial(ranks, 3000, options_of(60, ResidualRule::pres));
      lost += run_and_weigh(partial, 3, Data::whole, seed) > 0 ? 1 : 0;
    }
    // Up to three ranks nothing is dropped on the way that was chosen before.
    EXPECT_EQ(lost > 0, ranks > 3) << ranks << " ranks, seeds that lose: " << lost;
  }
}

TEST(Spardl, Bfloat16ValuesLoseNothingEither) {
  for (const auto& [ranks, teams] : {std::pair{5, 1}, std::pair{8, 4}, std::pair{6, 3}}) {
    SparseJob job(ranks, 3000, options_of(60, ResidualRule::gres, teams, "auto", "packed-bf16"));
    EXPECT_EQ(run_and_weigh(job, 4, Data::whole), 0.0) << ranks << " ranks, " << teams << " teams";
    for (const float v : job.dense(0)) EXPECT_EQ(v, to_float(to_bfloat16(v)));
  }
}

TEST(Spardl, FloatsConserveWithinRounding) {
  SparseJob job(8, 5000, options_of(100));
  // 8 values of about 4 in float32, added in up to 8 roundings: 8 * 8 * 4 * 2^-24.
  EXPECT_LT(run_and_weigh(job, 5, Data::gauss), 8 * 8 * 4 * 0x1p-24);
}

TEST(Spardl, SameBitsOnAllRanksAndAnyTiming) {
  std::vector<float> first;
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    SparseJob job(7, 4000, options_of(80), seed);
    for (std::uint32_t t = 0; t < 3; ++t) {
      fill(job, t, Data::gauss);
      job.step();
    }
    for (int r = 1; r < 7; ++r) ASSERT_EQ(job.dense(r), job.dense(0));
    if (seed == 0) first = job.dense(0);
    EXPECT_EQ(job.dense(0), first);
  }
}

// The lazy algorithm as a plain program: dense blocks, complete sorting, no messages.
std::map<std::int64_t, double> reference(SparseJob& job, std::int64_t k, Deal::Kind kind) {
  const int p = job.size();
  const auto n = static_cast<std::int64_t>(job.gradient(0).size());
  const Deal deal(kind, p, n);
  std::vector<std::vector<double>> x(static_cast<std::size_t>(p),
                                     std::vector<double>(static_cast<std::size_t>(n)));
  for (int r = 0; r < p; ++r) {
    for (std::size_t i = 0; i < x[0].size(); ++i)
      x[static_cast<std::size_t>(r)][i] = static_cast<double>(job.own(r, i));
  }
  const auto cut = [&](int r, int block) {
    std::vector<std::int64_t> places;
    for (std::int64_t i = 0; i < n; ++i) {
      if (deal.place(i).block == block && x[static_cast<std::size_t>(r)][static_cast<std::size_t>(i)] != 0)
        places.push_back(i);
    }
    std::stable_sort(places.begin(), places.end(), [&](std::int64_t a, std::int64_t b) {
      return std::abs(x[static_cast<std::size_t>(r)][static_cast<std::size_t>(a)]) >
             std::abs(x[static_cast<std::size_t>(r)][static_cast<std::size_t>(b)]);
    });
    places.resize(std::min<std::size_t>(places.size(), static_cast<std::size_t>(deal.quota(block, k))));
    std::map<std::int64_t, double> out;
    for (const std::int64_t i : places)
      out[i] = std::exchange(x[static_cast<std::size_t>(r)][static_cast<std::size_t>(i)], 0.0);
    return out;
  };
  for (const Hop& hop : halving_hops(p)) {
    std::vector<std::map<std::int64_t, double>> bags(static_cast<std::size_t>(p));
    for (int r = 0; r < p; ++r) {
      for (int b = 0; b < hop.count; ++b)
        bags[static_cast<std::size_t>(r)].merge(cut(r, (r + hop.sent + b) % p));
    }
    for (int r = 0; r < p; ++r) {
      for (const auto& [i, v] : bags[static_cast<std::size_t>(r)])
        x[static_cast<std::size_t>((r + hop.gap) % p)][static_cast<std::size_t>(i)] += v;
    }
  }
  std::map<std::int64_t, double> y;
  for (int r = 0; r < p; ++r) y.merge(cut(r, r));
  return y;
}

TEST(Spardl, EqualsThePlainProgram) {
  for (const int ranks : {1, 2, 3, 4, 5, 7, 8, 13}) {
    for (const Deal::Kind kind : {Deal::Kind::dealt, Deal::Kind::contiguous}) {
      SparseJob job(ranks, 2000,
                    options_of(100, ResidualRule::drop, 1, "auto", "packed",
                               kind == Deal::Kind::dealt ? "dealt" : "contiguous"));
      for (std::uint32_t t = 0; t < 3; ++t) {
        fill(job, t, Data::whole);
        const std::map<std::int64_t, double> expected = reference(job, 100, kind);
        job.step();
        std::map<std::int64_t, double> got;
        job.result(0).for_each([&](std::int64_t i, float v) { got[i] = static_cast<double>(v); });
        ASSERT_EQ(got, expected) << ranks << " ranks, step " << t;
      }
      // Control: the plain program with another quota is another result.
      fill(job, 9, Data::whole);
      EXPECT_NE(reference(job, 50, kind), reference(job, 100, kind));
    }
  }
}

TEST(Spardl, BytesAndRoundsEqualTheFormulas) {
  const SparseAlgorithm& row = find_sparse_algorithm("spardl");
  for (int ranks = 1; ranks <= 33; ++ranks) {
    for (int teams = 1; teams <= ranks; ++teams) {
      if (ranks % teams != 0) continue;
      const bool power = (teams & (teams - 1)) == 0;
      if (!power && ranks > 16) continue;
      const std::int64_t n = 64 * 70;
      const std::int64_t k = 4 * ranks + 3;
      SparseJob job(ranks, n, options_of(k, ResidualRule::gres, teams, "auto", "coo"));
      fill(job, 0, Data::gauss);
      job.step();
      const SparseShape shape{
          .size = ranks, .length = n, .k = k, .teams = teams, .recursive = power && teams > 1};
      std::uint64_t most = 0;
      int rounds = 0;
      for (int r = 0; r < ranks; ++r) {
        most = std::max(most, job.result(r).entry_bytes_sent());
        rounds = std::max(rounds, static_cast<int>(job.recording(r).traffic(1, job.last_step()).hops.size()));
      }
      EXPECT_EQ(rounds, row.rounds(shape)) << ranks << " ranks, " << teams << " teams";
      const auto formula = static_cast<std::uint64_t>(payload_bytes(row, shape));
      if (power)
        EXPECT_EQ(most, formula) << ranks << " ranks, " << teams << " teams";
      else
        EXPECT_LE(most, formula) << ranks << " ranks, " << teams << " teams";
    }
  }
  // 16 k (P-1)/P + 8 (P-1) where the quotas are equal.
  const SparseShape even{.size = 8, .length = 64 * 8 * 10, .k = 80};
  EXPECT_EQ(payload_bytes(row, even), 16 * 80 * 7 / 8 + 8 * 7);
}

// Messages of the last step that rank r sent, of one hop each; -1: two of them are of one hop.
int messages_if_one_a_hop(const SparseJob& job, int r) {
  std::vector<std::uint32_t> hops;
  for (const SendLog::Sent& sent : job.log(r).sent()) {
    if (sent.step == job.last_step()) hops.push_back(sent.hop);
  }
  std::sort(hops.begin(), hops.end());
  const bool twice = std::adjacent_find(hops.begin(), hops.end()) != hops.end();
  return twice ? -1 : static_cast<int>(hops.size());
}

TEST(Spardl, ABagIsOneMessageOfNoMoreThanItsQuotas) {
  for (const int ranks : {1, 2, 3, 6, 7, 8, 14}) {
    const std::int64_t n = 64 * 70;
    const std::int64_t k = 5 * ranks + 3;
    const Deal deal(Deal::Kind::dealt, ranks, n);
    SparseJob job(ranks, n, options_of(k));
    for (std::uint32_t t = 0; t < 3; ++t) {
      fill(job, t, Data::gauss);
      job.step();
      EXPECT_LE(job.result(0).num_entries(), k);
      for (int r = 0; r < ranks; ++r) {
        EXPECT_EQ(messages_if_one_a_hop(job, r), 2 * log2_ceil(ranks));
        EXPECT_EQ(job.recording(r).traffic(1, t).messages_received,
                  static_cast<std::uint64_t>(2 * log2_ceil(ranks)));
        for (const SendLog::Sent& sent : job.log(r).sent()) {
          const auto reduce_hops = static_cast<std::uint32_t>(log2_ceil(ranks));
          const bool reduces = sent.hop < reduce_hops;
          const Hops hops = reduces ? halving_hops(ranks) : gather_hops(ranks);
          const Hop& hop = hops.begin()[reduces ? sent.hop : sent.hop - reduce_hops];
          std::int64_t bound = 0;  // an index, a value; a head for each block
          for (int b = 0; b < hop.count; ++b) bound += 8 * deal.quota((r + hop.sent + b) % ranks, k) + 4;
          EXPECT_LE(static_cast<std::int64_t>(sent.bytes), bound) << ranks << " ranks, hop " << sent.hop;
        }
      }
    }
  }
  // Control: a method that sends each block on its own has more messages than that.
  SparseJob flat(8, 4480, method("topkdsa", 43));
  fill(flat, 0, Data::gauss);
  flat.step();
  EXPECT_GT(flat.log(3).sent().size(), 6u);
}

// Each block has `extra` more places than its quota where some rank has something.
bool is_exact_sum(std::int64_t extra) {
  constexpr int kRanks = 6;
  constexpr std::int64_t kN = 64 * 60, kK = 60;
  SparseJob job(kRanks, kN, options_of(kK));
  const Deal deal(Deal::Kind::dealt, kRanks, kN);
  std::vector<double> sum(static_cast<std::size_t>(kN));
  for (int b = 0; b < kRanks; ++b) {
    for (std::int64_t i = 0; i < deal.quota(b, kK) + extra; ++i) {
      const auto at = static_cast<std::size_t>(deal.global(b, 7 * i));
      for (int r = 0; r < kRanks; ++r) {
        if ((i + r) % 3 == 0) continue;  // not everywhere on every rank
        job.gradient(r)[at] = static_cast<float>(1 + (i * 5 + r) % 11);
        sum[at] += static_cast<double>(job.gradient(r)[at]);
      }
    }
  }
  job.step();
  return std::ranges::equal(job.dense(0), sum, {}, [](float v) { return static_cast<double>(v); });
}

TEST(Spardl, AUnionWithinTheQuotasIsTheExactSum) {
  EXPECT_TRUE(is_exact_sum(0));
  EXPECT_FALSE(is_exact_sum(1));  // control
}

TEST(Spardl, DensityOneIsTheDenseSum) {
  SparseJob job(5, 700, options_of(700));
  fill(job, 0, Data::whole);
  // No sum is zero: a zero is never an entry, and gres would keep what cancelled.
  for (int r = 0; r < 5; ++r) {
    for (float& g : job.gradient(r)) g = std::abs(g) + 1;
  }
  std::vector<float> sum(700);
  for (int r = 0; r < 5; ++r) {
    for (std::size_t i = 0; i < 700; ++i) sum[i] += job.gradient(r)[i];
  }
  job.step();
  EXPECT_EQ(job.dense(0), sum);
  for (int r = 0; r < 5; ++r) {
    for (const float v : job.state(r).residual()) EXPECT_EQ(v, 0.0F);
  }
}

TEST(Spardl, OneRankTakesItsTopAndSendsNothing) {
  SparseJob job(1, 1000, options_of(10));
  fill(job, 0, Data::gauss);
  std::vector<float> sorted = job.gradient(0);
  std::sort(sorted.begin(), sorted.end(), [](float a, float b) { return std::abs(a) > std::abs(b); });
  job.step();
  EXPECT_EQ(job.result(0).num_entries(), 10);
  const std::vector<float> y = job.dense(0);
  for (std::size_t i = 0; i < y.size(); ++i) {
    const bool top = std::abs(job.gradient(0)[i]) >= std::abs(sorted[9]);
    EXPECT_EQ(y[i], top ? job.gradient(0)[i] : 0.0F);
    EXPECT_EQ(job.state(0).residual()[i], top ? 0.0F : job.gradient(0)[i]);
  }
  EXPECT_TRUE(job.log(0).sent().empty());
}

struct Drained {
  double error = 0;          // of the mean result, relative
  double half = 0, end = 0;  // sum of the residuals' magnitudes after half the steps and after all
};

// The same gradient again and again.
Drained drain(bool feedback) {
  constexpr int kSteps = 400;
  SparseJob job(4, 500, options_of(25));
  std::vector<double> applied(500);
  std::vector<double> sum(500);
  fill(job, 0, Data::whole);
  for (int r = 0; r < 4; ++r) {
    for (std::size_t i = 0; i < 500; ++i) sum[i] += static_cast<double>(job.gradient(r)[i]);
  }
  Drained out;
  for (int t = 1; t <= kSteps; ++t) {
    job.step();
    const std::vector<float> y = job.dense(0);
    for (std::size_t i = 0; i < 500; ++i) applied[i] += static_cast<double>(y[i]);
    for (int r = 0; r < 4; ++r) {
      if (!feedback) job.state(r) = SparseState(500);
      double& norm = t == kSteps ? out.end : out.half;
      for (const float v : job.state(r).residual()) {
        if (t == kSteps || t == kSteps / 2) norm += static_cast<double>(std::abs(v));
      }
    }
  }
  double norm = 0;
  for (std::size_t i = 0; i < 500; ++i) {
    out.error += std::abs(applied[i] / kSteps - sum[i]);
    norm += std::abs(sum[i]);
  }
  out.error /= norm;
  return out;
}

TEST(Spardl, ResidualDrains) {
  const Drained drained = drain(true);
  EXPECT_LT(drained.error, 0.15);  // what is applied on average approaches the sum of gradients
  EXPECT_LT(drained.end, 1.1 * drained.half) << "it has stopped to grow";
  EXPECT_GT(drain(false).error, 0.3);  // control
}

TEST(Spardl, ANonFiniteGradientIsToldToAllAndPoisonsNothing) {
  for (const int teams : {1, 2, 3}) {
    for (const float bad : {std::nanf(""), HUGE_VALF, -HUGE_VALF}) {
      SparseJob job(6, 1200, options_of(30, ResidualRule::gres, teams));
      fill(job, 0, Data::whole);
      job.step();
      std::vector<std::vector<float>> before;
      for (int r = 0; r < 6; ++r)
        before.emplace_back(job.state(r).residual().begin(), job.state(r).residual().end());
      fill(job, 1, Data::whole);
      job.gradient(4)[777] = bad;
      job.step();
      for (int r = 0; r < 6; ++r) {
        EXPECT_FALSE(job.result(r).finite()) << "rank " << r;
        EXPECT_EQ(job.result(r).num_entries(), 0);
        EXPECT_EQ(before[static_cast<std::size_t>(r)],
                  std::vector<float>(job.state(r).residual().begin(), job.state(r).residual().end()));
      }
      fill(job, 1, Data::whole);  // and the next step is as good as any
      job.step();
      for (int r = 0; r < 6; ++r) EXPECT_TRUE(job.result(r).finite());
    }
  }
}

TEST(Spardl, RollBackMeansItDidNotHappen) {
  SparseJob job(3, 900, options_of(20));
  fill(job, 0, Data::gauss);
  job.step();
  const std::vector<float> before(job.state(1).residual().begin(), job.state(1).residual().end());
  fill(job, 1, Data::gauss);
  job.step(false);
  for (int r = 0; r < 3; ++r) job.state(r).roll_back();
  EXPECT_EQ(before, std::vector<float>(job.state(1).residual().begin(), job.state(1).residual().end()));
  EXPECT_THROW(job.state(1).commit(), UsageError);
}

TEST(Spardl, ShortAndEmptyVectors) {
  for (const std::int64_t n : {0, 1, 2, 5, 63, 64, 65}) {
    SparseJob job(8, n, options_of(std::max<std::int64_t>(1, n / 2)));
    fill(job, 0, Data::whole);
    job.step();
    for (int r = 1; r < 8; ++r) EXPECT_EQ(job.dense(r), job.dense(0));
    EXPECT_LE(job.result(0).num_entries(), n);
  }
}

TEST(Spardl, BadCallsAreRefused) {
  const auto refused = [](const SparseOptions& options) {
    try {
      SparseJob job(6, 100, options);
      job.step();
    } catch (const UsageError& e) {
      return std::string(e.what());
    }
    return std::string("accepted");
  };
  EXPECT_NE(refused(options_of(0)).find("k must be at least 1"), std::string::npos);
  EXPECT_NE(refused(options_of(5, ResidualRule::gres, 4)).find("4 teams do not divide 6 ranks"),
            std::string::npos);
  EXPECT_NE(refused(options_of(5, ResidualRule::gres, 3, "r-sag")).find("power of two"), std::string::npos);
  EXPECT_NE(refused(options_of(5, ResidualRule::gres, 1, "auto", "zip")).find("coo"), std::string::npos);
  EXPECT_NE(refused(options_of(5, ResidualRule::gres, 1, "auto", "coo", "round")).find("contiguous"),
            std::string::npos);
  EXPECT_EQ(refused(options_of(5, ResidualRule::gres, 0, "b-sag")), "accepted");
  EXPECT_EQ(refused(options_of(1000)), "accepted") << "k above the length means all";
}

TEST(TeamQuota, SettlesAtTheQuotaAndStaysInItsBounds) {
  for (const double overlap : {0.0, 0.5, 1.0}) {
    constexpr std::int64_t kQuota = 1000;
    constexpr int kTeams = 5;
    TeamQuota q{.entries = kQuota / kTeams};
    std::int64_t union_size = 0;
    for (int t = 0; t < 200; ++t) {
      union_size =
          static_cast<std::int64_t>(static_cast<double>(q.entries) * (kTeams - overlap * (kTeams - 1)));
      q = next_team_quota(q, union_size, kQuota, kTeams);
      ASSERT_GE(q.entries, kQuota / kTeams);
      ASSERT_LE(q.entries, kQuota);
    }
    EXPECT_NEAR(static_cast<double>(union_size), kQuota, 0.03 * kQuota) << overlap;
  }
}

TEST(Teams, TheCostModelTakesMoreTeamsWhereLatencyRules) {
  const LinkCost slow{.hop_seconds = 10e-6, .seconds_per_byte = 1 / 125e6};
  const LinkCost far{.hop_seconds = 50e-3, .seconds_per_byte = 1 / 12.5e9};
  EXPECT_LE(choose_teams(16, 25'000'000, 250'000, slow).teams, 2);
  EXPECT_GT(choose_teams(16, 25'000'000, 2'500, far).teams, 2);
  // A prime number of ranks is one team, or each rank is a team: 2 ceil(log2 7) rounds of 2 k 6/7 entries
  // against 3 rounds of at most 6 k. Where bytes rule the first wins, where rounds rule the second.
  EXPECT_EQ(choose_teams(7, 10'000'000, 100'000, slow).teams, 1);
  EXPECT_EQ(choose_teams(7, 10'000'000, 1'000, far).teams, 7);
  EXPECT_FALSE(choose_teams(7, 10'000'000, 1'000, far).recursive) << "R-SAG needs a power of two";
  // As asked for, whatever wins otherwise.
  const auto asked = [&](int size, std::string_view gather) {
    return choose_teams(size, 10'000'000, 100'000, slow, wire::SparseCodec::packed, gather);
  };
  EXPECT_GT(asked(7, "b-sag").teams, 1);
  EXPECT_FALSE(asked(8, "b-sag").recursive);
  EXPECT_GT(asked(8, "b-sag").teams, 1);
  EXPECT_TRUE(asked(8, "r-sag").recursive);
  EXPECT_EQ(asked(7, "r-sag").teams, 1) << "there is none";
  // Measured: lists of teams that meet nowhere are k/7 long, 6 k/7 against 12 k/7 entries.
  const auto measured = [&](double overlap) {
    return choose_teams(7, 10'000'000, 100'000, slow, wire::SparseCodec::packed, "auto",
                        {.entry_bytes = 5, .overlap = overlap});
  };
  EXPECT_EQ(measured(0).teams, 7);
  EXPECT_EQ(measured(1).teams, 1);
  // d = 2 saves a round of 2 ceil(log2 P) and costs no words (docs of the paper): free for even P.
  EXPECT_EQ(choose_teams(8, 25'000'000, 250'000, slow).teams, 2);
}

}  // namespace
}  // namespace weft
