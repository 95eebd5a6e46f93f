// The binomial tree of a broadcast. Ranks are counted from the root: v = (rank - root) mod size. At hop h
// every v < 2^h has the data and gives it to v + 2^h, so v receives at hop floor(log2 v).
#pragma once

#include <bit>

namespace weft {

// Hop at which v receives, -1 for the root.
constexpr int tree_hop(int v) { return std::bit_width(static_cast<unsigned>(v)) - 1; }
constexpr int tree_parent(int v) { return v - (1 << tree_hop(v)); }
// Whom v gives the data at `hop`, or -1.
constexpr int tree_child(int v, int hop, int size) {
  return hop > tree_hop(v) && v + (1 << hop) < size ? v + (1 << hop) : -1;
}

// The scatter of `size` blocks from the root along gaps 2^(L-1) .. 1: at the hop with this gap, v (a multiple
// of 2 gap) gives blocks v+gap .. v+2gap-1, as far as there are any, to v + gap.
constexpr bool scatter_sends(int v, int gap, int size) { return v % (2 * gap) == 0 && v + gap < size; }
constexpr bool scatter_receives(int v, int gap) { return v % (2 * gap) == gap; }
// Blocks that go to v at its hop.
constexpr int scatter_count(int v, int gap, int size) { return gap < size - v ? gap : size - v; }

namespace detail {
constexpr bool tree_reaches_all(int size) {
  for (int v = 1; v < size; ++v) {
    if (tree_child(tree_parent(v), tree_hop(v), size) != v || tree_hop(tree_parent(v)) >= tree_hop(v))
      return false;
  }
  return true;
}
}  // namespace detail
static_assert(detail::tree_reaches_all(1) && detail::tree_reaches_all(2) && detail::tree_reaches_all(7));
static_assert(detail::tree_reaches_all(8) && detail::tree_reaches_all(33));

}  // namespace weft
