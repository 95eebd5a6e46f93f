// Residuals that change hands: saved on one mesh of data-parallel ranks, stages, tensor-parallel ranks and ranks that
// experts are dealt to, loaded on another. Whoever adds up a parameter's gradients there has them, all of them and
// once, and what they bring into its average is what they would have brought where they were left behind.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>

#include "message_of.h"
#include "step/run_step.h"
#include "weft/error.h"
#include "weft/random.h"
#include "weft/world.h"
#include "workload/job_strategies.h"
#include "workload/model_shapes.h"
#include "workload/train_options.h"

namespace weft {
namespace {

constexpr int kMicroBatches = 2;
constexpr std::int64_t kTokens = 4;

struct Case {
  int dp = 1, pp = 1, tp = 1, ep = 1;
  std::string model = "gpt";
  std::string scheme = "dense";
  int ranks() const { return dp * pp * tp; }
  std::string title() const {
    return model + " dp=" + std::to_string(dp) + ",pp=" + std::to_string(pp) + ",tp=" + std::to_string(tp) +
           ",ep=" + std::to_string(ep) + " " + scheme;
  }
};

ModelOptions sizes_of(const Case& c, int rank) {
  ModelOptions o = model_options(c.model, "tiny");
  o.vocabulary = 41;  // uneven shares of words
  o.width = 8;
  o.heads = 4;
  o.layers = 4;
  o.stage.stages = c.pp;
  o.tensor.ranks = c.tp;
  o.experts.ranks = c.ep;
  return with_rank(o, rank, c.ranks());
}

// A rank whose gradients are zeros: what its sums give is what was left behind.
class ZeroRank final : private Driver {
 public:
  ZeroRank(World& world, const Case& c)
      : sizes_(sizes_of(c, world.rank())),
        shape_(rank_shape(c.model, sizes_)),
        job_(world.engine(), world.comm(), shape_, options_of(c, world.size())) {}

  StateRegistry& state() { return job_.all().state(); }
  Strategies& strategies() { return job_.all(); }
  const ModelShape& shape() const { return shape_; }
  LoadOptions load_options() const {
    LoadOptions out;
    out.elsewhere = [this](const StateKey& key) {
      return std::ranges::find(shape_.parameters, key.name, &ParameterShape::name) == shape_.parameters.end();
    };
    out.kin = JobStrategies::has_residuals;
    return out;
  }
  void step() {
    const std::vector<std::int64_t> tokens(kMicroBatches, kTokens);
    if (job_.pipeline() != nullptr) job_.pipeline()->set_tokens(tokens);
    if (job_.tensor_sums() != nullptr) job_.tensor_sums()->set_tokens(tokens);
    Strategies& all = job_.all();
    all.batch_known(
        {.tokens = job_.counts_tokens() ? kMicroBatches * kTokens : std::int64_t{0}, .lookups = {}});
    Driver& driver = *this;
    Walker walker(driver, all);
    walker.walk(all.next_table(kMicroBatches));
    walker.walk(all.tables(kMicroBatches).settle);
  }
  std::vector<float> result_of(int parameter) const {
    std::vector<float> out(
        static_cast<std::size_t>(shape_.parameters[static_cast<std::size_t>(parameter)].count()));
    job_.all().result_of(parameter, std::span(out));
    return out;
  }

