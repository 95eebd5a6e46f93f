// How slot, step and hop are packed into an MPI tag. Pure arithmetic: no MPI here.
//
//   named operation     | 0 | slot | step modulo 2^step_bits | hop |
//   unnamed operation   | 1 | number of the call modulo 2^(slot_bits + step_bits) | hop |
//
// The group is not in the tag (each group has a communicator of its own), nor is the source (MPI matches it).
// A tag only selects a lane: the frame behind it carries the full identity, and a receiver compares it with
// what it waits for. So two identities that meet in one tag because a step or a call number wrapped are told
// apart: an error, never wrong data. That takes two messages of one lane in flight, four steps or 16,384
// unnamed calls apart with the 31 bits of Open MPI.
//
// Plan rows and hops do not wrap: what does not fit is a UsageError before anything is sent.
#pragma once

#include <bit>
#include <cstdint>
#include <string>

#include "weft/error.h"
#include "weft/identity.h"

namespace weft {

struct MpiTagLayout {
  int slot_bits = 0;
  int step_bits = 0;
  int hop_bits = 0;

  constexpr int bits() const { return 1 + slot_bits + step_bits + hop_bits; }
  friend constexpr bool operator==(const MpiTagLayout&, const MpiTagLayout&) = default;
};

// Below this many bits there is no room for two steps of 256 plan rows with 1,024 hops.
inline constexpr int kFewestTagBits = 20;

// Divides the bits of MPI_TAG_UB: two for the step (one when they are scarce), the rest to hops and plan
// rows, hops first. Throws UsageError where there are too few.
constexpr MpiTagLayout mpi_tag_layout(int tag_upper_bound) {
  const int bits = tag_upper_bound < 1 ? 0 : std::bit_width(static_cast<unsigned>(tag_upper_bound) + 1u) - 1;
  if (bits < kFewestTagBits) {
    throw UsageError("this MPI allows tags up to " + std::to_string(tag_upper_bound) +
                     "; weft needs at least " + std::to_string((1 << kFewestTagBits) - 1));
  }
  const int step_bits = bits >= 24 ? 2 : 1;
  const int rest = bits - 1 - step_bits;
  const int slot_bits = rest * 6 / 13;
  return {.slot_bits = slot_bits, .step_bits = step_bits, .hop_bits = rest - slot_bits};
}

// The tag of a message. Throws UsageError for a plan row or a hop that does not fit.
constexpr int mpi_tag(const MpiTagLayout& layout, const Identity& id) {
  const auto low = [](std::uint32_t value, int bits) { return value & ((std::uint32_t{1} << bits) - 1); };
  const auto require = [](std::uint32_t value, int bits, const char* what) {
    if ((value >> bits) != 0) {
      throw UsageError(std::string(what) + " " + std::to_string(value) +
                       " does not fit an MPI tag: this MPI leaves " + std::to_string(bits) + " bits for it");
    }
    return value;
  };
  const std::uint32_t hop = require(id.hop, layout.hop_bits, "hop");
  const int operation_bits = layout.slot_bits + layout.step_bits;
  const bool unnamed = (id.slot & kUnnamed) != 0;
  const std::uint32_t operation = unnamed
                                      ? std::uint32_t{1} << operation_bits | low(id.slot, operation_bits)
                                      : require(id.slot, layout.slot_bits, "plan row") << layout.step_bits |
                                            low(id.step, layout.step_bits);
  return static_cast<int>(operation << layout.hop_bits | hop);
}

// Open MPI and the smallest that is accepted, by heart.
static_assert(mpi_tag_layout(0x7fff'ffff) == MpiTagLayout{.slot_bits = 12, .step_bits = 2, .hop_bits = 16});
static_assert(mpi_tag_layout(0x7fff'ffff).bits() == 31);
static_assert(mpi_tag_layout((1 << kFewestTagBits) - 1) ==
              MpiTagLayout{.slot_bits = 8, .step_bits = 1, .hop_bits = 10});
static_assert(mpi_tag_layout(1 << kFewestTagBits) ==
              mpi_tag_layout((1 << kFewestTagBits) - 1));  // whole bits only
// The largest of both kinds stay within the bound, and the two kinds never meet.
static_assert(mpi_tag(mpi_tag_layout(0x7fff'ffff), {.slot = 0xfff, .step = 3, .hop = 0xffff}) == 0x3fff'ffff);
static_assert(mpi_tag(mpi_tag_layout(0x7fff'ffff), {.slot = kUnnamed}) == 0x4000'0000);
static_assert(mpi_tag(mpi_tag_layout(0x7fff'ffff), {.slot = 0xffff'ffff, .hop = 0xffff}) == 0x7fff'ffff);

}  // namespace weft
