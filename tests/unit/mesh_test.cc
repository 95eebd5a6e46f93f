// Layouts of ranks: every mesh of up to 64 ranks, and what is refused.
#include "world/mesh.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "weft/error.h"

namespace weft {
namespace {

static_assert(Mesh{.dp = 4, .pp = 2, .tp = 3}.rank_of({.dp = 3, .pp = 1, .tp = 2}) == 23);
static_assert(Mesh{.dp = 4, .pp = 2, .tp = 3}.rank_of({.dp = 1}) == 3);  // tp is fastest
static_assert(Mesh{.dp = 4, .pp = 2, .tp = 3}.ranks() == 24);

std::vector<Mesh> meshes_up_to(int most) {
  std::vector<Mesh> out;
  for (int dp = 1; dp <= most; ++dp) {
    for (int pp = 1; dp * pp <= most; ++pp) {
      for (int tp = 1; dp * pp * tp <= most; ++tp) {
        for (int ep = 1; ep <= dp; ++ep) {
          if (dp % ep == 0) out.push_back({.dp = dp, .pp = pp, .tp = tp, .ep = ep});
        }
      }
    }
  }
  return out;
}

TEST(Mesh, AllOfANumberOfRanksAreThereOnce) {
  for (int ranks = 1; ranks <= 64; ++ranks) {
    std::vector<Mesh> expected = meshes_up_to(ranks);
    std::erase_if(expected, [&](const Mesh& mesh) { return mesh.ranks() != ranks; });
    const std::vector<Mesh> all = all_meshes(ranks);
    ASSERT_EQ(all.size(), expected.size()) << ranks;
    EXPECT_TRUE(std::ranges::is_permutation(all, expected)) << ranks;
    EXPECT_EQ(all.front(), Mesh{.dp = ranks}) << ranks;
  }
}

TEST(Mesh, CoordinatesAndRanksGoBothWays) {
  for (const Mesh& mesh : meshes_up_to(64)) {
    for (int rank = 0; rank < mesh.ranks(); ++rank) {
      const Coordinates at = mesh.coordinates(rank);
      ASSERT_EQ(mesh.rank_of(at), rank) << mesh.text();
      ASSERT_EQ(at.dp, at.expert_dp * mesh.ep + at.ep) << mesh.text();
      for (const Axis axis : kAxes) {
        const int of[] = {at.dp, at.pp, at.tp, at.ep, at.expert_dp};
        ASSERT_TRUE(of[static_cast<std::size_t>(axis)] >= 0 &&
                    of[static_cast<std::size_t>(axis)] < mesh.size(axis))
            << mesh.text();
      }
    }
  }
}

// "" if along the axis every rank is in exactly one group, its own.
std::string wrong_groups(const Mesh& mesh, Axis axis) {
  std::vector<int> times(static_cast<std::size_t>(mesh.ranks()), 0);
  for (int rank = 0; rank < mesh.ranks(); ++rank) {
    const std::vector<int> members = mesh.members(axis, rank);
    if (std::find(members.begin(), members.end(), rank) == members.end()) return "not among its own group";
    if (static_cast<int>(members.size()) != mesh.size(axis)) return "a group of another size";
    if (!std::is_sorted(members.begin(), members.end())) return "not in order";
    for (const int member : members) {
      if (mesh.members(axis, member) != members) return "members disagree";
    }
    if (members.front() == rank) {
      for (const int member : members) ++times[static_cast<std::size_t>(member)];
    }
  }
  return std::all_of(times.begin(), times.end(), [](int t) { return t == 1; }) ? "" : "no partition";
}

TEST(Mesh, GroupsAlongEveryAxisPartitionTheWorld) {
  for (const Mesh& mesh : meshes_up_to(64)) {
    for (const Axis axis : kAxes) {
      ASSERT_EQ(wrong_groups(mesh, axis), "") << mesh.text() << " along " << name_of(axis);
    }
  }
  // Control: a mesh whose parts do not fit together is seen.
  EXPECT_NE(wrong_groups({.dp = 6, .ep = 4}, Axis::ep), "");
}

TEST(Mesh, GroupsByHand) {
  using Ranks = std::vector<int>;
  const Mesh mesh{.dp = 4, .pp = 2, .tp = 2, .ep = 2};
  // Rank 5 of 16: stage 0, third of the data-parallel ranks, second tensor part.
  EXPECT_EQ(mesh.coordinates(5), (Coordinates{.dp = 2, .pp = 0, .tp = 1, .ep = 0, .expert_dp = 1}));
  EXPECT_EQ(mesh.members(Axis::dp, 5), (Ranks{1, 3, 5, 7}));
  EXPECT_EQ(mesh.members(Axis::pp, 5), (Ranks{5, 13}));
  EXPECT_EQ(mesh.members(Axis::tp, 5), (Ranks{4, 5}));
  EXPECT_EQ(mesh.members(Axis::ep, 5), (Ranks{5, 7}));
  EXPECT_EQ(mesh.members(Axis::expert_dp, 5), (Ranks{1, 5}));
}

TEST(Mesh, TextGoesBothWays) {
  for (const Mesh& mesh : meshes_up_to(24)) {
    EXPECT_EQ(parse_mesh(mesh.text(), mesh.ranks()), mesh) << mesh.text();
  }
  EXPECT_EQ(parse_mesh("", 6), (Mesh{.dp = 6}));
  EXPECT_EQ(parse_mesh("dp=4", 4), (Mesh{.dp = 4}));
  EXPECT_EQ(parse_mesh("tp=2,pp=3", 24), (Mesh{.dp = 4, .pp = 3, .tp = 2}));
  EXPECT_EQ(parse_mesh("ep=4,tp=1,dp=8", 8), parse_mesh("dp=8,ep=4", 8));
  EXPECT_EQ(parse_mesh("", 1).text(), "dp=1");
}

std::string refusal(std::string_view text, int ranks) {
  try {
    return "accepted: " + parse_mesh(text, ranks).text();
  } catch (const UsageError& e) {
    return e.what();
  }
}

TEST(Mesh, WhatIsImpossibleIsRefusedInOneSentence) {
  EXPECT_EQ(refusal("dp=2,xp=2", 4), "mesh 'dp=2,xp=2': there is no axis 'xp'; axes are dp, pp, tp and ep");
  EXPECT_EQ(refusal("expert-dp=2", 4),
            "mesh 'expert-dp=2': there is no axis 'expert-dp'; axes are dp, pp, tp and ep");
  EXPECT_EQ(refusal("dp=2,dp=2", 4), "mesh 'dp=2,dp=2': axis dp is named twice");
  EXPECT_EQ(refusal("dp=3", 4), "mesh 'dp=3': dp=3 times pp=1 times tp=1 is not the number of ranks, 4");
  EXPECT_EQ(refusal("pp=3", 4), "mesh 'pp=3': dp=1 times pp=3 times tp=1 is not the number of ranks, 4");
  EXPECT_EQ(refusal("pp=2147483647,tp=2147483647,dp=2147483647", 4),
            "mesh 'pp=2147483647,tp=2147483647,dp=2147483647': dp=2147483647 times pp=2147483647 times "
            "tp=2147483647 is not the number of ranks, 4");
  EXPECT_EQ(refusal("dp=6,ep=4", 6),
            "mesh 'dp=6,ep=4': ep=4 does not divide dp=6: expert groups are equal parts of the data-parallel "
            "ranks");
  EXPECT_EQ(refusal("pp=2,ep=4", 4),
            "mesh 'pp=2,ep=4': ep=4 does not divide dp=2: expert groups are equal parts of the data-parallel "
            "ranks");
  for (const char* word : {"dp", "dp=", "dp=0", "dp=-2", "dp=2x", "dp= 2", "dp=99999999999"}) {
    EXPECT_EQ(refusal(word, 4),
              "mesh '" + std::string(word) + "': '" + word + "' is no axis and its size, as dp=4 is");
  }
  EXPECT_EQ(refusal("dp=4,", 4), "mesh 'dp=4,': it ends with a comma");
  EXPECT_EQ(refusal(",dp=4", 4), "mesh ',dp=4': there is no axis ''; axes are dp, pp, tp and ep");
  EXPECT_EQ(refusal("dp=1", 0), "mesh 'dp=1': a mesh has at least one rank");
}

TEST(Mesh, NodesAreConsecutiveRanks) {
  const Mesh mesh{.dp = 4, .pp = 2, .tp = 2, .ep = 2};
  EXPECT_EQ(ranks_of_node(mesh, 5, 4), (std::vector<int>{4, 5, 6, 7}));
  EXPECT_TRUE(within_nodes(mesh, Axis::tp, 2));
  EXPECT_TRUE(within_nodes(mesh, Axis::ep, 4));
  EXPECT_TRUE(within_nodes(mesh, Axis::dp, 8));
  EXPECT_FALSE(within_nodes(mesh, Axis::dp, 4));
  EXPECT_FALSE(within_nodes(mesh, Axis::expert_dp, 4));
  EXPECT_FALSE(within_nodes(mesh, Axis::pp, 8));
  EXPECT_THROW(ranks_of_node(mesh, 0, 3), UsageError);
  EXPECT_THROW(ranks_of_node(mesh, 0, 0), UsageError);
}

}  // namespace
}  // namespace weft
