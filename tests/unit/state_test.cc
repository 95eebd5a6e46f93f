// The registry of state: shards in their places, one commit for all owners, the four rules for another
// layout.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "reference/data.h"
#include "state/registry.h"
#include "state_rows.h"
#include "weft/error.h"

namespace weft {
namespace {

using ::testing::HasSubstr;
using testing::row_of;
using testing::set_values;
using testing::step_of;
using testing::values_of;

// ---- shards ----

TEST(Shard, RunsVisitEveryCommonElementOnce) {
  const std::vector<std::int64_t> shape{4, 5, 3};
  const std::vector<Shard> shards = {Shard::whole(shape),          Shard::range(shape, 0, 1, 2),
                                     Shard::range(shape, 1, 2, 3), Shard::range(shape, 2, 0, 1),
                                     Shard::range(shape, 0, 0, 0), {shape, {1, 1, 1}, {3, 2, 2}}};
  const auto places = [](const Shard& s) {  // of each element of the shard: in the tensor
    std::vector<std::int64_t> out;
    for (std::int64_t i = 0; i < s.extent[0]; ++i) {
      for (std::int64_t j = 0; j < s.extent[1]; ++j) {
        for (std::int64_t k = 0; k < s.extent[2]; ++k)
          out.push_back(((s.first[0] + i) * s.shape[1] + s.first[1] + j) * s.shape[2] + s.first[2] + k);
      }
    }
    return out;
  };
  for (const Shard& from : shards) {
    for (const Shard& to : shards) {
      EXPECT_EQ(trouble_with(from), "");
      const std::vector<std::int64_t> a = places(from), b = places(to);
      std::int64_t seen = 0, last = -1, runs = 0;
      const auto visit = [&](std::int64_t at, std::int64_t into, std::int64_t count) {
        ++runs;
        EXPECT_GT(at, last);
        for (std::int64_t i = 0; i < count; ++i, ++seen) {
          EXPECT_EQ(a.at(static_cast<std::size_t>(at + i)), b.at(static_cast<std::size_t>(into + i)));
          last = at + i;
        }
      };
      for_each_run(from, to, visit);
      EXPECT_EQ(seen, common_elements(from, to));
      if (from.is_whole() && to.is_whole()) {
        EXPECT_EQ(runs, 1);
      }
    }
  }
  std::int64_t calls = 0;
  const auto count = [&](std::int64_t, std::int64_t, std::int64_t n) { calls += n; };
  for_each_run(Shard::whole({}), Shard::whole({}), count);
  EXPECT_EQ(calls, 1) << "a scalar is one element";
}

TEST(Shard, WhatIsOutsideOfItsTensorIsRefused) {
  constexpr auto kMost = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(trouble_with(Shard::whole({0, 1 << 30, 3})), "");
  for (const Shard& bad : {Shard::range({4, 3}, 0, 3, 2), Shard::range({4, 3}, 0, -1, 2),
                           Shard::range({4, 3}, 1, 0, -1), Shard::range({4, 3}, 1, kMost, 2),
                           Shard::range({4, 3}, 1, 2, kMost), Shard::whole({-4}), Shard::whole({kMost, 2}),
                           Shard::whole({0, kMost, kMost}), Shard{{4}, {0, 0}, {4}}, Shard{{4}, {0}, {}}}) {
    EXPECT_NE(trouble_with(bad), "");
  }
}

// ---- owners ----

template <class T>
struct Vector {
  StateRow row;
  std::vector<T> committed, staged;
  bool has_staged = false;
};

// An owner of some vectors that are all staged in a step.
template <class T = float>
class Owner {
 public:
  explicit Owner(std::string name) : name_(std::move(name)) {}
  Vector<T>& add(const std::string& kind, const std::string& name, LayoutRule rule, Shard shard, Peers peers,
                 std::vector<T> values) {
    vectors_.push_back(std::make_unique<Vector<T>>());
    vectors_.back()->row = {{name_, kind, name}, dtype_of<T>(), rule, std::move(shard), peers};
    vectors_.back()->committed = std::move(values);
    return *vectors_.back();
  }
  OwnedState state() {
    return {.rows = [this] { return rows(); },
            .missing = [this]() -> std::string {
              for (const auto& v : vectors_) {
                if (!v->has_staged) return describe(v->row.key) + " is not staged";
              }
              return "";
            },
            .commit =
                [this] {
                  for (auto& v : vectors_) {
                    v->committed.swap(v->staged);
                    v->has_staged = false;
                  }
                },
            .roll_back =
                [this] {
                  for (auto& v : vectors_) v->has_staged = false;
                }};
  }
  void stage(T value) {
    for (auto& v : vectors_) {
      v->staged.assign(v->committed.size(), value);
      v->has_staged = true;
    }
  }
  Vector<T>& operator[](std::size_t i) { return *vectors_[i]; }

