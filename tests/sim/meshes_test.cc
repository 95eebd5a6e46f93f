// Which mesh of so many ranks is fastest: what is predicted of each alone says so.
#include "planner/meshes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "workload/model_shapes.h"
#include "world/calibrate.h"

namespace weft {
namespace {

constexpr int kRanks = 8;
constexpr std::int64_t kTokens = 256;  // of a step, of all ranks

struct Network {
  double bytes_per_second = 0;
  int nodes = 0;
};

SimulationOptions over(const Network& network) {
  SimulationOptions out;
  out.ranks = kRanks;
  out.link = {.bytes_per_second = network.bytes_per_second,
              .latency_seconds = 20e-6,
              .nodes = network.nodes,
              .scale_up_bytes_per_second = network.nodes > 0 ? 100 * network.bytes_per_second : 0};
  return out;
}

MeshCase case_of(const Mesh& mesh, double flops_per_second, const Network& network) {
  ModelOptions sizes = model_options("gpt", "tiny");
  sizes.width = 64;
  sizes.heads = 4;
  sizes.layers = 4;
  MeshCase out;
  out.outline = outline_from_flops(model_shape("gpt", sizes), kTokens / mesh.dp, flops_per_second);
  out.emulation.mesh = mesh;
  out.emulation.parallel.scheme.name = "dense";
  LinkCost& link = out.emulation.planned_link.emplace();
  link.hop_seconds = 20e-6;
  link.seconds_per_byte = 1 / network.bytes_per_second;
  set_nodes(link, kRanks, network.nodes, 0, 100 * network.bytes_per_second);
  out.emulation.micro_batches = mesh.pp > 1 ? 4 : 1;
  return out;
}

// Those of a model with 4 layers and 4 heads.
std::vector<MeshCase> cases_of(double flops_per_second, const Network& network) {
  std::vector<MeshCase> out;
  for (const Mesh& mesh : all_meshes(kRanks)) {
    if (mesh.pp <= 4 && mesh.tp <= 4 && mesh.ep == 1) out.push_back(case_of(mesh, flops_per_second, network));
  }
  return out;
}

// Of a tied table two stages have a copy; of what is not cut, every tensor-parallel rank. By the whole model's parameters
// alone: of a real model and of its outline the same.
TEST(Meshes, RanksHaveTheirShareOfTheElements) {
  ModelOptions sizes = model_options("gpt", "tiny");
  sizes.layers = 4;
  sizes.heads = 4;
  const ModelShape whole = model_shape("gpt", sizes);
  const std::int64_t all = whole.num_elements(), table = whole.parameters.front().count();
  std::int64_t cut = 0;  // that tensor-parallel ranks share
  for (const ParameterShape& p : whole.parameters) {
    const bool matrix = p.dims.size() == 2 && !p.name.ends_with("position.weight");
    const bool inside = p.name.ends_with("heads.bias") || p.name.ends_with("up.bias");
    cut += matrix || inside ? p.count() : 0;
  }
  struct Case {
    Mesh mesh;
    std::int64_t elements;
  };
  for (const Case& c : {Case{{.dp = 8}, 8 * all}, Case{{.dp = 2, .pp = 4}, 2 * (all + table)},
                        Case{{.pp = 2}, all + table}, Case{{.dp = 3, .tp = 2}, 3 * (cut + 2 * (all - cut))},
                        Case{{.dp = 2, .pp = 2, .tp = 4}, 2 * (cut + table + 4 * (all - cut))}}) {
    const int ranks = c.mesh.ranks();
    EmulationOptions emulation;
    emulation.mesh = c.mesh;
    const Outline outline = outline_from_flops(whole, 64, 1e9);
    EXPECT_EQ(elements_of_ranks(outline, emulation, ranks).all(), c.elements) << ranks;
    ModelOptions on_mesh = sizes;
    on_mesh.stage.stages = c.mesh.pp;
    on_mesh.tensor.ranks = c.mesh.tp;
    EXPECT_EQ(elements_of_ranks("gpt", on_mesh, {}, ranks).all(), c.elements) << ranks;
  }
}

TEST(Meshes, TheBestAreThoseOfWhichEachAloneIsFastest) {
  for (const Network& network : {Network{1e9}, Network{2e7, 2}}) {
    const std::vector<MeshCase> cases = cases_of(20e9, network);
    ASSERT_EQ(cases.size(), 8u);  // 1, 2, 4 stages and tensor-parallel ranks, but for 4 of both
    std::vector<std::pair<double, std::string>> alone;
    for (const MeshCase& mesh : cases) {
      const double step = predict(mesh.outline, mesh.emulation, over(network)).step_seconds;
      alone.emplace_back(step, mesh.emulation.mesh.text());
      // What may leave one out is a bound, and no empty one: some mesh computes for most of its step.
      EXPECT_LE(least_step_seconds(mesh), step * (1 + 1e-6)) << mesh.emulation.mesh.text();
    }
    std::ranges::stable_sort(alone, {}, &std::pair<double, std::string>::first);
    for (const int most : {1, 3}) {
      const MeshesChoice chosen = compare_meshes(cases, over(network), most);
      ASSERT_EQ(chosen.best.size(), static_cast<std::size_t>(most));
      for (std::size_t i = 0; i < chosen.best.size(); ++i) {
        EXPECT_EQ(chosen.best[i].mesh.text(), alone[i].second) << network.bytes_per_second << " " << most;
        EXPECT_EQ(chosen.best[i].prediction.step_seconds, alone[i].first);
        EXPECT_FALSE(chosen.best[i].why.empty());
      }
    }
  }
}

// Where computation is what takes long, most are left out unseen; where all are wanted, none.
TEST(Meshes, WhatCannotBeAmongThemIsNotPredicted) {
  const std::vector<MeshCase> cases = cases_of(1e8, {1e9});
  EXPECT_GT(compare_meshes(cases, over({1e9}), 1).left_out, 0);
  EXPECT_EQ(compare_meshes(cases, over({1e9}), 8).left_out, 0);
  double closest = 0;
  for (const MeshCase& mesh : cases)
    closest = std::max(
        closest, least_step_seconds(mesh) / predict(mesh.outline, mesh.emulation, over({1e9})).step_seconds);
  EXPECT_GT(closest, 0.9);  // control: were the bound any higher it would be none
}

TEST(Meshes, SayWhatLimitsThem) {
  std::map<std::string, std::string> why;
  std::map<std::string, RankElements> elements;
  for (const PlannedMesh& mesh : compare_meshes(cases_of(50e9, {1e6, 2}), over({1e6, 2}), 8).best) {
    why[mesh.mesh.text()] = mesh.why;
    elements[mesh.mesh.text()] = mesh.elements;
  }
  EXPECT_TRUE(why["dp=8"].starts_with("sums of gradients leave the node: ")) << why["dp=8"];
  EXPECT_TRUE(why["dp=2,pp=4"].starts_with("sums of what stages share leave the node: ")) << why["dp=2,pp=4"];
  // Four stages, with copies of the table at both ends, have more than a quarter, and less than half.
  EXPECT_LT(elements["dp=2,pp=4"].all(), elements["dp=8"].all() / 2);
  EXPECT_GT(elements["dp=2,pp=4"].all(), elements["dp=8"].all() / 4);
  why.clear();
  for (const PlannedMesh& mesh : compare_meshes(cases_of(1e8, {1e9}), over({1e9}), 8).best)
    why[mesh.mesh.text()] = mesh.why;
  EXPECT_TRUE(why["dp=8"].starts_with("a rank computes for ")) << why["dp=8"];
  EXPECT_TRUE(why["dp=2,pp=4"].starts_with("4 stages over 4 micro-batches are idle for "))
      << why["dp=2,pp=4"];
}

}  // namespace
}  // namespace weft
