// All four systems in one step, with a real model: experts that ranks share, a table of which rows travel, stages whose
// gradients travel as factors, thin or sparse gradients; bytes of each by its formula, and runs that go on.
#include <gtest/gtest.h>

#include "data_parallel/formula.h"
#include "pipeline/pipeline.h"
#include "torch/mesh_toy.h"

namespace weft {
namespace {

using namespace mesh_test;

Staged all_four(const char* scheme, bool tied) {
  Staged t = with({.model = "gpt-moe", .stage = {.stages = 2}, .dp = 4, .type = torch::kFloat32});
  t.ep = 4;
  t.scheme = scheme;
  t.backward = {.columns = 2};
  if (!tied) t.tables = "embrace";
  return t;
}

// What the ranks have sent, strategy by strategy, and all of it.
TEST(AllFour, BytesAreTheSumOfTheFormulas) {
  for (const bool tied : {false, true}) {
    const Staged t = all_four("dense", tied);
    run_ranks(t.ranks(), [&](World& world) {
      at::set_num_threads(1);
      world.plan_by({});
      const std::unique_ptr<Model> model = model_of(t, world.rank(), world.size());
      Replica replica(world.engine(), world.comm(), *model, options_of(t));
      JobStrategies& job = replica.job();
      walk(t, replica, job.mesh().coordinates(world.rank()).dp, 0, 3);
      const auto bytes = [](std::int64_t formula) { return static_cast<std::uint64_t>(formula); };
      EXPECT_EQ(job.pipeline()->step_bytes(), bytes(job.pipeline()->formula_bytes()));
      EXPECT_GT(job.pipeline()->step_bytes(), 0u);
      EXPECT_EQ(job.experts()->step_bytes(), bytes(job.experts()->formula_bytes()));
      const bool first = model->options().stage.stage == 0;
      std::int64_t of_tables = 0;
      for (const HybridEmbedding* tables : job.hybrids())
        of_tables += tables->formula_bytes(world.comm().cost());
      EXPECT_EQ(of_tables > 0, first && !tied);  // only the first stage looks up
      EXPECT_EQ(job.table_bytes(), bytes(of_tables));
      // Sums of gradients: of the busiest rank, which differs from bucket to bucket.
      const std::uint64_t gradients =
          job.sent_bytes() - job.pipeline()->step_bytes() - job.experts()->step_bytes();
      const std::int64_t all = job.formula_bytes(world.comm().cost(), world.comm().micro_op_bytes());
      const std::int64_t of_gradients =
          all - of_tables - job.pipeline()->formula_bytes() - job.experts()->formula_bytes();
      EXPECT_LE(gradients, bytes(of_gradients));
      EXPECT_GE(static_cast<double>(gradients), 0.95 * static_cast<double>(of_gradients));
    });
  }
}

// Equal to the same mesh without anything lossy; what is lossy stays near it for some steps.
TEST(AllFour, TrainsBesideWhatLosesNothing) {
  for (const bool tied : {false, true}) {
    Staged exact = all_four("dense", tied);
    exact.backward = {};
    exact.type = torch::kFloat64;
    Staged other = exact;
    other.stage.stages = 1;
    EXPECT_LT(distance(together(exact), together(other)), kSame) << "stages change nothing";
    const Result dense = together(exact);
    for (const char* scheme : {"spardl", "powersgd"}) {
      const Result lossy = together(all_four(scheme, tied));
      ASSERT_EQ(lossy.losses.size(), dense.losses.size());
      EXPECT_NEAR(lossy.losses.front(), dense.losses.front(), 1e-5);
      EXPECT_NEAR(lossy.losses.back(), dense.losses.back(), 0.2) << scheme;
      EXPECT_NE(lossy.losses.back(), dense.losses.back());  // control: it is not the dense run
    }
  }
}

// Saved on any mesh of as many data-parallel ranks (capacity is of a micro-batch's tokens), loaded on any other.
TEST(AllFour, StateMovesToOtherMeshes) {
  const auto mesh = [](int pp, int tp, int ep) {
    Staged t = with({.model = "gpt-moe", .stage = {.stages = pp}, .dp = 2, .micro_batches = 2});
    t.ep = ep;
    t.tp = tp;
    t.steps = 3;
    return t;
  };
  const std::vector<Staged> meshes{mesh(1, 1, 1), mesh(2, 1, 2), mesh(1, 2, 2), mesh(2, 2, 1)};
  const Named expected = together(meshes.front()).parameters;
  for (const Staged& from : meshes) {
    Saved saved;
    train_and_save(from, 2, saved);
    for (const Staged& to : meshes)
      EXPECT_LT(distance(load_and_train(to, saved, 2, 3), expected), kSame)
          << title(from) << " to " << title(to);
    EXPECT_GT(distance(load_and_train(from, saved, 1, 2), expected), 1e-6);  // control: another step's batch
  }
}

TEST(AllFour, ResumeHasTheSameBits) {
  for (const bool tied : {false, true}) {
    Staged t = all_four("spardl", tied);
    t.steps = 5;
    const Named straight = together(t).parameters;
    Saved saved;
    train_and_save(t, 3, saved);
    const Named resumed = load_and_train(t, saved, 3, 5);
    for (const auto& [name, value] : straight) EXPECT_TRUE(torch::equal(resumed.at(name), value)) << name;
    const Named fewer = load_and_train(t, saved, 3, 4);
    EXPECT_FALSE(torch::equal(fewer.at("layer.0.attention.norm.weight"),
                              straight.at("layer.0.attention.norm.weight")));  // control
  }
}

}  // namespace
}  // namespace weft
