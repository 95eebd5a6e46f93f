// What an optimizer keeps, as rows: a run goes on to the bit, shards take their moments along, what does not
// fit is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "state/optimizer.h"
#include "state_rows.h"
#include "unit/optimizer_samples.h"
#include "weft/error.h"

namespace weft {
namespace {

using testing::row_of;
using testing::set_values;
using testing::values_of;
using namespace optimizer_samples;  // NOLINT(google-build-using-namespace): made for these tests

TEST(OptimizerState, ARunGoesOnToTheBitAfterLoading) {
  for (const OptimizerOptions& options : all_options()) {
    for (const int at : {0, 1, 10}) {
      Pair straight(options);
      straight.run(0, at);
      straight.optimizer.set_lr(0.005);
      StateSnapshot snapshot = straight.save();
      // Control: without the state and the lr (plain SGD has nothing else) the same values go elsewhere.
      Pair forgot(options);
      forgot.first = straight.first;
      forgot.run(at, kSteps);
      std::reverse(snapshot.rows.begin(), snapshot.rows.end());  // names find their place
      Pair resumed(options);
      resumed.run(0, 3);  // forgotten
      resumed.load(snapshot);
      resumed.first = straight.first;
      resumed.second = straight.second;
      EXPECT_EQ(resumed.save(), straight.save());
      straight.run(at, kSteps);
      resumed.run(at, kSteps);
      EXPECT_EQ(resumed.first, straight.first) << describe(options) << " " << at;
      EXPECT_EQ(resumed.second, straight.second) << describe(options) << " " << at;
      EXPECT_EQ(resumed.save(), straight.save());
      EXPECT_NE(forgot.first, straight.first);
    }
  }
}

TEST(OptimizerState, BadSnapshotsAreRefusedAndChangeNothing) {
  Pair pair(adam());
  pair.run(0, 4);
  const StateSnapshot good = pair.save();
  StateSnapshot other = good;
  set_values<double>(row_of(other, "lr", "adam"), {0.5});
  row_of(other, "exp_avg", "first").values<float>()[0] = 3;
  const auto rename = [](StateSnapshot& s, const std::string& from, const std::string& to) {
    for (StateValue& v : s.rows) {
      if (v.row.key.name == from) v.row.key.name = to;
    }
  };
  const auto resize = [](StateValue& v, std::int64_t count) {
    v.row.shard = Shard::whole({count});
    v.bytes.resize(v.row.num_bytes());
  };
  const std::vector<std::pair<const char*, std::function<void(StateSnapshot&)>>> spoilers = {
      {"nothing for the lr of 'adam'", [&](auto& s) { rename(s, "adam", "adamw"); }},
      {"the lr of 'adam' has a value that is not finite",
       [](auto& s) { set_values<double>(row_of(s, "lr", "adam"), {NAN}); }},
      {"learning rate is negative", [](auto& s) { set_values<double>(row_of(s, "lr", "adam"), {-1}); }},
      {"nothing for the step of 'second'", [](auto& s) { s.rows.pop_back(); }},
      {"nothing for the exp_avg of 'second'", [&](auto& s) { rename(s, "second", "third"); }},
      {"the exp_avg of 'third' (33 elements) has no place",
       [](auto& s) {
         s.rows.push_back(row_of(s, "exp_avg", "second"));
         s.rows.back().row.key.name = "third";
       }},
      {"the exp_avg of 'first' is there twice",
       [](auto& s) { s.rows.push_back(row_of(s, "exp_avg", "first")); }},
      {"at step -1 for 'second'",
       [](auto& s) { set_values<std::int64_t>(row_of(s, "step", "second"), {-1}); }},
      {"nothing for the exp_avg_sq", [](auto& s) { testing::forget(s, "exp_avg_sq"); }},
      {"nothing for the exp_avg", [](auto& s) { row_of(s, "exp_avg", "second").row.key.kind = "sum"; }},
      {"34 elements", [&](auto& s) { resize(row_of(s, "exp_avg_sq", "second"), 34); }},
      {"6 elements", [&](auto& s) { resize(row_of(s, "exp_avg_sq", "first"), 6); }},
      {"float64",
       [](auto& s) {
         row_of(s, "exp_avg_sq", "second").row.dtype = DType::float32;
         row_of(s, "exp_avg_sq", "second").bytes.resize(33 * 4);
       }},
      {"exp_avg of 'first'",
       [](auto& s) { row_of(s, "exp_avg", "first").template values<float>()[6] = NAN; }},
      {"exp_avg of 'second'",
       [](auto& s) { row_of(s, "exp_avg", "second").template values<double>()[32] = INFINITY; }},
      {"negative", [](auto& s) { row_of(s, "exp_avg_sq", "second").template values<double>()[5] = -1; }},
  };
  for (const auto& [says, spoil] : spoilers) {
    StateSnapshot bad = other;
    spoil(bad);
    try {
      pair.load(bad);
      ADD_FAILURE() << "loaded: " << says;
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr(says));
    }
    EXPECT_EQ(pair.save(), good) << says;
  }
  pair.load(other);  // control: unspoiled, it loads
  EXPECT_EQ(pair.save(), other);
}

// Two ranks with half of the rows each, then three with a third of the columns each.
TEST(OptimizerState, MomentsOfShardsGoWhereTheirPlaceGoes) {
  const std::vector<std::int64_t> shape{4, 6};
  const std::vector<float> gradient = numbers<float>(24, 2, 0);
  const auto part = [&](const Shard& shard, const std::vector<float>& whole) {
    std::vector<float> out(static_cast<std::size_t>(shard.num_elements()));
    const auto copy = [&](std::int64_t from, std::int64_t to, std::int64_t count) {
      std::copy_n(whole.begin() + from, count, out.begin() + to);
    };
    for_each_run(Shard::whole(shape), shard, copy);
    return out;
  };
  struct Holder {
    Shard shard;
    Optimizer optimizer;
    StateRegistry registry;
    explicit Holder(const Shard& s)
        : shard(s),
          optimizer(adam(), std::vector<OptimizerParameter>{{"table", s.num_elements(), DType::float32, s}}) {
      registry.add(
          "optimizer",
          {.rows = [this] { return optimizer.rows(); }, .missing = {}, .commit = {}, .roll_back = {}});
    }
  };
  std::vector<StateSnapshot> saved;
  for (int r = 0; r < 2; ++r) {
    Holder holder(Shard::range(shape, 0, 2 * r, 2));
    std::vector<float> value(12);
    holder.optimizer.update(0, value, part(holder.shard, gradient));
    saved.push_back(holder.registry.save(r, 2));
  }
  Holder whole(Shard::whole(shape));
  std::vector<float> value(24);
  whole.optimizer.update(0, value, gradient);
  const std::vector<float> moments = values_of(whole.registry.save(0, 1), "exp_avg", "table");
  for (int r = 0; r < 3; ++r) {
    Holder holder(Shard::range(shape, 1, 2 * r, 2));
    holder.registry.load(saved, r, 3);
    const StateSnapshot got = holder.registry.save(r, 3);
    EXPECT_EQ(values_of(got, "exp_avg", "table"), part(holder.shard, moments));
    EXPECT_NE(values_of(got, "exp_avg", "table"), part(Shard::range(shape, 1, (2 * r + 2) % 6, 2), moments));
    EXPECT_EQ(holder.optimizer.step(0), 1);
  }
  EXPECT_THROW(
      Optimizer(adam(), std::vector<OptimizerParameter>{{"table", 12, DType::float32, Shard::whole(shape)}}),
      UsageError);
}

TEST(OptimizerState, HoldsTheInitialAccumulatorBeforeTheFirstStep) {
  OptimizerOptions options = adagrad();
  options.initial_accumulator = 0.25;
  Pair pair(options);
  EXPECT_EQ(values_of<std::int64_t>(pair.save(), "step", "first"), std::vector<std::int64_t>{0});
  EXPECT_EQ(values_of(pair.save(), "sum", "first"), std::vector<float>(7, 0.25));
  Pair plain(default_options("sgd"));
  EXPECT_EQ(plain.save().rows.size(), 4u);  // committed steps, the lr, steps of both
}

}  // namespace
}  // namespace weft