 private:
  JobOptions options_of(const Case& c, int ranks) const {
    JobOptions out;
    out.parallel.scheme.name = c.scheme;
    out.parallel.scheme.density = 0.1;
    out.parallel.scheme.buckets.bucket_bytes = 512;
    out.parallel.scheme.buckets.dense_below = 0;
    out.experts = sizes_.experts;
    out.mesh = mesh_of(sizes_, ranks);
    out.step.stage = sizes_.stage;
    return out;
  }
  Task<void> compute(Piece piece) override {
    if (!adds_gradients(piece.work)) co_return;
    for (int p = 0; p < static_cast<int>(shape_.parameters.size()); ++p) {
      if (!(shape_.ready_after(p, kMicroBatches) == piece)) continue;
      std::vector<float>& zeros = gradients_[p];  // read until its sum is there
      zeros.assign(static_cast<std::size_t>(shape_.parameters[static_cast<std::size_t>(p)].count()), 0);
      job_.all().gradient_ready(p, std::span<const float>(zeros));
    }
  }
  Task<void> wait(Ticket ticket) override {
    ticket.wait();
    co_return;
  }
  Dense tensor(const TensorName& name) override {
    std::int64_t values = shape_.width;
    for (const SumShape& sum : shape_.sums) {
      if (sum.activation == name.name) values = sum.values;
    }
    std::vector<float>& memory = memory_[{name.name, name.micro_batch}];
    memory.assign(static_cast<std::size_t>(kTokens * values), 0);
    return Dense(std::span(memory));
  }

