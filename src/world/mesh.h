// Mesh: how the ranks of a job are laid out along axes, and which of them form a group.
//
//   dp  data parallel     different data, the same parameters (but for experts)
//   pp  pipeline          consecutive stages of the model
//   tp  tensor parallel   parts of every matrix
//   ep  experts           parts of the data-parallel ranks that hold different experts; `ep` divides `dp`
//
// dp * pp * tp is the number of ranks. tp varies fastest, then dp, pp slowest:
//
//   rank = (pp_coordinate * dp + dp_coordinate) * tp + tp_coordinate
//
// because tensor parallel ranks exchange most and wait for it, so they are neighbours on a node, and stages
// exchange least. An expert group is `ep` data-parallel neighbours: its place in dp is
// dp_coordinate = replica * ep + ep_coordinate, and all dp / ep replicas of an expert (equal pp, tp and ep
// coordinate) are the ranks over which its gradient is summed: the expert-data-parallel group.
//
// Pure arithmetic: a mesh is the same value on all ranks, and nothing is sent to make one.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "weft/comm.h"
#include "weft/world.h"

namespace weft {

enum class Axis : std::uint8_t { dp, pp, tp, ep, expert_dp };
// Along each of these the groups cut the world into parts of equal size.
inline constexpr std::array kAxes{Axis::dp, Axis::pp, Axis::tp, Axis::ep, Axis::expert_dp};
// "dp", "pp", "tp", "ep", "expert-dp".
std::string_view name_of(Axis axis);

// A rank's place; `expert_dp` is which replica of its experts it holds. dp = expert_dp * ep size + ep.
struct Coordinates {
  int dp = 0;
  int pp = 0;
  int tp = 0;
  int ep = 0;
  int expert_dp = 0;
  friend constexpr bool operator==(const Coordinates&, const Coordinates&) = default;
};

struct Mesh {
  int dp = 1;
  int pp = 1;
  int tp = 1;
  int ep = 1;
  friend constexpr bool operator==(const Mesh&, const Mesh&) = default;

  constexpr int ranks() const { return dp * pp * tp; }
  // Ranks in a group along the axis.
  int size(Axis axis) const;
  // REQUIRES: 0 <= rank < ranks().
  Coordinates coordinates(int rank) const;
  // Of dp, pp and tp; the others follow from dp. REQUIRES: within the mesh.
  constexpr int rank_of(const Coordinates& at) const { return (at.pp * dp + at.dp) * tp + at.tp; }
  // The ranks of `rank`'s group along the axis, in order of their coordinate (which is ascending).
  std::vector<int> members(Axis axis, int rank) const;
  // "dp=4,pp=2"; axes of size 1 are left out, but for a mesh of one rank ("dp=1").
  std::string text() const;
};

// "dp=4,pp=2" in any order; what is not named is 1, but dp, which is what the other axes leave of `ranks`.
// An empty text is a mesh of data-parallel ranks alone. Throws UsageError of one sentence for an unknown or
// repeated axis, a size that is no positive number, a product that is not `ranks`, ep that does not divide
// dp.
Mesh parse_mesh(std::string_view text, int ranks);

// Every mesh of so many ranks: those along dp alone first, then by pp, tp and ep. REQUIRES: at least one rank.
std::vector<Mesh> all_meshes(int ranks);

// Which ranks share `rank`'s node where each node has `ranks_per_node` of them, in order.
// Throws UsageError if there are not as many on every node.
std::vector<int> ranks_of_node(const Mesh& mesh, int rank, int ranks_per_node);
// Whether the groups along the axis stay within nodes.
bool within_nodes(const Mesh& mesh, Axis axis, int ranks_per_node);

// This rank's group along an axis, as a group of its own also where it is the whole world or has the members
// of another axis: slots of two strategies never meet. Called by all ranks of the group; nothing is sent.
// `layout`: which of several that the job has one after the other; groups of two never are the same.
Comm axis_group(const Comm& world, const Mesh& mesh, Axis axis, std::uint32_t layout = 0);
inline Comm axis_group(World& world, const Mesh& mesh, Axis axis) {
  return axis_group(world.comm(), mesh, axis);
}

}  // namespace weft
