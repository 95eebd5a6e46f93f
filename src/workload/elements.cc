#include "workload/elements.h"

#include "embedding/options.h"
#include "embedding/ways.h"
#include "workload/model_shapes.h"
#include "workload/step_parts.h"
#include "workload/train_options.h"

namespace weft {

namespace {

// Ranks among which a table of this way is cut.
int holders_of(const TableWay& way, const TablesOptions& options, int ranks) {
  if (way.kind != TableWay::Kind::hybrid) return 1;
  switch (way.cut) {
    case TableCut::columns:
      return ranks;
    case TableCut::rows:
      return hybrid_options(way, options, ranks).owners;
    case TableCut::none:
    case TableCut::pushed:
      return 1;
  }
  return 1;
}

// What the ranks of one replica have; the others have the same.
template <class ShapeOf>
RankElements of_all(const Mesh& mesh, const TablesOptions& options, ShapeOf shape_of) {
  RankElements out;
  const std::int64_t replicas = mesh.dp / mesh.ep;
  for (int pp = 0; pp < mesh.pp; ++pp) {
    for (int ep = 0; ep < mesh.ep; ++ep) {
      for (int tp = 0; tp < mesh.tp; ++tp) {
        const RankElements one =
            elements_of_rank(shape_of(mesh.rank_of({.dp = ep, .pp = pp, .tp = tp})), options, mesh.dp);
        out.dense += replicas * one.dense;
        out.held += replicas * one.held;
      }
    }
  }
  return out;
}

}  // namespace

RankElements elements_of_rank(const ModelShape& shape, const TablesOptions& options, int data_ranks) {
  const TableWays ways(options.way);
  RankElements out;
  for (const ParameterShape& p : shape.parameters) {
    const TableWay& way = ways.of(p.name);
    const int holders = p.table ? holders_of(way, options, data_ranks) : 1;
    const bool held = p.table && way.kind == TableWay::Kind::hybrid;
    (held ? out.held : out.dense) += (p.count() + holders - 1) / holders;
  }
  return out;
}

RankElements elements_of_ranks(const Outline& outline, const EmulationOptions& options, int ranks) {
  EmulationOptions on_mesh = options;
  if (options.mesh.ranks() == 1) on_mesh.mesh = {.dp = ranks, .ep = options.experts.ranks};
  const Mesh& mesh = on_mesh.mesh;
  return of_all(mesh, options.tables, [&](int rank) {
    const ExpertLayout layout{
        .slices = options.experts.slices, .ranks = mesh.ep, .rank = mesh.coordinates(rank).ep};
    return rank_model(outline, on_mesh, layout, rank).shape;
  });
}

RankElements elements_of_ranks(std::string_view model, const ModelOptions& sizes,
                               const TablesOptions& options, int ranks) {
  return of_all(mesh_of(sizes, ranks), options,
                [&](int rank) { return rank_shape(model, with_rank(sizes, rank, ranks)); });
}

}  // namespace weft