  ModelOptions sizes_;
  ModelShape shape_;
  std::map<int, std::vector<float>> gradients_;
  std::map<std::pair<std::string, int>, std::vector<float>> memory_;
  JobStrategies job_;
};

void for_each_rank(const Case& c, const std::function<void(World&, ZeroRank&)>& f) {
  run_ranks(c.ranks(), [&](World& world) {
    world.plan_by({});
    ZeroRank rank(world, c);
    f(world, rank);
  });
}

std::vector<StateSnapshot> saved_of(const Case& c, const std::function<void(World&, ZeroRank&)>& before) {
  std::vector<StateSnapshot> out(static_cast<std::size_t>(c.ranks()));
  for_each_rank(c, [&](World& world, ZeroRank& rank) {
    before(world, rank);
    out[static_cast<std::size_t>(world.rank())] = rank.state().save(world.rank(), world.size());
  });
  return out;
}

// Every rank's residuals are eighths of at most kLargest, so that sums of them are exact; or thirds of these.
constexpr int kLargest = 4;
std::vector<StateSnapshot> with_residuals(const Case& c, float unit = 1.0F / 8) {
  std::vector<StateSnapshot> out = saved_of(c, [](World&, ZeroRank&) {});
  std::uint32_t number = 0;
  for (StateSnapshot& snapshot : out) {
    for (StateValue& value : snapshot.rows) {
      if (value.row.key.kind != "residual") continue;
      value.bytes.resize(value.row.num_bytes());
      Random random(3, 1, number++);
      for (float& v : value.values<float>()) v = (static_cast<float>(random.below(65)) - 8 * kLargest) * unit;
    }
  }
  return out;
}

// Of each whole tensor, over all ranks, what their sum brings into an average over `dp` data-parallel ranks.
using Means = std::map<std::string, std::vector<double>>;
Means means_of(const std::vector<StateSnapshot>& snapshots, int dp) {
  Means out;
  for (const StateSnapshot& snapshot : snapshots) {
    for (const StateValue& value : snapshot.rows) {
      if (value.row.key.kind != "residual") continue;
      const Shard& shard = value.row.shard;
      std::vector<double>& means = out[value.row.key.name];
      means.resize(static_cast<std::size_t>(shard.tensor_elements()));
      if (value.bytes.empty()) continue;
      const auto add = [&](std::int64_t from, std::int64_t to, std::int64_t n) {
        for (std::int64_t i = 0; i < n; ++i)
          means[static_cast<std::size_t>(to + i)] +=
              static_cast<double>(value.values<float>()[static_cast<std::size_t>(from + i)]) / dp;
      };
      for_each_run(shard, Shard::whole(shard.shape), add);
    }
  }
  return out;
}

// What a rank's part of a parameter has of them.
std::vector<float> part_of(const ParameterShape& parameter, const Means& means) {
  const Shard part = shard_of(parameter);
  const std::vector<double>& whole = means.at(parameter.name);
  std::vector<float> out(static_cast<std::size_t>(part.num_elements()));
  const auto take = [&](std::int64_t from, std::int64_t to, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i)
      out[static_cast<std::size_t>(to + i)] = static_cast<float>(whole[static_cast<std::size_t>(from + i)]);
  };
  for_each_run(Shard::whole(part.shape), part, take);
  return out;
}

const std::vector<Case> kMeshes{{.dp = 2},
                                {.dp = 4},
                                {.tp = 2},
                                {.dp = 2, .tp = 2},
                                {.dp = 2, .pp = 2},
                                {.dp = 1, .pp = 2, .tp = 2},
                                {.dp = 2, .pp = 2, .tp = 2}};

// Rows of residuals as another weft may have told them.
std::vector<StateSnapshot> told(std::vector<StateSnapshot> saved,
                                const std::function<double(const StateRow&)>& divisor) {
  for (StateSnapshot& snapshot : saved) {
    for (StateValue& value : snapshot.rows) {
      if (value.row.key.kind == "residual") value.row.divisor = divisor(value.row);
    }
  }
  return saved;
}

std::vector<StateSnapshot> loaded_on(const Case& to, const std::vector<StateSnapshot>& saved) {
  return saved_of(to, [&](World& world, ZeroRank& rank) {
    rank.state().load(saved, world.rank(), world.size(), rank.load_options());
  });
}

// And the next step that sends everything brings them into its results, on every rank that has the parameter: what
// they would have brought where they were left behind.
TEST(MeshResiduals, MoveBetweenAllMeshes) {
  for (const Case& from : kMeshes) {
    const std::vector<StateSnapshot> saved = with_residuals(from);
    const Means expected = means_of(saved, from.dp);
    for (Case to : kMeshes) {
      for (const char* scheme : {"spardl", "dense-bf16", "dense"}) {
        to.scheme = scheme;
        const std::string title = from.title() + " to " + to.title();
        const bool sends_everything = to.scheme == "dense";
        const auto load = [&](World& world, ZeroRank& rank) {
          rank.state().load(saved, world.rank(), world.size(), rank.load_options());
        };
        EXPECT_EQ(means_of(saved_of(to, load), to.dp), expected) << title;
        if (!sends_everything) continue;
        for_each_rank(to, [&](World& world, ZeroRank& rank) {
          load(world, rank);
          rank.step();
          for (int p = 0; p < static_cast<int>(rank.shape().parameters.size()); ++p) {
            const ParameterShape& parameter = rank.shape().parameters[static_cast<std::size_t>(p)];
            EXPECT_EQ(rank.result_of(p), part_of(parameter, expected)) << title << " " << parameter.name;
          }
          // Nothing is left behind.
          const StateSnapshot behind = rank.state().save(world.rank(), world.size());
          for (const StateValue& value : behind.rows) {
            if (value.row.key.kind == "residual") {
              EXPECT_TRUE(value.bytes.empty()) << title << " " << value.row.key.name;
            }
          }
        });
      }
    }
  }
}

// Sums of gradients are divided by the number of data-parallel ranks, also those over fewer ranks (experts) or more
// (tied tables), and that is what the rows tell.
TEST(MeshResiduals, RowsTellWhatDivides) {
  for (const Case& c : {Case{.dp = 3, .scheme = "spardl"}, Case{.dp = 2, .pp = 2, .tp = 2},
                        Case{.dp = 4, .ep = 2, .model = "gpt-moe"}}) {
    for_each_rank(c, [&](World&, ZeroRank& rank) {
      std::map<std::string, double> divisors;  // of strategies
      for (const PlanRow& row : rank.strategies().rows()) {
        if (row.traffic == TrafficClass::gradient) divisors[row.strategy] = row.divisor;
      }
      int sums = 0;
      for (const LiveRow& live : rank.state().rows()) {
        if (live.row.rule != LayoutRule::sum) continue;
        ++sums;
        EXPECT_EQ(live.row.divisor, c.dp) << c.title() << " " << describe(live.row.key);
        EXPECT_EQ(live.row.divisor, divisors.at(live.row.key.owner)) << c.title();
      }
      EXPECT_EQ(sums, static_cast<int>(rank.shape().parameters.size())) << c.title();
    });
  }
}

// Groups that share experts are smaller than what divides: how they are dealt changes no weight.
TEST(MeshResiduals, OfExpertsMoveToo) {
  const auto moe = [](Case c) {
    c.model = "gpt-moe";
    return c;
  };
  const std::vector<std::pair<Case, Case>> moves{{{.dp = 2}, {.tp = 2}},
                                                 {{.dp = 2, .tp = 2}, {.dp = 2, .pp = 2}},
                                                 {{.dp = 4}, {.dp = 4, .ep = 2}},
                                                 {{.dp = 4, .ep = 4}, {.dp = 2}},
                                                 {{.dp = 4, .ep = 2}, {.dp = 2, .ep = 2}},
                                                 {{.dp = 2, .ep = 2}, {.dp = 4, .ep = 2}}};
  for (const auto& [before, after] : moves) {
    const Case from = moe(before), to = moe(after);
    const std::string title = from.title() + " to " + to.title();
    const std::vector<StateSnapshot> saved = with_residuals(from);
    const Means expected = means_of(saved, from.dp);
    EXPECT_EQ(means_of(loaded_on(to, saved), to.dp), expected) << title;
    // Control: as if each group divided by its own size.
    const auto by_size = [](const StateRow& row) { return row.peers.size; };
    EXPECT_EQ(means_of(loaded_on(to, told(saved, by_size)), to.dp) == expected, from.ep == 1) << title;
  }
}

// The mean of what others rounded to float32: each of n summands once where it is multiplied by to.dp / from.dp, each
// but the first of a rank once where it is added; the sum over the to.dp ranks rounds as often as they are, and its
// division once. 2 n + to.dp roundings, each of at most 2^-24 of a sum of magnitudes, which over to.dp is at most
// n kLargest / from.dp. n is at most the number of ranks there were.
double tolerance_of(const Case& from, const Case& to) {
  return (2 * from.ranks() + to.dp) * std::ldexp(1.0, -24) * kLargest * from.ranks() / from.dp;
}

double farthest(const std::vector<float>& found, const std::vector<float>& expected) {
  double out = found.size() == expected.size() ? 0 : HUGE_VAL;
  for (std::size_t i = 0; i < std::min(found.size(), expected.size()); ++i)
    out = std::max(out, std::abs(static_cast<double>(found[i]) - static_cast<double>(expected[i])));
  return out;
}

// Where one number of ranks is no multiple of the other, up to rounding.
TEST(MeshResiduals, MoveToAndFromThreeRanks) {
  for (const auto& [from, to] :
       {std::pair{Case{.dp = 3}, Case{.dp = 2}}, std::pair{Case{.dp = 2}, Case{.dp = 3}},
        std::pair{Case{.dp = 3}, Case{.dp = 4}}, std::pair{Case{.dp = 3, .tp = 2}, Case{.dp = 2, .pp = 2}},
        std::pair{Case{.dp = 2, .pp = 2}, Case{.dp = 3, .tp = 2}}}) {
    const std::vector<StateSnapshot> saved = with_residuals(from);
    const Means expected = means_of(saved, from.dp);
    const auto brings = [&, &from = from, &to = to](const std::vector<StateSnapshot>& snapshots) {
      std::mutex mutex;
      double worst = 0;
      for_each_rank(to, [&](World& world, ZeroRank& rank) {
        rank.state().load(snapshots, world.rank(), world.size(), rank.load_options());
        rank.step();
        for (int p = 0; p < static_cast<int>(rank.shape().parameters.size()); ++p) {
          const ParameterShape& parameter = rank.shape().parameters[static_cast<std::size_t>(p)];
          const double off = farthest(rank.result_of(p), part_of(parameter, expected));
          const std::lock_guard lock(mutex);
          worst = std::max(worst, off);
        }
      });
      return worst;
    };
    EXPECT_LE(brings(saved), tolerance_of(from, to)) << from.title() << " to " << to.title();
    const auto as_here = [dp = to.dp](const StateRow&) { return dp; };
    EXPECT_GT(brings(told(saved, as_here)), 0.1) << "control: sums as they were";
  }
}

// Nothing is multiplied where the number of data-parallel ranks stays: values that round would show it.
TEST(MeshResiduals, OnTheSameMeshEveryBitStays) {
  for (const Case& c :
       {Case{.dp = 3}, Case{.dp = 2, .pp = 2, .tp = 2}, Case{.dp = 4, .ep = 2, .model = "gpt-moe"}}) {
    const std::vector<StateSnapshot> saved = with_residuals(c, 1.0F / 24);
    const std::vector<StateSnapshot> loaded = loaded_on(c, saved);
    for (std::size_t r = 0; r < saved.size(); ++r) EXPECT_EQ(loaded[r], saved[r]) << c.title();
    const auto thirds = [](const StateRow& row) { return row.divisor * 3; };
    EXPECT_NE(loaded_on(c, told(saved, thirds))[0], saved[0]) << "control";
  }
}

// Checkpoints of before the divisor was told: the same wherever groups are of one kind, and where the data-parallel
// ranks are as many as they were.
TEST(MeshResiduals, WithoutADivisorPeersStandForIt) {
  const auto unknown = [](const StateRow&) { return 0; };
  for (const auto& [from, to] :
       {std::pair{Case{.dp = 2}, Case{.dp = 4}}, std::pair{Case{.dp = 4}, Case{.dp = 2}},
        std::pair{Case{.dp = 2, .tp = 2}, Case{.dp = 4, .tp = 2}},
        std::pair{Case{.dp = 2, .pp = 2}, Case{.dp = 2, .tp = 2}},
        std::pair{Case{.dp = 4, .ep = 2, .model = "gpt-moe"}, Case{.dp = 2, .ep = 2, .model = "gpt-moe"}},
        std::pair{Case{.dp = 4, .model = "gpt-moe"}, Case{.dp = 4, .ep = 2, .model = "gpt-moe"}}}) {
    const std::vector<StateSnapshot> saved = with_residuals(from);
    EXPECT_EQ(means_of(loaded_on(to, told(saved, unknown)), to.dp), means_of(saved, from.dp))
        << from.title() << " to " << to.title();
  }
}

// Controls: residuals that are dropped are seen, and sums that are taken as they were; the first would be, if
// strategies were not kin, by a sentence.
TEST(MeshResiduals, WhatIsLostIsSeen) {
  const Case from{.dp = 2}, to{.dp = 2, .tp = 2};
  std::vector<StateSnapshot> saved = with_residuals(from);
  const Means expected = means_of(saved, from.dp);
  const auto refused = [&](World& world, ZeroRank& rank) {
    LoadOptions alone = rank.load_options();
    alone.kin = nullptr;
    EXPECT_NE(testing::message_of([&] {
                rank.state().load(saved, world.rank(), world.size(), alone);
              }).find("its mass would be lost"),
              std::string::npos);
  };
  for_each_rank(to, refused);
  const Case more{.dp = 4};
  EXPECT_EQ(means_of(loaded_on(more, saved), more.dp), expected);
  const auto as_there = [&](const StateRow&) { return more.dp; };
  EXPECT_NE(means_of(loaded_on(more, told(saved, as_there)), more.dp), expected);
  for (StateSnapshot& snapshot : saved) {
    for (StateValue& value : snapshot.rows) {
      if (value.row.key.name == "layer.1.mlp.norm.weight") value.bytes.clear();
    }
  }
  EXPECT_NE(means_of(loaded_on(to, saved), to.dp), expected);
}

}  // namespace
}  // namespace weft
