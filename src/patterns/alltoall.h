// Who exchanges with whom in an all-to-all.
//
//   pairwise       hop h = 0 .. size-2: to rank + h + 1, from rank - h - 1; every hop is a permutation, so
//                  that no port is shared
//   bruck          hop h = 0 .. ceil(log2 size)-1: slot i holds what still has i ranks to go; the slots with
//                  bit h set jump 2^h
//   hierarchical   ranks in a grid of nodes: inside the node to the column of the receiver, then along the
//                  column to its node
#pragma once

#include <cstdint>

#include "patterns/bruck.h"

namespace weft {

constexpr int pairwise_to(int rank, int size, int hop) { return (rank + hop + 1) % size; }
constexpr int pairwise_from(int rank, int size, int hop) { return (rank + size - hop - 1) % size; }

constexpr bool bruck_slot_jumps(int slot, int hop) { return (slot >> hop & 1) != 0; }
// Slots that jump at a hop.
constexpr std::int64_t bruck_slots(int size, int hop) {
  const std::int64_t period = std::int64_t{2} << hop;
  const std::int64_t rest = size % period - period / 2;
  return size / period * (period / 2) + (rest > 0 ? rest : 0);
}

// Ranks of one scale-up group ("node") are consecutive.
struct NodeGrid {
  int size = 1;
  int node_size = 1;  // divides size
  constexpr int nodes() const { return size / node_size; }
  constexpr int node_of(int rank) const { return rank / node_size; }
  constexpr int local_of(int rank) const { return rank % node_size; }
  constexpr int rank_of(int node, int local) const { return node * node_size + local; }
};

namespace detail {
constexpr bool pairwise_is_permutation(int size) {
  for (int hop = 0; hop < size - 1; ++hop) {
    for (int r = 0; r < size; ++r) {
      if (pairwise_from(pairwise_to(r, size, hop), size, hop) != r || pairwise_to(r, size, hop) == r)
        return false;
    }
  }
  return true;
}
constexpr bool bruck_slots_arrive(int size) {
  for (int hop = 0; hop < log2_ceil(size); ++hop) {
    std::int64_t jumping = 0;
    for (int slot = 0; slot < size; ++slot) jumping += bruck_slot_jumps(slot, hop) ? 1 : 0;
    if (jumping != bruck_slots(size, hop)) return false;
  }
  for (int slot = 0; slot < size; ++slot) {
    int travelled = 0;
    for (int hop = 0; hop < log2_ceil(size); ++hop) travelled += bruck_slot_jumps(slot, hop) ? 1 << hop : 0;
    if (travelled != slot) return false;
  }
  return true;
}
}  // namespace detail
static_assert(detail::pairwise_is_permutation(2) && detail::pairwise_is_permutation(5));
static_assert(detail::bruck_slots_arrive(1) && detail::bruck_slots_arrive(2) &&
              detail::bruck_slots_arrive(7));
static_assert(detail::bruck_slots_arrive(8) && detail::bruck_slots_arrive(33));

}  // namespace weft
