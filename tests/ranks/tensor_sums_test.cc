// Sums of tensor-parallel ranks that travel as bfloat16: the same bits on all ranks, near the sum in float64, half the
// bytes; scores of a loss stay as they are.
#include "pipeline/tensor_sums.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <mutex>

#include "step/tensor.h"
#include "weft/error.h"
#include "weft/random.h"
#include "weft/world.h"

namespace weft {
namespace {

constexpr std::int64_t kTokens = 37, kWidth = 19;
constexpr double kUnit = 0x1p-8;  // one rounding of bfloat16, relative

using Values = std::vector<float>;

// An activation, the gradient of what a product took, and the scores of a loss.
std::vector<SumShape> sums_of(int ranks, bool bf16) {
  return {{.activation = "share", .values = kWidth, .bf16 = bf16},
          {.activation = "input", .gradient = true, .values = kWidth, .bf16 = bf16},
          {.activation = "scores", .values = kScores * ranks}};
}

// A rank's shares, drawn; then the sums.
class Shares final : public TensorSource {
 public:
  Shares(const std::vector<SumShape>& sums, int rank) {
    for (std::uint32_t s = 0; s < sums.size(); ++s) {
      const SumShape& sum = sums[s];
      Random random(5, static_cast<std::uint32_t>(rank), s);
      Values& values = values_[sum.activation];
      values.resize(static_cast<std::size_t>(kTokens * sum.values));
      for (float& v : values) v = static_cast<float>(2 * random.uniform() - 1);
    }
  }
  Dense tensor(const TensorName& name) override { return Dense(std::span(values_.at(name.name))); }
  const Values& of(const std::string& name) const { return values_.at(name); }

 private:
  std::map<std::string, Values> values_;
};

struct Summed {
  std::vector<std::map<std::string, Values>> of_ranks;
  std::vector<std::uint64_t> bytes;
  std::vector<std::int64_t> formulas;
};

Summed summed(int ranks, bool bf16) {
  const std::vector<SumShape> sums = sums_of(ranks, bf16);
  Summed out{.of_ranks = std::vector<std::map<std::string, Values>>(static_cast<std::size_t>(ranks)),
             .bytes = std::vector<std::uint64_t>(static_cast<std::size_t>(ranks)),
             .formulas = std::vector<std::int64_t>(static_cast<std::size_t>(ranks))};
  std::mutex mutex;
  run_ranks(ranks, [&](World& world) {
    world.plan_by({});
    TensorSums strategy(world.engine(), world.comm(), sums,
                        {.micro_batches = 1, .tokens = kTokens, .first_slot = 1});
    Shares shares(sums, world.rank());
    strategy.set_tokens(std::vector<std::int64_t>{kTokens});
    for (int e = 0; e < static_cast<int>(sums.size()); ++e) strategy.start(e, {}, shares);
    for (const Ticket& ticket : strategy.work()) ticket.wait();
    strategy.step_end();
    strategy.close(true, 1);
    const std::vector<PlanRow> rows = strategy.rows();
    for (std::size_t s = 0; s < sums.size(); ++s) {
      const std::string codec = sums[s].bf16 ? "bf16" : "";
      EXPECT_EQ(rows[s].codec, codec);
      EXPECT_EQ(strategy.exchanges()[s].codec, codec);
    }
    const std::lock_guard lock(mutex);
    const auto mine = static_cast<std::size_t>(world.rank());
    for (const SumShape& sum : sums) out.of_ranks[mine][sum.activation] = shares.of(sum.activation);
    out.bytes[mine] = strategy.step_bytes();
    out.formulas[mine] = strategy.formula_bytes();
  });
  return out;
}

// The largest difference from a sum in float64, over what rounding explains.
double away(const Summed& run, const std::string& name) {
  const int ranks = static_cast<int>(run.of_ranks.size());
  std::vector<Shares> shares;
  for (int r = 0; r < ranks; ++r) shares.emplace_back(sums_of(ranks, false), r);
  double worst = 0;
  const Values& got = run.of_ranks[0].at(name);
  for (std::size_t i = 0; i < got.size(); ++i) {
    double sum = 0, size = 0;
    for (const Shares& of : shares) {
      sum += of.of(name)[i];
      size += std::abs(of.of(name)[i]);
    }
    // Each share rounds once, and each of ranks - 1 additions once more, of no more than all of them together.
    worst = std::max(worst, std::abs(got[i] - sum) / (1.01 * kUnit * ranks * size));
  }
  return worst;
}

TEST(TensorSums, InBfloat16AreNearAndTheSameOnAllRanks) {
  for (const int ranks : {2, 3, 4}) {
    const Summed exact = summed(ranks, false), rounded = summed(ranks, true);
    for (const Summed* run : {&exact, &rounded}) {
      for (const auto& of : run->of_ranks) EXPECT_EQ(of, run->of_ranks[0]) << ranks;
      for (const char* name : {"share", "input"}) EXPECT_LE(away(*run, name), 1) << name << ", " << ranks;
    }
    for (const char* name : {"share", "input"}) {
      EXPECT_NE(rounded.of_ranks[0].at(name), exact.of_ranks[0].at(name)) << "control";
      // What float32 rounds is 2^16 times less: the bound is no blanket.
      EXPECT_GT(away(rounded, name), 100 * away(exact, name));
    }
    EXPECT_EQ(rounded.of_ranks[0].at("scores"), exact.of_ranks[0].at("scores"));
  }
}

TEST(TensorSums, InBfloat16HaveHalfTheBytes) {
  const Summed exact = summed(2, false), rounded = summed(2, true);
  const std::int64_t scores = kTokens * 2 * kScores, others = 2 * kTokens * kWidth;
  for (std::size_t r = 0; r < 2; ++r) {
    EXPECT_EQ(exact.formulas[r], 4 * (others + scores));
    EXPECT_EQ(rounded.formulas[r], 2 * others + 4 * scores);
    EXPECT_EQ(exact.bytes[r], static_cast<std::uint64_t>(exact.formulas[r]));
    EXPECT_EQ(rounded.bytes[r] + static_cast<std::uint64_t>(2 * others), exact.bytes[r]);
  }
}

// Ranks that disagree about it do not add up other things without a word.
TEST(TensorSums, RanksThatRoundAndRanksThatDoNotAreToldSo) {
  for (const bool agree : {true, false}) {
    std::string said;
    try {
      run_ranks(2, [&](World& world) {
        const std::vector<SumShape> sums = sums_of(2, agree || world.rank() == 0);
        TensorSums strategy(world.engine(), world.comm(), sums, {.first_slot = 1});
        Shares shares(sums, world.rank());
        strategy.set_tokens(std::vector<std::int64_t>{kTokens});
        strategy.start(0, {}, shares);
        strategy.work()[0].wait();
      });
    } catch (const Error& error) {
      said = error.what();
    }
    EXPECT_EQ(said.empty(), agree) << said;
  }
}

}  // namespace
}  // namespace weft
