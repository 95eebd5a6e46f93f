// Residuals that change hands: saved on one mesh of data-parallel ranks, stages and tensor-parallel ranks, loaded on
// another. Whoever adds up a parameter's gradients there has them, all of them and once.
#include <gtest/gtest.h>

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
  int dp = 1, pp = 1, tp = 1;
  std::string model = "gpt";
  std::string scheme = "dense";
  int ranks() const { return dp * pp * tp; }
  std::string title() const {
    return model + " dp=" + std::to_string(dp) + ",pp=" + std::to_string(pp) + ",tp=" + std::to_string(tp) +
           " " + scheme;
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

// Every rank's residuals are eighths, so that sums of them are exact.
std::vector<StateSnapshot> with_residuals(const Case& c) {
  std::vector<StateSnapshot> out = saved_of(c, [](World&, ZeroRank&) {});
  std::uint32_t number = 0;
  for (StateSnapshot& snapshot : out) {
    for (StateValue& value : snapshot.rows) {
      if (value.row.key.kind != "residual") continue;
      value.bytes.resize(value.row.num_bytes());
      Random random(3, 1, number++);
      for (float& v : value.values<float>()) v = static_cast<float>(random.below(65)) / 8 - 4;
    }
  }
  return out;
}

// Of each whole tensor, over all ranks.
using Sums = std::map<std::string, std::vector<double>>;
Sums sums_of(const std::vector<StateSnapshot>& snapshots) {
  Sums out;
  for (const StateSnapshot& snapshot : snapshots) {
    for (const StateValue& value : snapshot.rows) {
      if (value.row.key.kind != "residual") continue;
      const Shard& shard = value.row.shard;
      std::vector<double>& sums = out[value.row.key.name];
      sums.resize(static_cast<std::size_t>(shard.tensor_elements()));
      if (value.bytes.empty()) continue;
      const auto add = [&](std::int64_t from, std::int64_t to, std::int64_t n) {
        for (std::int64_t i = 0; i < n; ++i)
          sums[static_cast<std::size_t>(to + i)] += value.values<float>()[static_cast<std::size_t>(from + i)];
      };
      for_each_run(shard, Shard::whole(shard.shape), add);
    }
  }
  return out;
}

// What a rank's part of a parameter has of the sums, divided as gradients are.
std::vector<float> part_of(const ParameterShape& parameter, const Sums& sums, int divisor) {
  const Shard part = shard_of(parameter);
  const std::vector<double>& whole = sums.at(parameter.name);
  std::vector<float> out(static_cast<std::size_t>(part.num_elements()));
  const auto take = [&](std::int64_t from, std::int64_t to, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i)
      out[static_cast<std::size_t>(to + i)] =
          static_cast<float>(whole[static_cast<std::size_t>(from + i)] / divisor);
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

// And the next step that sends everything brings them into its results, on every rank that has the parameter.
TEST(MeshResiduals, MoveBetweenAllMeshes) {
  for (const Case& from : kMeshes) {
    const std::vector<StateSnapshot> saved = with_residuals(from);
    const Sums expected = sums_of(saved);
    for (Case to : kMeshes) {
      for (const char* scheme : {"spardl", "dense-bf16", "dense"}) {
        to.scheme = scheme;
        const std::string title = from.title() + " to " + to.title();
        const bool sends_everything = to.scheme == "dense";
        const auto load = [&](World& world, ZeroRank& rank) {
          rank.state().load(saved, world.rank(), world.size(), rank.load_options());
        };
        EXPECT_EQ(sums_of(saved_of(to, load)), expected) << title;
        if (!sends_everything) continue;
        for_each_rank(to, [&](World& world, ZeroRank& rank) {
          load(world, rank);
          rank.step();
          for (int p = 0; p < static_cast<int>(rank.shape().parameters.size()); ++p) {
            const ParameterShape& parameter = rank.shape().parameters[static_cast<std::size_t>(p)];
            EXPECT_EQ(rank.result_of(p), part_of(parameter, expected, to.dp))
                << title << " " << parameter.name;
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

TEST(MeshResiduals, OfExpertsMoveToo) {
  for (const auto& [from, to] :
       {std::pair{Case{.dp = 2, .model = "gpt-moe"}, Case{.tp = 2, .model = "gpt-moe"}},
        std::pair{Case{.dp = 2, .tp = 2, .model = "gpt-moe"}, Case{.dp = 2, .pp = 2, .model = "gpt-moe"}}}) {
    const std::vector<StateSnapshot> saved = with_residuals(from);
    const auto load = [&](World& world, ZeroRank& rank) {
      rank.state().load(saved, world.rank(), world.size(), rank.load_options());
    };
    EXPECT_EQ(sums_of(saved_of(to, load)), sums_of(saved)) << from.title() << " to " << to.title();
  }
}

// Controls: residuals that are dropped are seen; and they would be, if strategies were not kin, by a sentence.
TEST(MeshResiduals, WhatIsLostIsSeen) {
  const Case from{.dp = 2}, to{.dp = 2, .tp = 2};
  std::vector<StateSnapshot> saved = with_residuals(from);
  const Sums expected = sums_of(saved);
  const auto refused = [&](World& world, ZeroRank& rank) {
    LoadOptions alone = rank.load_options();
    alone.kin = nullptr;
    EXPECT_NE(testing::message_of([&] {
                rank.state().load(saved, world.rank(), world.size(), alone);
              }).find("its mass would be lost"),
              std::string::npos);
  };
  for_each_rank(to, refused);
  for (StateSnapshot& snapshot : saved) {
    for (StateValue& value : snapshot.rows) {
      if (value.row.key.name == "layer.1.mlp.norm.weight") value.bytes.clear();
    }
  }
  const auto load = [&](World& world, ZeroRank& rank) {
    rank.state().load(saved, world.rank(), world.size(), rank.load_options());
  };
  EXPECT_NE(sums_of(saved_of(to, load)), expected);
}

}  // namespace
}  // namespace weft