 private:
  std::vector<LiveRow> rows() {
    std::vector<LiveRow> out;
    for (auto& v : vectors_) {
      LiveRow row;
      row.row = v->row;
      row.read = [&values = v->committed](auto&) { return std::as_bytes(std::span<const T>(values)); };
      row.write = [&v = *v](std::span<const std::byte> bytes) {
        v.committed.assign(static_cast<std::size_t>(v.row.shard.num_elements()), 0);
        if (!bytes.empty()) std::memcpy(v.committed.data(), bytes.data(), bytes.size());
      };
      out.push_back(std::move(row));
    }
    return out;
  }
  std::string name_;
  std::vector<std::unique_ptr<Vector<T>>> vectors_;
};

// Whether a step in which only one of two owners has staged leaves both as they were, and one that is whole
// commits both.
template <class Registry>
bool is_one_commit() {
  Registry registry;
  Owner<> a("a"), b("b");
  a.add("residual", "x", LayoutRule::sum, Shard::whole({2}), {}, {1, 1});
  b.add("scale", "y", LayoutRule::same, Shard::whole({2}), {}, {2, 2});
  registry.add("a", a.state());
  registry.add("b", b.state());
  for (Owner<>* each : {&a, &b}) {
    each->stage(9);
    try {
      registry.commit();
      return false;
    } catch (const UsageError&) {
    }
    if (a[0].committed[0] != 1 || b[0].committed[0] != 2 || registry.step() != 0) return false;
    registry.roll_back();
  }
  a.stage(3);
  b.stage(4);
  registry.commit();
  return a[0].committed[0] == 3 && b[0].committed[0] == 4 && registry.step() == 1;
}

// The broken variant: every owner by itself.
class CommitsByOwner {
 public:
  void add(const std::string&, OwnedState state) { owners_.push_back(std::move(state)); }
  void commit() {
    for (const OwnedState& o : owners_) {
      if (!o.missing().empty()) throw UsageError("missing");
      o.commit();
    }
    ++step_;
  }
  void roll_back() {
    for (const OwnedState& o : owners_) o.roll_back();
  }
  std::int64_t step() const { return step_; }

