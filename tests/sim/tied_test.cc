// Parameters that several stages have: their sum at once, in two steps and inside nodes first, what it sends, and which
// of them is taken.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "data_parallel/formula.h"
#include "message_of.h"
#include "planner/plan.h"
#include "sim/data_parallel_job.h"
#include "step/strategies.h"
#include "transports/endpoint.h"
#include "weft/error.h"
#include "workload/model_shapes.h"
#include "workload/outline.h"
#include "world/mesh.h"
#include "world/sim_ranks.h"

namespace weft {
namespace {

using data_parallel_test::Job;
using data_parallel_test::Place;

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

// In nodes of so many ranks.
Place on_nodes(int node_ranks) {
  return [node_ranks](const Comm& world, std::vector<ParameterInfo>&) {
    LinkCost cost = world.cost();
    cost.node_ranks = node_ranks;
    world.endpoint().set_cost(cost);
    return world;
  };
}

// Inside nodes, then between them: the sum at once, of whole numbers to the bit; and as many bytes as that of a rank,
// V (2D-1)/D, most of which stay inside.
TEST(TiedSum, InsideNodesFirstIsThatAtOnce) {
  constexpr std::int64_t kValues = 64 * 40;
  const std::vector<ParameterInfo> table{{"table", kValues, 0, 64}};
  const auto waves = [](int r, int p, std::int64_t i) {
    return std::sin(static_cast<float>(r * 31 + p * 7) + static_cast<float>(i));
  };
  for (const int replicas : {1, 2, 4}) {
    const int ranks = kCopies * replicas;
    for (int node_ranks = 2; node_ranks <= ranks; node_ranks *= 2) {
      DataParallelOptions levels = tied(replicas, false);
      levels.scheme.all_reduce = "two_level";
      Job at_once(ranks, table, tied(replicas, false));
      Job inside_first(ranks, table, levels, 0, {.operation_timeout = 10s}, on_nodes(node_ranks));
      ASSERT_EQ(inside_first[0].dp->group().node_size(), node_ranks);
      for (Job* job : {&at_once, &inside_first}) {
        job->fill_whole(3);
        ASSERT_EQ(job->step(), "");
      }
      for (std::size_t i = 0; i < static_cast<std::size_t>(kValues); ++i) {
        float sum = 0;
        for (int r = 0; r < ranks; ++r) sum += at_once[r].gradients[0][i];
        for (int r = 0; r < ranks; ++r) {
          ASSERT_EQ(at_once[r].outputs[0][i], sum / static_cast<float>(replicas));
          ASSERT_EQ(inside_first[r].outputs[0][i], sum / static_cast<float>(replicas));
        }
      }
      const std::int64_t bytes = 4 * kValues * (2 * replicas - 1) / replicas;
      for (int r = 0; r < ranks; ++r) {
        EXPECT_EQ(inside_first[r].dp->sent_bytes(), static_cast<std::uint64_t>(bytes));
        EXPECT_EQ(formula_bytes(*inside_first[r].dp, ranks, {}, std::size_t{1} << 20), bytes);
      }
      // Other numbers are added in another order.
      for (Job* job : {&at_once, &inside_first}) {
        job->fill(waves);
        ASSERT_EQ(job->step(), "");
      }
      for (std::size_t i = 0; i < static_cast<std::size_t>(kValues); ++i)
        ASSERT_NEAR(inside_first[0].outputs[0][i], at_once[0].outputs[0][i],
                    1e-6F * static_cast<float>(ranks));
      for (int r = 1; r < ranks; ++r)
        EXPECT_EQ(inside_first[r].outputs, inside_first[0].outputs) << "the same bits everywhere";
      // Control: inside nodes first it was.
      EXPECT_EQ(inside_first[0].outputs != at_once[0].outputs, node_ranks < ranks) << node_ranks;
    }
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

// ---- controls: what goes wrong where the ranks that sum are others, or the divisor is ----

// Each of two tensor-parallel ranks has half of the words. Summed with those who have the same words the values are
// right. In one group with the others (as the released code has it) words of one half are added to words of the other.
TEST(TiedSum, IsOfTheRanksWithTheSameWords) {
  constexpr Mesh kMesh{.dp = 2, .pp = 2, .tp = 2};
  constexpr std::int64_t kWords = 24, kWidth = 5, kShare = kWords * kWidth / kMesh.tp;
  const auto gradient = [](int stage, int replica, std::int64_t value) {
    return static_cast<float>((stage * 31 + replica * 17 + value * (stage + 2) * (replica + 3)) % 64 - 20);
  };
  const auto of_rank = [&](int rank, int, std::int64_t i) {
    const Coordinates at = kMesh.coordinates(rank);
    return gradient(at.pp, at.dp, at.tp * kShare + i);
  };
  const Place same_words = [&](const Comm& world, std::vector<ParameterInfo>&) {
    std::vector<int> members;
    for (int r = 0; r < world.size(); ++r) {
      if (kMesh.coordinates(r).tp == kMesh.coordinates(world.rank()).tp) members.push_back(r);
    }
    return world.subgroup(members, 1);
  };
  const std::vector<ParameterInfo> share{{"table", kShare, 0, kWords / kMesh.tp}};
  const DataParallelOptions options = tied(kMesh.dp, false);
  const EngineOptions engine{.operation_timeout = 10s};
  Job right(kMesh.ranks(), share, options, 0, engine, same_words), mixed(kMesh.ranks(), share, options);
  for (Job* job : {&right, &mixed}) {
    job->fill(of_rank);
    ASSERT_EQ(job->step(), "");
  }
  for (int r = 0; r < kMesh.ranks(); ++r) {
    const int place = kMesh.coordinates(r).tp;
    std::vector<float> expected(kShare), of_all(kShare);
    for (std::int64_t i = 0; i < kShare; ++i) {
      for (int tp = 0; tp < kMesh.tp; ++tp) {
        float sum = 0;
        for (int stage = 0; stage < kMesh.pp; ++stage) {
          for (int replica = 0; replica < kMesh.dp; ++replica)
            sum += gradient(stage, replica, tp * kShare + i) / static_cast<float>(kMesh.dp);
        }
        if (tp == place) expected[static_cast<std::size_t>(i)] = sum;
        of_all[static_cast<std::size_t>(i)] += sum;
      }
    }
    EXPECT_EQ(right[r].outputs[0], expected) << r;
    EXPECT_EQ(mixed[r].outputs[0], of_all) << r;
    EXPECT_NE(of_all, expected) << r;
  }
  // A job says which words a rank has (JobStrategies): then such a group is refused.
  const auto refusal = [&](const Place& place) {
    Job job(kMesh.ranks(), share, options, 0, engine,
            [&](const Comm& world, std::vector<ParameterInfo>& parameters) {
              const std::int64_t words = kWords / kMesh.tp;
              parameters[0].shard =
                  Shard::range({kWords, kWidth}, 0, kMesh.coordinates(world.rank()).tp * words, words);
              return place(world, parameters);
            });
    job.fill(of_rank);
    return job.step();
  };
  EXPECT_NE(refusal([](const Comm& world, std::vector<ParameterInfo>&) {
              return world;
            }).find("has another plan of buckets"),
            std::string::npos);
  EXPECT_EQ(refusal(same_words), "");
}

// Left among the gradients of its stage the table is summed without the other stage's: the copies differ. A bucket that
// divides in front of its sum has divided it once more. Two sums of one gradient are refused.
TEST(TiedSum, IsNoneOfTheBucketsOfItsStage) {
  constexpr int kReplicas = 4, kRanks = kCopies * kReplicas;
  const std::vector<ParameterInfo> table{{"table", 120, 0, 12}};
  const Place own_stage = [](const Comm& world, std::vector<ParameterInfo>&) {
    std::vector<int> members;
    for (int r = 0; r < kReplicas; ++r) members.push_back(world.rank() / kReplicas * kReplicas + r);
    return world.subgroup(members, 1);
  };
  const DataParallelOptions options = tied(kReplicas, false);
  Job right(kRanks, table, options), divided(kRanks, table, options),
      left(kRanks, table, options, 0, {.operation_timeout = 10s}, own_stage);
  for (Job* job : {&right, &divided, &left}) job->fill_whole(3);
  for (int r = 0; r < kRanks; ++r) {
    for (float& value : divided[r].gradients[0]) value /= kReplicas;
  }
  for (Job* job : {&right, &divided, &left}) ASSERT_EQ(job->step(), "");
  for (int r = 0; r < kRanks; ++r) {
    EXPECT_EQ(right[r].outputs, right[0].outputs);
    EXPECT_NE(left[r].outputs, right[r].outputs) << r;
    std::vector<float> again = divided[r].outputs[0];
    for (float& value : again) value *= kReplicas;
    EXPECT_EQ(again, right[r].outputs[0]) << r;
    EXPECT_NE(divided[r].outputs, right[r].outputs) << r;
  }
  EXPECT_NE(left[0].outputs, left[kReplicas].outputs);

  SimRanks ranks(SimRanksOptions{});
  Engine& engine = ranks.engine(0);
  const ModelShape shape =
      chain_shape("table", {{.name = "head", .parameters = {{.name = "table", .dims = {12, 10}}}}});
  Strategies all(engine, engine.world(), shape, {});
  for (const char* name : {"data_parallel", "tied"}) {
    DataParallelOptions one = options;
    one.name = name;
    one.first_slot = all.next_slot(engine.world());
    all.add(std::make_unique<DataParallel>(engine, engine.world(), table, one, &all.state()));
  }
  EXPECT_NE(testing::message_of([&] { all.install(); }).find("two strategies take the gradient of 'table'"),
            std::string::npos);
  engine.shut_down(nullptr);
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
  const LinkCost far{.hop_seconds = 50e-6, .seconds_per_byte = 8e-9};
  const PlanRow few = tied_row(mesh, "auto", far, 64), many = tied_row(mesh, "auto", far, 4096);
  EXPECT_EQ(few.bytes, tied_row(mesh, "two-step", far, 64).bytes) << few.why;
  EXPECT_GT(few.bytes, tied_row(mesh, "fused", far, 64).bytes);
  EXPECT_EQ(many.bytes, tied_row(mesh, "fused", far, 4096).bytes) << many.why;
  EXPECT_NE(few.why.find("auto: in two steps"), std::string::npos) << few.why;
  EXPECT_NE(many.why.find("auto: fused over 6 copies"), std::string::npos) << many.why;
  EXPECT_EQ(tied_row(mesh, "scheme", link).scheme, "powersgd");
  EXPECT_THROW(tied_row(mesh, "hierarchical", link), UsageError);  // no nodes are known
  link.node_ranks = 3;
  link.scale_up_seconds_per_byte = 1e-10;
  EXPECT_EQ(tied_row(mesh, "hierarchical", link).ranks, 6);
  link.node_ranks = 6;
  EXPECT_THROW(tied_row(mesh, "hierarchical", link), UsageError);  // one node has all copies
  EXPECT_THROW(tied_row(mesh, "some", link), UsageError);
  // Each tensor-parallel rank has a shard of the words: its group has none of another's.
  const PlanRow shard = tied_row({.dp = 2, .pp = 2, .tp = 2}, "two-step", {.seconds_per_byte = 1e-8});
  EXPECT_EQ(shard.ranks, 4);
  EXPECT_EQ(shard.count, 128 * 32);
}

TEST(TiedSum, WalksAndSendsItsFormulaBesideEveryScheme) {
  for (const Mesh& mesh : {Mesh{.dp = 2, .pp = 2}, Mesh{.dp = 4, .pp = 2}, Mesh{.dp = 2, .pp = 2, .tp = 2}}) {
    for (const char* sum : {"fused", "two-step", "hierarchical", "auto"}) {
      for (const char* scheme : {"dense", "powersgd"}) {
        LinkCost link{.seconds_per_byte = 1e-8};
        SimulationOptions simulation;
        if (sum == std::string("hierarchical")) {  // a node a stage
          simulation.link.nodes = mesh.pp;
          link.node_ranks = mesh.dp * mesh.tp;
        }
        EmulationOptions options = emulation_of(mesh, sum, link);
        options.parallel.scheme.name = scheme;
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

// Of a table of V bytes 2 V (P-1)/P leave a node by a ring of all copies, inside nodes first 2 V (nodes-1)/nodes.
TEST(TiedSum, InsideNodesFirstLeavesThemLeast) {
  const Mesh mesh{.dp = 4, .pp = 2};
  ModelOptions sizes = model_options("gpt", "tiny");
  const Outline outline = outline_from_flops(model_shape("gpt", sizes), 64, 1e9);
  const double table = 4.0 * static_cast<double>(sizes.vocabulary * sizes.width);
  for (const int nodes : {2, 4}) {
    std::vector<std::vector<double>> ports;  // of fused and inside nodes first, of each node
    for (const char* sum : {"fused", "hierarchical"}) {
      EmulationOptions options = emulation_of(mesh, sum, {.node_ranks = mesh.ranks() / nodes});
      options.parallel.scheme.name = "dense";
      options.parallel.scheme.all_reduce = "ring";
      SimulationOptions simulation;
      simulation.ranks = mesh.ranks();
      simulation.link = {.bytes_per_second = 1e8, .nodes = nodes};
      const std::vector<EmulatedSteps> ranks = simulate_ranks(outline, options, simulation);
      std::vector<double>& port = ports.emplace_back(nodes);
      for (std::size_t r = 0; r < ranks.size(); ++r)
        port[r * static_cast<std::size_t>(nodes) / ranks.size()] += ranks[r].scale_out_bytes.back();
    }
    const double ring = 2 * table * (mesh.ranks() - 1) / mesh.ranks();
    for (int node = 0; node < nodes; ++node) {
      const auto n = static_cast<std::size_t>(node);
      EXPECT_EQ(ports[0][n] - ports[1][n], ring - 2 * table * (nodes - 1) / nodes) << nodes << ", " << node;
    }
  }
}

}  // namespace
}  // namespace weft
