// Parameters that several stages have: their sum at once and in two steps, what it sends, and which of them is taken.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "planner/plan.h"
#include "sim/data_parallel_job.h"
#include "weft/error.h"
#include "workload/model_shapes.h"

namespace weft {
namespace {

using data_parallel_test::Job;

constexpr int kCopies = 2;  // stages that have one

DataParallelOptions tied(int replicas, bool in_two) {
  DataParallelOptions out = data_parallel_test::options_of(1, ResidualRule::gres, replicas);
  out.scheme.name = "dense";
  out.scheme.all_reduce = "ring";
  if (in_two) out.rows_of = replicas;
  return out;
}

TEST(TiedSum, InTwoStepsIsThatAtOnce) {
  for (const int replicas : {1, 2, 4}) {
    const int ranks = kCopies * replicas;
    Job at_once(ranks, data_parallel_test::model(), tied(replicas, false)),
        in_two(ranks, data_parallel_test::model(), tied(replicas, true));
    DataParallelOptions halved = tied(replicas, true);
    halved.divisor = ranks;
    Job control(ranks, data_parallel_test::model(), halved);
    for (Job* job : {&at_once, &in_two, &control}) {
      job->fill_whole(3);
      ASSERT_EQ(job->step(), "");
    }
    for (std::size_t p = 0; p < at_once[0].outputs.size(); ++p) {
      for (std::size_t i = 0; i < at_once[0].outputs[p].size(); ++i) {
        float sum = 0;  // of whole numbers, so exact in any order; and divided by a power of two
        for (int r = 0; r < ranks; ++r) sum += at_once[r].gradients[p][i];
        for (int r = 0; r < ranks; ++r) {
          ASSERT_EQ(at_once[r].outputs[p][i], sum / static_cast<float>(replicas));
          ASSERT_EQ(in_two[r].outputs[p][i], sum / static_cast<float>(replicas));
        }
      }
    }
    EXPECT_NE(control[0].outputs, at_once[0].outputs) << "divided by the size of the group";
    // Other numbers are added in another order.
    for (Job* job : {&at_once, &in_two}) {
      job->fill([](int r, int p, std::int64_t i) {
        return std::sin(static_cast<float>(r * 31 + p * 7) + static_cast<float>(i));
      });
      ASSERT_EQ(job->step(), "");
    }
    for (std::size_t p = 0; p < at_once[0].outputs.size(); ++p) {
      for (std::size_t i = 0; i < at_once[0].outputs[p].size(); ++i)
        ASSERT_NEAR(at_once[0].outputs[p][i], in_two[0].outputs[p][i], 1e-6F * static_cast<float>(ranks));
    }
    for (int r = 1; r < ranks; ++r)
      EXPECT_EQ(in_two[r].outputs, in_two[0].outputs) << "the same bits everywhere";
  }
}

// By rings, of V values: V (2D-1)/D at once, V (3D-2)/D in two steps.
TEST(TiedSum, SendsWhatTheFormulasSay) {
  constexpr std::int64_t kValues = 64 * 40;
  for (const int replicas : {1, 2, 4, 8}) {
    for (const bool in_two : {false, true}) {
      Job job(kCopies * replicas, {{"table", kValues, 0, 64}}, tied(replicas, in_two));
      job.fill_whole(1);
      ASSERT_EQ(job.step(), "");
      const std::int64_t factor = in_two ? 3 * replicas - 2 : 2 * replicas - 1;
      for (int r = 0; r < job.size(); ++r)
        EXPECT_EQ(job[r].dp->sent_bytes(), static_cast<std::uint64_t>(4 * kValues * factor / replicas));
      EXPECT_EQ(job[0].dp->rows().front().bytes, static_cast<double>(4 * kValues * factor / replicas));
    }
  }
}

// A value that is not finite, on one rank of one stage, is everybody's.
TEST(TiedSum, NamesWhoIsToBlame) {
  Job job(4, {{"table", 100, 0, 10}}, tied(2, true));
  job.fill_whole(1);
  job[3].gradients[0][7] = std::numeric_limits<float>::infinity();
  static_cast<void>(job.step());
  for (int r = 0; r < 4; ++r) {
    EXPECT_FALSE(job[r].result.committed);
    EXPECT_NE(job[r].result.text.find("rank 3"), std::string::npos) << job[r].result.text;
  }
}

EmulationOptions emulation_of(const Mesh& mesh, const std::string& sum, const LinkCost& link) {
  EmulationOptions out;
  out.parallel.scheme.name = "powersgd";
  out.mesh = mesh;
  out.stage.tied_sum = sum;
  out.micro_batches = 2;
  out.planned_link = link;
  out.warmup = 1;
  out.steps = 2;
  return out;
}

PlanRow tied_row(const Mesh& mesh, const std::string& sum, const LinkCost& link,
                 std::int64_t vocabulary = 256) {
  ModelOptions sizes = model_options("gpt", "tiny");
  sizes.vocabulary = vocabulary;
  const Outline outline = outline_from_flops(model_shape("gpt", sizes), 64, 1e9);
  const Plan plan = make_tables(outline, emulation_of(mesh, sum, link), mesh.ranks());
  return *std::ranges::find(plan.rows, "tied", &PlanRow::strategy);
}

// By what they take: few values, whose hops count, in two steps of fewer; many at once.
TEST(TiedSum, IsTakenByItsCost) {
  const Mesh mesh{.dp = 3, .pp = 2};
  LinkCost link{.hop_seconds = 50e-6, .seconds_per_byte = 1e-8};
  const PlanRow fused = tied_row(mesh, "auto", link);
  EXPECT_TRUE(fused.why.find("auto: fused over 6 copies") != std::string::npos) << fused.why;
  EXPECT_EQ(fused.bytes, tied_row(mesh, "fused", link).bytes);
  EXPECT_LT(fused.bytes, tied_row(mesh, "two-step", link).bytes);
  for (const std::string sum : {"fused", "two-step", "auto"}) {
    const PlanRow row = tied_row(mesh, sum, link);
    EXPECT_EQ(row.divisor, 3);
    EXPECT_EQ(row.ranks, 6);
    EXPECT_EQ(row.scheme, "dense");
    EXPECT_LE(tied_row(mesh, "auto", link).seconds, row.seconds);
  }
  EXPECT_EQ(tied_row(mesh, "scheme", link).scheme, "powersgd");
  EXPECT_THROW(tied_row(mesh, "hierarchical", link), UsageError);  // no nodes are known
  link.node_ranks = 3;
  link.scale_up_seconds_per_byte = 1e-10;
  EXPECT_EQ(tied_row(mesh, "hierarchical", link).ranks, 6);
  EXPECT_THROW(tied_row(mesh, "some", link), UsageError);
  // Each tensor-parallel rank has a shard of the words: its group has none of another's.
  const PlanRow shard = tied_row({.dp = 2, .pp = 2, .tp = 2}, "two-step", {.seconds_per_byte = 1e-8});
  EXPECT_EQ(shard.ranks, 4);
  EXPECT_EQ(shard.count, 128 * 32);
}

TEST(TiedSum, WalksAndSendsItsFormulaBesideEveryScheme) {
  for (const Mesh& mesh : {Mesh{.dp = 2, .pp = 2}, Mesh{.dp = 4, .pp = 2}, Mesh{.dp = 2, .pp = 2, .tp = 2}}) {
    for (const char* sum : {"fused", "two-step", "auto"}) {
      for (const char* scheme : {"dense", "powersgd"}) {
        EmulationOptions options = emulation_of(mesh, sum, {.seconds_per_byte = 1e-8});
        options.parallel.scheme.name = scheme;
        SimulationOptions simulation;
        simulation.ranks = mesh.ranks();
        simulation.link.bytes_per_second = 1e8;
        const Outline outline = outline_from_flops(model_shape("gpt", model_options("gpt", "tiny")), 64, 1e9);
        for (const EmulatedSteps& rank : simulate_ranks(outline, options, simulation))
          EXPECT_EQ(rank.payload_bytes.back(), static_cast<double>(rank.formula_bytes))
              << mesh.text() << " " << sum << " " << scheme;
      }
    }
  }
}

}  // namespace
}  // namespace weft
