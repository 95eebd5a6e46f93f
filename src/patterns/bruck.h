// The Bruck pattern for any size, in ceil(log2 size) hops, and the same backwards in time.
//
//   gather   hop j, gap 2^j: a rank sends the blocks it has, its own first, to rank - gap, until everybody
//            has all blocks
//   halving  the same film backwards: a rank sends the far part of the blocks it still holds to rank + gap,
//            adds what arrives to the near part, and ends with the sum of its own block
//
// Blocks of a hop are a bag: `count` consecutive blocks, cyclically, given relative to the rank. A bag that
// is sent and one that is received never overlap.
// Bruck et al., IEEE TPDS 8(11), 1997; backwards: Zhao et al. (SparDL), ICDE 2024.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

namespace weft {

struct Hop {
  std::uint32_t number = 0;
  int gap = 0;       // halving: to rank + gap, from rank - gap; gather: to rank - gap, from rank + gap
  int sent = 0;      // first block of the bag that is sent, relative to this rank
  int received = 0;  // first block of the bag that is received, relative to this rank
  int count = 0;     // blocks in either bag
};

class Hops {
 public:
  constexpr void add(const Hop& hop) { hops_[static_cast<std::size_t>(size_++)] = hop; }
  constexpr int size() const { return size_; }
  constexpr const Hop* begin() const { return hops_.data(); }
  constexpr const Hop* end() const { return hops_.data() + size_; }

 private:
  std::array<Hop, 32> hops_{};
  int size_ = 0;
};

// ceil(log2 size)
constexpr int log2_ceil(int size) { return std::bit_width(static_cast<unsigned>(size - 1)); }

constexpr Hops gather_hops(int size) {
  Hops hops;
  for (int j = 0; j < log2_ceil(size); ++j) {
    const int gap = 1 << j;
    const int count = gap < size - gap ? gap : size - gap;
    hops.add(
        {.number = static_cast<std::uint32_t>(j), .gap = gap, .sent = 0, .received = gap, .count = count});
  }
  return hops;
}

constexpr Hops halving_hops(int size) {
  Hops hops;
  int held = size;
  for (int i = 0; i < log2_ceil(size); ++i) {
    const int gap = 1 << (log2_ceil(size) - 1 - i);
    hops.add({.number = static_cast<std::uint32_t>(i),
              .gap = gap,
              .sent = gap,
              .received = 0,
              .count = held - gap});
    held = gap;
  }
  return hops;
}

namespace detail {
constexpr bool gather_is_complete(int size) {
  int have = 1;  // every rank r has blocks r .. r+have-1
  for (const Hop& hop : gather_hops(size)) {
    if (hop.received != have || hop.sent + hop.count > have) return false;
    have += hop.count;
  }
  return have == size;
}
// Contributions by distance: held[d] is the set of distances (rank - source) that the local copy of block
// rank + d contains.
constexpr bool halving_is_complete(int size) {
  std::uint64_t held[33] = {};
  for (int d = 0; d < size; ++d) held[d] = 1;
  for (const Hop& hop : halving_hops(size)) {
    if (hop.received + hop.count > hop.sent) return false;
    for (int d = 0; d < hop.count; ++d) {
      const std::uint64_t arrived = held[hop.sent + d] << hop.gap;  // the sender is `gap` before
      if ((held[d] & arrived) != 0) return false;
      held[d] |= arrived;
    }
  }
  return held[0] == (std::uint64_t{1} << size) - 1;
}
constexpr bool both_are_complete(int largest) {
  for (int size = 1; size <= largest; ++size) {
    if (!gather_is_complete(size) || !halving_is_complete(size)) return false;
  }
  return true;
}
}  // namespace detail
static_assert(detail::both_are_complete(33));

}  // namespace weft
