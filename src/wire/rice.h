// Rice codes of the gaps between increasing indices (the format stands in wire/codec.h).
//
// With parameter r a gap takes (gap >> r) + 1 + r bits: close to the entropy for gaps as random choices leave
// them, when 2^r is about 0.69 of the mean gap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace weft::wire {

// The parameter with the fewest bits; of several, the least.
struct RiceChoice {
  int parameter = 0;  // 0 .. 31
  std::int64_t bits = 0;
};
// REQUIRES: increasing, not empty.
RiceChoice choose_rice(std::span<const std::uint32_t> indices);

// REQUIRES: `into` has exactly the bytes for them.
void write_rice_codes(std::span<const std::uint32_t> indices, int parameter, std::span<std::byte> into);

struct RiceResult {
  std::size_t bytes = 0;        // used from the front
  const char* fault = nullptr;  // or what is wrong with them
};
// Reads into.size() indices, all below `length`.
RiceResult read_rice_codes(std::span<const std::byte> bytes, int parameter, std::int64_t length,
                           std::span<std::uint32_t> into);

}  // namespace weft::wire