 private:
  std::vector<OwnedState> owners_;
  std::int64_t step_ = 0;
};

TEST(StateRegistry, OneCommitForAllOwners) {
  EXPECT_TRUE(is_one_commit<StateRegistry>());
  EXPECT_FALSE(is_one_commit<CommitsByOwner>());  // control
}

TEST(StateRegistry, SaysWhatIsNotStaged) {
  StateRegistry registry;
  Owner<> a("a");
  a.add("residual", "x", LayoutRule::sum, Shard::whole({2}), {}, {1, 1});
  registry.add("a", a.state());
  try {
    registry.commit();
    ADD_FAILURE();
  } catch (const UsageError& e) {
    EXPECT_THAT(e.what(), HasSubstr("a: the residual of 'x' is not staged, so nothing is committed"));
  }
  EXPECT_THROW(registry.add("a", a.state()), UsageError);
  EXPECT_THROW(registry.add("registry", a.state()), UsageError);
  registry.remove("a");
  registry.commit();
  EXPECT_EQ(registry.step(), 1);
}

TEST(StateRegistry, RowsThatCannotBeAreRefused) {
  const auto refused = [](const StateRow& row, int times = 1) {
    StateRegistry registry;
    registry.add("a",
                 {.rows = [&] { return std::vector<LiveRow>(static_cast<std::size_t>(times), LiveRow{row}); },
                  .missing = {},
                  .commit = {},
                  .roll_back = {}});
    try {
      registry.rows();
      return false;
    } catch (const UsageError&) {
      return true;
    }
  };
  const StateRow good{{"a", "residual", "x"}, DType::float32, LayoutRule::sum, Shard::whole({2}), {1, 2}};
  EXPECT_FALSE(refused(good));
  EXPECT_TRUE(refused(good, 2)) << "twice";
  const auto spoiled = [&](const std::function<void(StateRow&)>& spoil) {
    StateRow row = good;
    spoil(row);
    return refused(row);
  };
  EXPECT_TRUE(spoiled([](StateRow& r) { r.key.owner = "a b"; }));
  EXPECT_TRUE(spoiled([](StateRow& r) { r.key.kind = ""; }));
  EXPECT_TRUE(spoiled([](StateRow& r) { r.key.name = ""; }));
  EXPECT_TRUE(spoiled([](StateRow& r) { r.key.name = "a\nb"; }));
  EXPECT_TRUE(spoiled([](StateRow& r) { r.dtype = DType::bfloat16; }));
  EXPECT_TRUE(spoiled([](StateRow& r) { r.dtype = DType::int64; })) << "sums of whole numbers";
  EXPECT_TRUE(spoiled([](StateRow& r) { r.peers = {2, 2}; }));
  for (const double divisor : {-1.0, static_cast<double>(NAN), static_cast<double>(INFINITY)})
    EXPECT_TRUE(spoiled([divisor](StateRow& r) { r.divisor = divisor; })) << divisor;
  EXPECT_TRUE(spoiled([](StateRow& r) { r.shard = Shard::range({2}, 0, 1, 2); }));
  EXPECT_TRUE(spoiled([](StateRow& r) {
    r.rule = LayoutRule::same;
    r.shard = Shard::range({2}, 0, 1, 1);
  }));
}

// ---- another layout ----

// Any sum of some of them is exact.
float summable(int rank, std::int64_t i) {
  return static_cast<float>(static_cast<int>(reference::hash(7, rank, i) % 2001) - 1000) / 8;
}

constexpr std::int64_t kLength = 5;

// A residual, a scale and a threshold of each rank, and its columns of a table of 3 x 24.
struct Rank {
  StateRegistry registry;
  Owner<> owner{"a"};
  Rank(int rank, int size) {
    const Peers peers{rank, size};
    std::vector<float> residual, table;
    for (std::int64_t i = 0; i < kLength; ++i) residual.push_back(summable(rank, i));
    const std::int64_t first = 24 * rank / size, end = 24 * (rank + 1) / size;
    for (int row = 0; row < 3; ++row) {
      for (std::int64_t c = first; c < end; ++c) table.push_back(static_cast<float>(100 * row + c));
    }
    owner.add("residual", "x", LayoutRule::sum, Shard::whole({kLength}), peers, residual);
    owner.add("scale", "x", LayoutRule::same, Shard::whole({2}), peers, {-0.0F, 3});
    owner.add("threshold", "x", LayoutRule::restart, Shard::whole({1}), peers,
              {static_cast<float>(rank + 1)});
    owner.add("value", "table", LayoutRule::moves, Shard::range({3, 24}, 1, first, end - first), {},
              std::move(table));
    registry.add("a", owner.state());
  }
};

std::vector<StateSnapshot> saved_by(int size) {
  std::vector<StateSnapshot> out;
  for (int r = 0; r < size; ++r) {
    Rank rank(r, size);
    rank.owner.stage(0);
    for (std::size_t i = 0; i < 4; ++i) rank.owner[i].staged = rank.owner[i].committed;
    rank.registry.commit();
    out.push_back(rank.registry.save(r, size));
  }
  return out;
}

std::vector<float> sum_of_residuals(const std::vector<StateSnapshot>& all) {
  std::vector<float> out(kLength);
  for (const StateSnapshot& s : all) {
    const std::vector<float> mine = values_of(s, "residual", "x");
    for (std::size_t i = 0; i < mine.size(); ++i) out[i] += mine[i];
  }
  return out;
}

TEST(StateLayout, EveryRuleHoldsOnAnyNumberOfRanks) {
  for (const int from : {1, 2, 3, 4}) {
    const std::vector<StateSnapshot> saved = saved_by(from);
    for (const int to : {1, 2, 3, 4, 8}) {
      std::vector<StateSnapshot> loaded;
      for (int r = 0; r < to; ++r) {
        Rank fresh(r, to);
        const std::vector<float> table = fresh.owner[3].committed;
        for (std::size_t i = 0; i < 4; ++i)
          fresh.owner[i].committed.assign(fresh.owner[i].committed.size(), 77);
        fresh.owner.stage(9);
        fresh.registry.load(saved, r, to);
        EXPECT_EQ(fresh.registry.step(), 1);
        EXPECT_THROW(fresh.registry.commit(), UsageError) << "what was staged is forgotten";
        loaded.push_back(fresh.registry.save(r, to));
        EXPECT_EQ(fresh.owner[3].committed, table) << from << " to " << to << ": every value in its place";
        EXPECT_TRUE(std::signbit(values_of(loaded.back(), "scale", "x")[0]));
        const float threshold = values_of(loaded.back(), "threshold", "x")[0];
        EXPECT_EQ(threshold, from == to ? static_cast<float>(r + 1) : 0.0F);
        if (from == to) {
          EXPECT_EQ(loaded.back(), saved[static_cast<std::size_t>(r)]);
        }
        if (r >= from) {
          EXPECT_EQ(values_of(loaded.back(), "residual", "x"), std::vector<float>(kLength));
        }
      }
      EXPECT_EQ(sum_of_residuals(loaded), sum_of_residuals(saved)) << from << " to " << to;
      // Control: a layout that drops a rank's residual is caught.
      loaded.erase(loaded.begin());
      EXPECT_NE(sum_of_residuals(loaded), sum_of_residuals(saved));
    }
  }
}

// Where several meet they are added in the order of their ranks.
TEST(StateLayout, SumsAreAddedInTheOrderOfRanks) {
  std::vector<StateSnapshot> saved = saved_by(3);
  const float one[] = {1e8F, 1, -1e8F};
  for (std::size_t r = 0; r < 3; ++r)
    set_values(row_of(saved[r], "residual", "x"), std::vector<float>(kLength, one[r]));
  std::swap(saved[0], saved[2]);  // the order of the list is nothing
  Rank fresh(0, 1);
  fresh.registry.load(saved, 0, 1);
  EXPECT_EQ(fresh.owner[0].committed[0], (1e8F + 1) + -1e8F);
  EXPECT_NE((1e8F + 1) + -1e8F, (1e8F + -1e8F) + 1);  // or the test is blind
}

// What the residuals of all ranks bring into what is divided by so much.
std::vector<double> mean_of_residuals(const std::vector<StateSnapshot>& all, double divisor) {
  std::vector<double> out(kLength);
  for (const StateSnapshot& s : all) {
    const std::vector<float> mine = values_of(s, "residual", "x");
    for (std::size_t i = 0; i < mine.size(); ++i) out[i] += static_cast<double>(mine[i]) / divisor;
  }
  return out;
}

std::vector<StateSnapshot> divided_by(std::vector<StateSnapshot> all, double divisor) {
  for (StateSnapshot& s : all) row_of(s, "residual", "x").row.divisor = divisor;
  return all;
}

TEST(StateLayout, WhatSumsBringWhereTheyAreDividedStays) {
  for (const int from : {1, 2, 3, 4}) {
    const std::vector<StateSnapshot> saved = divided_by(saved_by(from), from);
    const std::vector<double> wanted = mean_of_residuals(saved, from);
    for (const int to : {1, 2, 3, 4, 8}) {
      const auto found = [to](const std::vector<StateSnapshot>& source) {
        std::vector<StateSnapshot> loaded;
        for (int r = 0; r < to; ++r) {
          Rank fresh(r, to);
          fresh.owner[0].row.divisor = to;
          fresh.registry.load(source, r, to);
          loaded.push_back(fresh.registry.save(r, to));
        }
        return mean_of_residuals(loaded, to);
      };
      // Exact where the ratio is a power of two. Else, of at most 4 values of 125, over their number: each is
      // rounded where it is multiplied, and their sum where it is added to, at most three times. The means of the
      // test are doubles.
      const bool exact = (from == 3) == (to == 3);
      const double tolerance = exact ? 0 : 4.01 * 125 * 0x1p-24;
      const std::vector<double> told = found(saved), plain = found(divided_by(saved, to));
      for (std::size_t i = 0; i < wanted.size(); ++i) {
        EXPECT_NEAR(told[i], wanted[i], tolerance + 1e-12) << from << " to " << to;
        EXPECT_NEAR(plain[i], wanted[i] * from / to, 1e-12) << "the divisor stays: so does the sum";
      }
      EXPECT_EQ(found(divided_by(saved, 0)), told) << "not told: peers stand for it";
    }
  }
}

TEST(StateLayout, WhereTheDivisorStaysEveryBitDoes) {
  std::vector<StateSnapshot> saved = divided_by(saved_by(2), 3);
  set_values(row_of(saved[1], "residual", "x"), std::vector<float>{0.1F, -0.0F, 1e-45F, 3e38F, 1 / 3.0F});
  Rank fresh(1, 4);
  fresh.owner[0].row.divisor = 3;
  fresh.registry.load(saved, 1, 4);
  EXPECT_EQ(fresh.registry.save(1, 4).find("residual", "x")->bytes, row_of(saved[1], "residual", "x").bytes);
  fresh.owner[0].row.divisor = 6;  // control
  row_of(saved[1], "residual", "x").values<float>()[3] = 1;
  fresh.registry.load(saved, 1, 4);
  EXPECT_EQ(fresh.owner[0].committed, (std::vector<float>{0.2F, -0.0F, 3e-45F, 2, 2 / 3.0F}));
}

// Where ranks leave, what those who stay take over is of their size: it is multiplied before it is added.
TEST(StateLayout, SumsThatLeaveTheTypeMayHaveMeansThatDoNot) {
  std::vector<StateSnapshot> saved = divided_by(saved_by(2), 2);
  for (StateSnapshot& s : saved) set_values(row_of(s, "residual", "x"), std::vector<float>(kLength, 3e38F));
  Rank fresh(0, 1);
  fresh.registry.load(saved, 0, 1);
  EXPECT_EQ(fresh.owner[0].committed, std::vector<float>(kLength, 3e38F));
  EXPECT_THROW(fresh.registry.load(divided_by(saved, 1), 0, 1), UsageError) << "control: a sum";
  EXPECT_THROW(fresh.registry.load(divided_by(saved, 0.25), 0, 1), UsageError) << "control: too large";
}

TEST(StateLayout, WhatDoesNotFitIsRefusedAndChangesNothing) {
  using Spoil = std::function<void(std::vector<StateSnapshot>&)>;
  const auto row = [](std::vector<StateSnapshot>& s, std::size_t r, const char* kind) -> StateValue& {
    return row_of(s[r], kind, std::string(kind) == "value" ? "table" : "x");
  };
  const std::vector<std::pair<std::string, Spoil>> cases = {
      {"snapshot is of 4 ranks and comes with 3", [](auto& s) { s.pop_back(); }},
      {"rank 1 of 4 is there twice", [](auto& s) { s[0].rank = 1; }},
      {"in rank 0's snapshot the residual of 'x' is there twice",
       [](auto& s) { s[0].rows.push_back(s[0].rows[1]); }},
      {"another value than rank 0's for the scale",
       [&](auto& s) { row(s, 2, "scale").template values<float>()[1] = 4; }},
      {"another value than rank 0's for the value of 'table'",
       [&](auto& s) { row(s, 1, "value").row.shard = row(s, 0, "value").row.shard; }},
      {"another value than rank 0's for the step",
       [](auto& s) { set_values<std::int64_t>(row_of(s[3], "step", "committed"), {7}); }},
      {"the residual of 'x' has several divisors", [&](auto& s) { row(s, 1, "residual").row.divisor = 4; }},
      {"the residual of 'x' has a divisor that is no such number",
       [&](auto& s) { row(s, 1, "residual").row.divisor = -1; }},
      {"not finite", [&](auto& s) { row(s, 1, "residual").template values<float>()[2] = NAN; }},
      {"not finite", [&](auto& s) { row(s, 3, "value").template values<float>()[0] = INFINITY; }},
      {"has 4 elements, not 5", [&](auto& s) { row(s, 1, "residual").bytes.resize(16); }},
      {"has 6 elements in the snapshot and 5 here",
       [&](auto& s) {
         for (std::size_t r = 0; r < 4; ++r) {
           row(s, r, "residual").row.shard = Shard::whole({6});
           row(s, r, "residual").bytes.resize(24);
         }
       }},
      {"the residual of 'x' of rank 2 of 4 is missing",
       [](auto& s) { std::erase_if(s[2].rows, [](auto& v) { return v.row.key.kind == "residual"; }); }},
      {"18 of the 72 elements of the value of 'table' ([3,24]) are missing",
       [](auto& s) { std::erase_if(s[2].rows, [](auto& v) { return v.row.key.kind == "value"; }); }},
      {"overlap", [&](auto& s) { row(s, 2, "value").row.shard.first[1] -= 1; }},
      {"the shape [24,3] in the snapshot and [3,24] here",
       [&](auto& s) { row(s, 2, "value").row.shard = Shard::range({24, 3}, 0, 0, 6); }},
      {"was saved as float64 (moves)",
       [&](auto& s) {
         row(s, 2, "value").row.dtype = DType::float64;
         row(s, 2, "value").bytes.resize(18 * 8);
       }},
      {"nothing for the value of 'table' (a)",
       [](auto& s) {
         for (StateSnapshot& each : s) testing::forget(each, "value");
       }},
      {"the residual of 'gone' (5 elements) has no place here; its mass would be lost",
       [&](auto& s) {
         for (std::size_t r = 0; r < 4; ++r) {
           s[r].rows.push_back(row(s, r, "residual"));
           s[r].rows.back().row.key.name = "gone";
         }
       }},
      {"the value of 'gone' (2 elements) has no place here",
       [&](auto& s) {
         s[0].rows.push_back(
             {{{"a", "value", "gone"}, DType::float32, LayoutRule::moves, Shard::whole({2}), {}},
              std::vector<std::byte>(8)});
       }},
      {"committed steps is -1",
       [](auto& s) {
         for (StateSnapshot& each : s) set_values<std::int64_t>(row_of(each, "step", "committed"), {-1});
       }},
  };
  for (const auto& [says, spoil] : cases) {
    std::vector<StateSnapshot> saved = saved_by(4);
    spoil(saved);
    Rank fresh(0, 1);
    const StateSnapshot before = fresh.registry.save(0, 1);
    try {
      fresh.registry.load(saved, 0, 1);
      ADD_FAILURE() << "loaded: " << says;
    } catch (const UsageError& e) {
      EXPECT_THAT(e.what(), HasSubstr(says));
    }
    EXPECT_EQ(fresh.registry.save(0, 1), before) << says;
  }
  Rank control(0, 1);
  control.registry.load(saved_by(4), 0, 1);
}

TEST(StateLayout, ZerosAndWhatOthersHoldAreNotMissed) {
  std::vector<StateSnapshot> saved = saved_by(2);
  for (StateSnapshot& s : saved) {
    s.rows.push_back(row_of(s, "residual", "x"));
    s.rows.back().row.key.name = "gone";
  }
  Rank fresh(0, 1);
  const LoadOptions elsewhere{.owners = {},
                              .elsewhere = [](const StateKey& key) { return key.name == "gone"; }};
  fresh.registry.load(saved, 0, 1, elsewhere);
  for (StateSnapshot& s : saved) s.rows.back().bytes.clear();  // zeros
  fresh.registry.load(saved, 0, 1);
  for (StateSnapshot& s : saved) s.rows.back().bytes.resize(20);  // zeros that are written down
  fresh.registry.load(saved, 0, 1);
}

TEST(StateLayout, OnlyTheOwnersThatAreAskedForAreLoaded) {
  const std::vector<StateSnapshot> saved = saved_by(2);
  Rank fresh(0, 1);
  Owner<> other("b");
  other.add("value", "y", LayoutRule::moves, Shard::whole({1}), {}, {5});
  fresh.registry.add("b", other.state());
  EXPECT_THROW(fresh.registry.load(saved, 0, 1), UsageError) << "b's value is not there";
  fresh.registry.load(saved, 0, 1, {.owners = {"a"}, .elsewhere = {}});
  EXPECT_EQ(other[0].committed[0], 5);
  EXPECT_EQ(fresh.registry.step(), 0) << "the registry's own is not a's";
}

// Residuals of shards: every rank's summand of every range finds its new place.
TEST(StateLayout, SumsOfShardsMoveToo) {
  const auto row = [](int shard, int shards, int peer, int peers) {
    return StateRow{{"a", "residual", "x"},
                    DType::float64,
                    LayoutRule::sum,
                    Shard::range({8}, 0, 8 / shards * shard, 8 / shards),
                    {peer, peers}};
  };
  std::vector<StateSnapshot> saved;
  for (int r = 0; r < 4; ++r) {  // 2 shards of 2 peers each
    StateValue value{row(r / 2, 2, r % 2, 2), {}};
    std::vector<double> v;
    for (int i = 0; i < 4; ++i) v.push_back(1000 * (r % 2 + 1) + 4 * (r / 2) + i);
    set_values(value, v);
    saved.push_back({.rank = r, .size = 4, .rows = {value}});
  }
  StateRegistry registry;
  Owner<double> owner("a");
  owner.add("residual", "x", LayoutRule::sum, row(1, 4, 0, 1).shard, {0, 1}, {0, 0});
  registry.add("a", owner.state());
  registry.load(saved, 1, 4);  // of 4 shards of one peer each
  EXPECT_EQ(owner[0].committed, (std::vector<double>{3000 + 2 * 2, 3000 + 2 * 3}));
  owner[0].row.divisor = 1.5;
  registry.load(saved, 1, 4);
  EXPECT_EQ(owner[0].committed, (std::vector<double>{4500 + 3 * 2, 4500 + 3 * 3})) << "of doubles, too";
}

}  // namespace
}  // namespace weft
