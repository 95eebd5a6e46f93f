// What a message is part of. The same on all ranks, so that ranks may start operations in any order: a
// receive names its source and this identity, and nothing else is needed to match it. (Job and epoch belong
// to the whole transport.)
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>

namespace weft {

struct Identity {
  // Which ranks; derived from the parent group, the label and the members, equal on all of them.
  std::uint64_t group = 0;
  // Which operation: the index of its plan row, or kUnnamed + the call's number in this group.
  std::uint32_t slot = 0;
  std::uint32_t step = 0;  // training step
  std::uint32_t hop = 0;   // round of the algorithm
  friend auto operator<=>(const Identity&, const Identity&) = default;
};

// Slots from here on are taken in call order per group by operations that have no plan row (as MPI requires
// of its calls).
inline constexpr std::uint32_t kUnnamed = 0x8000'0000u;

// The hop of the engine's own question whether all ranks run the same operation (src/engine/inquiry.h): no
// algorithm has as many.
inline constexpr std::uint32_t kAskingHop = 0xffff'ffff;

// Mixes 64 bits (the finaliser of splitmix64): group ids, hash tables.
constexpr std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Of the operation: the same for all ranks' messages of it, and not 0.
constexpr std::uint64_t operation_of(const Identity& id) {
  return mix(mix(id.group ^ id.slot) ^ id.step) | 1;
}

}  // namespace weft
