// Training with tensor-parallel ranks against one process with torch alone, in float64, with dropout: every mesh of
// data-parallel ranks, stages and tensor-parallel ranks; bytes; state that moves to other meshes.
#include <gtest/gtest.h>

#include <tuple>

#include "pipeline/tensor_sums.h"
#include "torch/mesh_toy.h"
#include "weft/error.h"
#include "workload/model_shapes.h"

namespace weft {
namespace {

using namespace mesh_test;

// Sixteen layers and twelve heads, so that every mesh of up to 8 ranks is there, or refused by a sentence.
Staged sixteen(int dp, int pp, int tp) {
  Staged out = with({.stage = {.stages = pp}, .dp = dp, .micro_batches = 2, .layers = 16, .steps = 2});
  out.tp = tp;
  out.heads = 12;
  return out;
}

TEST(TensorRanks, EveryMeshEqualsOneProcessOrIsRefused) {
  Grid grid;
  for (const int tp : {2, 3, 4, 5, 6, 7, 8}) {
    for (int pp = 1; pp * tp <= 8; ++pp) {
      for (int dp = 1; dp * pp * tp <= 8; ++dp) {
        Staged t = sixteen(dp, pp, tp);
        if (12 % tp != 0) {
          try {
            together(t);
            ADD_FAILURE() << title(t) << " was not refused";
          } catch (const UsageError& error) {
            EXPECT_NE(
                std::string(error.what())
                    .find("heads must be a multiple of the " + std::to_string(tp) + " tensor-parallel ranks"),
                std::string::npos)
                << error.what();
          }
          continue;
        }
        for (const std::string schedule : {"gpipe", "1f1b", "interleaved", "zb-h1"}) {
          for (const int micro_batches : {1, 2, 3, 4, 5, 8, 16}) {
            const bool interleaved = schedule == "interleaved";
            if (interleaved && micro_batches % pp != 0) continue;
            t.stage.schedule = schedule;
            t.stage.chunks = interleaved && pp > 1 ? 2 : 1;
            t.micro_batches = micro_batches;
            grid.add(schedule + std::to_string(pp), t);
          }
        }
      }
    }
  }
  for (const Staged& t : grid.taken(50))
    EXPECT_LT(distance(together(t), alone(t)), kSame) << title(t) << ", seed " << Grid::seed();
}

TEST(TensorRanks, ClippingRecomputationUnevenWordsAndOtherModels) {
  Staged t = with({.stage = {.stages = 1}, .dp = 2, .tp = 2});
  EXPECT_LT(distance(together(t), alone(t)), kSame);
  t.clip_norm = 0.05;
  EXPECT_LT(distance(together(t), alone(t)), kSame) << "clipping counts every element once";
  t.recompute = true;
  EXPECT_LT(distance(together(t), alone(t)), kSame) << "recomputation";
  Staged third = with({.stage = {.stages = 2}, .tp = 3, .heads = 3});  // 40 words are no multiple of 3
  EXPECT_LT(distance(together(third), alone(third)), kSame);
  Staged bert = with({.model = "bert", .stage = {.stages = 2}, .dp = 2, .tp = 2});
  EXPECT_LT(distance(together(bert), alone(bert)), kSame) << "bert";
  Staged one = with({.stage = {.stages = 2}, .micro_batches = 13, .sequences = 13, .tp = 4, .heads = 4});
  EXPECT_LT(distance(together(one), alone(one)), kSame) << "six tokens for four ranks";
}

// As without them, which other tests hold to one process.
TEST(TensorRanks, BesideExpertsTablesAndSchemes) {
  Staged cut = with({.model = "gpt-moe", .stage = {.stages = 2}, .dp = 2, .micro_batches = 2});
  cut.ep = 2;
  cut.tables = "embrace";
  Staged whole = cut;
  cut.tp = 2;
  EXPECT_LT(distance(together(cut), together(whole)), kSame);
  for (const char* scheme : {"spardl", "powersgd"}) {
    Staged t = with({.stage = {.stages = 2}, .dp = 2, .scheme = scheme, .type = torch::kFloat32, .tp = 2});
    t.backward = {.columns = 2};
    const Result run = together(t);
    EXPECT_LT(run.losses.back(), run.losses.front() + 0.5) << scheme;
  }
}

TEST(TensorRanks, StateMovesToOtherMeshes) {
  std::vector<Staged> meshes{
      with({.stage = {.stages = 1}, .dp = 2}), with({.stage = {.stages = 1}, .dp = 1, .tp = 2}),
      with({.stage = {.stages = 2}, .dp = 2, .tp = 2}), with({.stage = {.stages = 2}, .dp = 1, .tp = 4})};
  for (Staged& t : meshes) t.heads = 4;
  const Result expected = alone([&] {
    Staged t = meshes.front();
    t.steps = 3;
    return t;
  }());
  for (const Staged& from : meshes) {
    Saved saved;
    train_and_save(from, 2, saved);
    for (const Staged& to : meshes)
      EXPECT_LT(distance(load_and_train(to, saved, 2, 3), expected.parameters), kSame)
          << title(from) << " to " << title(to);
  }
}

// A run that goes on has the bits of one that did not stop, with factors and a sparse scheme.
TEST(TensorRanks, ResumeHasTheSameBits) {
  Staged t = with(
      {.stage = {.stages = 2}, .dp = 2, .steps = 5, .scheme = "spardl", .type = torch::kFloat32, .tp = 2});
  t.backward = {.columns = 2};
  const Named straight = together(t).parameters;
  Saved saved;
  train_and_save(t, 3, saved);
  const Named resumed = load_and_train(t, saved, 3, 5);
  for (const auto& [name, value] : straight) EXPECT_TRUE(torch::equal(resumed.at(name), value)) << name;
}

// All that travels in bfloat16, but for the loss's scores and what tensor-parallel ranks have copies of: near what it is
// in float32, and the same bits on all ranks that have the same (together() compares them).
TEST(TensorRanks, TrainAsWellInBfloat16) {
  for (const auto& [pp, dp, tp] : {std::tuple{1, 1, 3}, std::tuple{2, 2, 2}}) {
    Staged t =
        with({.stage = {.stages = pp}, .dp = dp, .steps = 6, .type = torch::kFloat32, .tp = tp, .heads = 6});
    const Result exact = together(t);
    t.tensor_bf16 = true;
    const Result rounded = together(t);
    const double apart = distance(rounded, exact);
    EXPECT_GT(apart, 1e-6) << title(t);
    EXPECT_LT(apart, 0.1) << title(t);
    EXPECT_LT(std::abs(rounded.losses.back() - exact.losses.back()), 0.01 * exact.losses.back()) << title(t);
  }
  Staged t = with(
      {.stage = {.stages = 2}, .dp = 2, .steps = 6, .scheme = "powersgd", .type = torch::kFloat32, .tp = 2});
  t.backward = {.columns = 2};
  const Result exact = together(t);
  t.tensor_bf16 = t.stage.bf16 = t.stage.bf16_sums = true;
  const Result rounded = together(t);
  EXPECT_GT(distance(rounded, exact), 1e-6);
  EXPECT_LT(distance(rounded, exact), 0.1);
  EXPECT_LT(std::abs(rounded.losses.back() - exact.losses.back()), 0.01 * exact.losses.back());
  // A run that goes on has the bits of one that did not stop.
  Saved saved;
  train_and_save(t, 3, saved);
  const Named resumed = load_and_train(t, saved, 3, t.steps);
  for (const auto& [name, value] : rounded.parameters)
    EXPECT_TRUE(torch::equal(resumed.at(name), value)) << name;
  // Control: without the factors with which the next step begins it has not.
  for (StateSnapshot& snapshot : saved.snapshots)
    std::erase_if(snapshot.rows, [](const auto& row) { return row.row.key.kind == "factor"; });
  EXPECT_GT(distance(load_and_train(t, saved, 3, t.steps), rounded.parameters), 0);
  Staged wide = with({.tp = 2});
  wide.tensor_bf16 = true;
  try {
    together(wide);
    ADD_FAILURE();
  } catch (const UsageError& error) {
    EXPECT_STREQ(error.what(),
                 "tensor parallel: what is rounded to bfloat16 between these ranks is float32, not float64");
  }
}

// Payload of each rank: sums of [tokens, width], twice a product, once for the table, and of the logits two values of
// each rank a token; never the logits themselves. Of two ranks an all-reduce sends as many values as it has.
TEST(TensorRanks, BytesAreTheFormula) {
  Staged t = with({.stage = {.stages = 1}, .dp = 1, .micro_batches = 2, .sequences = 8, .tp = 2});
  run_ranks(2, [&](World& world) {
    at::set_num_threads(1);
    world.plan_by({});
    const std::unique_ptr<Model> model = model_of(t, world.rank(), world.size());
    Replica replica(world.engine(), world.comm(), *model, options_of(t));
    walk(t, replica, 0, 0, 2);
    const std::int64_t tokens = 8 * kLength, width = 12;
    const std::int64_t products = 2 * t.layers + 1;  // attention and mlp, and the head
    const std::int64_t values = tokens * (width * (1 + 2 * t.layers) + width * products + 2 * 2);
    EXPECT_EQ(replica.job().tensor_sums()->step_bytes(), static_cast<std::uint64_t>(values * 8));
    EXPECT_EQ(replica.job().tensor_sums()->formula_bytes(), values * 8);
  });
}

TEST(TensorRanks, WhatCouldBeWrongIsSeen) {
  Staged t = with({.stage = {.stages = 2}, .dp = 2, .tp = 2});
  const Result right = together(t);
  EXPECT_GT(distance(right, alone(t, Wrong::loss_of_each)), 1e-6);
  EXPECT_GT(distance(right, alone(t, Wrong::twice_tied)), 1e-6);
  EXPECT_GT(distance(right, alone(t, Wrong::half_a_norm)), 1e-6);  // one rank's share of its gradient
}

// Of the tied table each tensor-parallel rank has other words: it is summed with those who have the same.
TEST(TensorRanks, TiedTablesAreSummedShardByShard) {
  for (const char* way : {"fused", "two-step", "hierarchical"}) {
    for (const int tp : {1, 2}) {
      Staged t = with({.stage = {.stages = 2, .tied_sum = way}, .dp = 2, .tp = tp});
      if (way == std::string("hierarchical")) t.node_ranks = 2 * tp;  // a node a stage
      const Result run = together(t);
      EXPECT_LT(distance(run, alone(t)), kSame) << way << ", tp " << tp;
      EXPECT_GT(distance(run, alone(t, Wrong::twice_tied)), 1e-6);  // divided by the copies
      EXPECT_GT(distance(run, alone(t, Wrong::no_tied)), 1e-6);     // lost on the way
      if (tp == 1) continue;
      EXPECT_GT(distance(run, alone(t, Wrong::mixed_tied)), 1e-6);  // summed with those of other words
    }
    if (way == std::string("hierarchical")) continue;
    // Beside stages whose other gradients are factors the copies stay the same (together() compares them), and are
    // the first step's of a run without.
    Staged factors =
        with({.stage = {.stages = 2, .tied_sum = way}, .dp = 2, .steps = 1, .type = torch::kFloat32});
    Staged dense = factors;
    factors.scheme = "powersgd";
    const char* const tied = "embedding.token.weight";
    EXPECT_TRUE(torch::equal(together(factors).parameters.at(tied), together(dense).parameters.at(tied)));
  }
}

TEST(TensorRanks, StagesThatAreNotCompressedHaveTheBitsOfDense) {
  Staged some = with({.stage = {.stages = 2, .compressed = 1}, .dp = 2, .steps = 1, .type = torch::kFloat32});
  Staged dense = some;
  some.scheme = "powersgd";
  const Named mine = together(some).parameters, all = together(dense).parameters;
  EXPECT_TRUE(torch::equal(mine.at("layer.3.mlp.up.weight"), all.at("layer.3.mlp.up.weight")));
  EXPECT_FALSE(torch::equal(mine.at("layer.0.mlp.up.weight"), all.at("layer.0.mlp.up.weight")));  // control
}

// Layers 1 and 3 have experts.
TEST(TensorRanks, SoDoTheirExperts) {
  Staged some = with({.model = "gpt-moe",
                      .stage = {.stages = 2, .compressed = 1},
                      .dp = 4,
                      .steps = 1,
                      .type = torch::kFloat32});
  some.ep = 2;
  Staged dense = some;
  some.scheme = "spardl";
  const Named mine = together(some).parameters, all = together(dense).parameters;
  const auto experts = [](int layer) { return "layer." + std::to_string(layer) + ".experts.up.weight"; };
  EXPECT_TRUE(torch::equal(mine.at(experts(3)), all.at(experts(3))));
  EXPECT_FALSE(torch::equal(mine.at(experts(1)), all.at(experts(1))));  // control
}

TEST(TensorRanks, SumsStandBehindProducts) {
  ModelOptions o = model_options("gpt", "tiny");
  o.tensor = {.ranks = 2};
  const ModelShape shape = rank_shape("gpt", o);
  int activations = 0, gradients = 0;
  for (const SumShape& sum : shape.sums) (sum.gradient ? gradients : activations) += 1;
  EXPECT_EQ(activations, 2 * o.layers + 2);
  EXPECT_EQ(gradients, 2 * o.layers + 1);
}

// ---- as processes ----

TEST(MeshProcesses, EqualOneProcess) {
  const std::unique_ptr<World> world = join_world();
  if (world->size() != 4) GTEST_SKIP() << "this test is launched as four processes";
  std::vector<Staged> meshes{with({.stage = {.stages = 4}}), with({.stage = {.stages = 2}, .dp = 2}),
                             with({.stage = {.stages = 2}, .tp = 2}), with({.stage = {.stages = 1}, .tp = 4}),
                             with({.stage = {.stages = 1}, .dp = 2, .tp = 2})};
  meshes[1].stage.schedule = "zb-h1";
  meshes[2].stage.schedule = "interleaved";
  meshes[2].stage.chunks = 2;
  for (Staged& t : meshes) {
    t.heads = 4;
    const RankResult mine = train_on(*world, t);
    Result here{.parameters = {}, .losses = mine.losses, .evaluated = mine.evaluated};
    for (std::size_t p = 0; p < mine.values.size(); ++p)
      here.parameters[mine.shapes[p].name] = mine.values[p];
    EXPECT_LT(distance(here, as_of_rank(mine, alone(t))), kSame) << title(t);
    t.steps -= 1;  // control
    here.losses.pop_back();
    EXPECT_GT(distance(here, as_of_rank(mine, alone(t))), 1e-6) << title(t);
  }
}

}  // namespace
}  // namespace weft
