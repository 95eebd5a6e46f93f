// How the entries of one block are written into a message. Little-endian. This comment is the map.
//
//   coo          u32 head, count x u32 index, count x f32 value: exactly 4 + 8 count bytes, the paper's
//   packed       u32 head, u8 coding, indices, count x f32 value
//   packed_bf16  the same with count x bf16 value
//
// head: bits 0..30 are the count, bit 31 is the verdict "a gradient somewhere was not finite", which travels
// on with every block. A block without entries is its head alone, in every codec.
//
// coding: the parameter r of the Rice codes of the gaps (the first index; then index - previous - 1): gap >>
// r zeros, a one, the r low bits of the gap; from the lowest bit of the first byte on, the last byte filled
// up with zeros. With r = 0 that is a bitmap of the block, up to its last entry. The parameter is fixed by
// the indices: the least of those with the fewest bits. So a block has exactly one encoding, its size is
// known before it is written, and it never takes more than a bitmap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/entries.h"

namespace weft::wire {

enum class SparseCodec : std::uint8_t { coo, packed, packed_bf16 };

constexpr std::string_view name_of(SparseCodec codec) {
  constexpr std::string_view names[] = {"coo", "packed", "packed-bf16"};
  return static_cast<std::size_t>(codec) < std::size(names) ? names[static_cast<std::size_t>(codec)]
                                                            : "unknown";
}
// "coo", "packed", "packed-bf16"; throws UsageError that lists them.
SparseCodec sparse_codec_of(std::string_view name);

// Exactly what encode() will write. Throws UsageError if the last index is not below `length`, or for 2^31
// entries and more. REQUIRES: indices strictly increasing.
std::size_t encoded_bytes(SparseCodec codec, EntriesView entries, std::int64_t length);
// No list of at most `count` entries of a block of `length` elements takes more.
std::size_t max_encoded_bytes(SparseCodec codec, std::int64_t count, std::int64_t length);

// Writes to the front of `into` and returns how many bytes. packed_bf16 rounds values; a caller that keeps
// residuals has called round_to_bfloat16() before, and then nothing is lost here. Throws UsageError if `into`
// is too short. REQUIRES: as encoded_bytes(); values finite unless `non_finite`.
std::size_t encode(SparseCodec codec, EntriesView entries, std::int64_t length, bool non_finite,
                   std::span<std::byte> into);
// Appends.
void encode(SparseCodec codec, EntriesView entries, std::int64_t length, bool non_finite,
            std::vector<std::byte>& into);

// What the receiver knows of a block before it looks at the bytes.
struct ExpectedBlock {
  std::int64_t length = 0;     // elements of the block, at most 2^32
  std::int64_t max_count = 0;  // its quota
  int peer = -1;               // for the error only
};
struct Decoded {
  std::size_t bytes = 0;  // used from the front; what follows them is not looked at
  bool non_finite = false;
};
// Replaces `out`. Throws TransportError(corrupt) for anything that encode() does not write: too short, too
// many entries, indices out of order or range, a coding that is not the right one, filling that is not zero,
// values not finite without the verdict. Memory is asked for only after the bytes for so many entries are
// known to be there.
Decoded decode(SparseCodec codec, std::span<const std::byte> bytes, const ExpectedBlock& expected,
               Entries& out);

// Rounds values to bfloat16, nearest even, but never to infinity (the largest finite one instead), and
// returns what was lost: errors[i] = before - after, exactly. For the caller's residual. REQUIRES: as many
// errors as values.
void round_to_bfloat16(std::span<float> values, std::span<float> errors);
inline void round_to_bfloat16(std::span<float> values, std::vector<float>& errors) {
  errors.resize(values.size());
  round_to_bfloat16(values, std::span<float>(errors));
}

}  // namespace weft::wire
