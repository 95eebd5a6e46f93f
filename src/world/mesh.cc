#include "world/mesh.h"

#include <algorithm>
#include <charconv>
#include <optional>

#include "weft/error.h"

namespace weft {

namespace {

constexpr std::array<std::string_view, kAxes.size()> kNames{"dp", "pp", "tp", "ep", "expert-dp"};
// Labels of axes; other subgroups of the world have small ones.
constexpr std::uint32_t kFirstLabel = 0x6d65'7368u;  // "mesh"

constexpr std::size_t kWritten = 4;  // axes that a text may name
using Sizes = std::array<std::optional<int>, kWritten>;

[[noreturn]] void refuse(std::string_view text, const std::string& why) {
  throw UsageError("mesh '" + std::string(text) + "': " + why);
}

int parse_size(std::string_view text, std::string_view word, std::string_view digits) {
  int size = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), size);
  if (error != std::errc() || end != digits.data() + digits.size() || size < 1)
    refuse(text, "'" + std::string(word) + "' is no axis and its size, as dp=4 is");
  return size;
}

Sizes parse_sizes(std::string_view text) {
  Sizes sizes;
  for (std::string_view rest = text; !rest.empty();) {
    const std::size_t comma = std::min(rest.find(','), rest.size());
    const std::string_view word = rest.substr(0, comma);
    if (comma + 1 == rest.size()) refuse(text, "it ends with a comma");
    rest.remove_prefix(std::min(comma + 1, rest.size()));
    const std::size_t equals = std::min(word.find('='), word.size());
    const std::string_view name = word.substr(0, equals);
    const auto axis =
        static_cast<std::size_t>(std::find(kNames.begin(), kNames.begin() + kWritten, name) - kNames.begin());
    if (axis == kWritten) {
      refuse(text, "there is no axis '" + std::string(name) + "'; axes are dp, pp, tp and ep");
    }
    if (sizes[axis]) refuse(text, "axis " + std::string(name) + " is named twice");
    sizes[axis] = parse_size(text, word, word.substr(std::min(equals + 1, word.size())));
  }
  return sizes;
}

// Ranks from one member of a group to the next.
constexpr int stride(const Mesh& mesh, Axis axis) {
  switch (axis) {
    case Axis::tp:
      return 1;
    case Axis::dp:
    case Axis::ep:
      return mesh.tp;
    case Axis::expert_dp:
      return mesh.tp * mesh.ep;
    case Axis::pp:
      return mesh.tp * mesh.dp;
  }
  return 0;
}

}  // namespace

std::string_view name_of(Axis axis) { return kNames[static_cast<std::size_t>(axis)]; }

int Mesh::size(Axis axis) const {
  return std::array{dp, pp, tp, ep, dp / ep}[static_cast<std::size_t>(axis)];
}

Coordinates Mesh::coordinates(int rank) const {
  const int data = rank / tp % dp;
  return {.dp = data, .pp = rank / (tp * dp), .tp = rank % tp, .ep = data % ep, .expert_dp = data / ep};
}

std::vector<int> Mesh::members(Axis axis, int rank) const {
  const Coordinates at = coordinates(rank);
  const std::array place{at.dp, at.pp, at.tp, at.ep, at.expert_dp};
  const int step = stride(*this, axis);
  std::vector<int> out(static_cast<std::size_t>(size(axis)));
  out.front() = rank - place[static_cast<std::size_t>(axis)] * step;
  for (std::size_t i = 1; i < out.size(); ++i) out[i] = out[i - 1] + step;
  return out;
}

std::string Mesh::text() const {
  std::string out;
  for (std::size_t i = 0; i < kWritten; ++i) {
    const int n = size(kAxes[i]);
    if (n > 1) out += (out.empty() ? "" : ",") + std::string(kNames[i]) + "=" + std::to_string(n);
  }
  return out.empty() ? "dp=1" : out;
}

Mesh parse_mesh(std::string_view text, int ranks) {
  if (ranks < 1) refuse(text, "a mesh has at least one rank");
  const Sizes sizes = parse_sizes(text);
  Mesh mesh;
  mesh.pp = sizes[1].value_or(1);
  mesh.tp = sizes[2].value_or(1);
  mesh.ep = sizes[3].value_or(1);
  const std::int64_t others = static_cast<std::int64_t>(mesh.pp) * mesh.tp;
  mesh.dp = sizes[0].value_or(static_cast<int>(std::max<std::int64_t>(1, ranks / others)));
  // Two sizes of 31 bits are multiplied; the third only if the product is at most `ranks`.
  if (others > ranks || mesh.dp * others != ranks) {
    refuse(text, "dp=" + std::to_string(mesh.dp) + " times pp=" + std::to_string(mesh.pp) + " times tp=" +
                     std::to_string(mesh.tp) + " is not the number of ranks, " + std::to_string(ranks));
  }
  if (mesh.dp % mesh.ep != 0) {
    refuse(text, "ep=" + std::to_string(mesh.ep) + " does not divide dp=" + std::to_string(mesh.dp) +
                     ": expert groups are equal parts of the data-parallel ranks");
  }
  return mesh;
}

std::vector<Mesh> all_meshes(int ranks) {
  const auto divisors = [](int n) {
    std::vector<int> out;
    for (int d = 1; d <= n; ++d) {
      if (n % d == 0) out.push_back(d);
    }
    return out;
  };
  std::vector<Mesh> out;
  for (const int pp : divisors(ranks)) {
    for (const int tp : divisors(ranks / pp)) {
      const int dp = ranks / pp / tp;
      for (const int ep : divisors(dp)) out.push_back({.dp = dp, .pp = pp, .tp = tp, .ep = ep});
    }
  }
  return out;
}

std::vector<int> ranks_of_node(const Mesh& mesh, int rank, int ranks_per_node) {
  if (ranks_per_node < 1 || mesh.ranks() % ranks_per_node != 0) {
    throw UsageError("mesh '" + mesh.text() + "': " + std::to_string(mesh.ranks()) +
                     " ranks are no whole number of nodes of " + std::to_string(ranks_per_node));
  }
  std::vector<int> out(static_cast<std::size_t>(ranks_per_node));
  for (int i = 0; i < ranks_per_node; ++i)
    out[static_cast<std::size_t>(i)] = rank / ranks_per_node * ranks_per_node + i;
  return out;
}

bool within_nodes(const Mesh& mesh, Axis axis, int ranks_per_node) {
  for (int rank = 0; rank < mesh.ranks(); ++rank) {
    const int first = ranks_of_node(mesh, rank, ranks_per_node).front();
    for (const int member : mesh.members(axis, rank)) {
      if (member < first || member >= first + ranks_per_node) return false;
    }
  }
  return true;
}

Comm axis_group(const Comm& world, const Mesh& mesh, Axis axis, std::uint32_t layout) {
  if (mesh.ranks() != world.size()) {
    throw UsageError("mesh '" + mesh.text() + "': it has " + std::to_string(mesh.ranks()) +
                     " ranks, and the world " + std::to_string(world.size()));
  }
  const std::uint32_t label =
      kFirstLabel + static_cast<std::uint32_t>(axis) + static_cast<std::uint32_t>(kAxes.size()) * layout;
  return world.subgroup(mesh.members(axis, world.rank()), label);
}

}  // namespace weft
