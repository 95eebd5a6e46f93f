// Codecs of sparse blocks: garbage is refused with a TransportError and nothing else, and what is accepted is
// exactly what encode() would have written; what was encoded comes back equal; any changed byte gives another
// block or none.
//
// Needs no seeds: the second half builds valid blocks out of the input itself.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

#include "weft/error.h"
#include "wire/codec.h"

namespace weft::wire {
namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

template <class T>
T take(std::span<const std::byte>& bytes) {
  T value{};
  const std::size_t n = std::min(sizeof value, bytes.size());
  if (n > 0) std::memcpy(&value, bytes.data(), n);
  bytes = bytes.subspan(n);
  return value;
}

// Entries are the same to the bit; NaN does not equal itself.
bool same(const Entries& a, const Entries& b) {
  return a.indices == b.indices && a.size() == b.size() &&
         (a.empty() || std::memcmp(a.values.data(), b.values.data(), a.size() * sizeof(float)) == 0);
}

// Decodes, and holds whatever is accepted against what encode() makes of it.
bool accepted(SparseCodec codec, std::span<const std::byte> bytes, const ExpectedBlock& expected,
              Entries& out) {
  Decoded result;
  try {
    result = decode(codec, bytes, expected, out);
  } catch (const TransportError& e) {
    require(e.kind() == TransportError::Kind::corrupt && e.what()[0] != '\0');
    return false;
  }
  require(result.bytes <= bytes.size());
  require(static_cast<std::int64_t>(out.size()) <= std::min(expected.max_count, expected.length));
  for (std::size_t i = 0; i < out.size(); ++i) {
    require(out.indices[i] < expected.length && (i == 0 || out.indices[i - 1] < out.indices[i]));
  }
  require(result.bytes <= max_encoded_bytes(codec, static_cast<std::int64_t>(out.size()), expected.length));
  require(result.bytes == encoded_bytes(codec, out, expected.length));
  std::vector<std::byte> again;
  encode(codec, out, expected.length, result.non_finite, again);
  // A NaN is made quiet on its way through bfloat16; everything else has one encoding.
  if (codec != SparseCodec::packed_bf16 || !result.non_finite) {
    require(std::equal(again.begin(), again.end(), bytes.begin(),
                       bytes.begin() + static_cast<std::ptrdiff_t>(result.bytes)));
  }
  return true;
}

void garbage(SparseCodec codec, std::span<const std::byte> bytes) {
  const std::int64_t length = take<std::uint32_t>(bytes) >> take<std::uint8_t>(bytes) % 32;
  const std::int64_t most = take<std::uint16_t>(bytes);
  Entries out;
  accepted(codec, bytes, {.length = length, .max_count = most, .peer = 1}, out);
}

void round_trip(SparseCodec codec, std::span<const std::byte> bytes) {
  const int shift = take<std::uint8_t>(bytes) % 33;
  const bool non_finite = take<std::uint8_t>(bytes) % 2 != 0;
  const std::uint32_t change = take<std::uint32_t>(bytes);
  const std::uint64_t room = take<std::uint32_t>(bytes) >> shift % 32;
  Entries entries;
  std::uint64_t next = 0;
  while (!bytes.empty()) {
    const std::uint64_t index = next + (std::uint64_t{take<std::uint32_t>(bytes)} >> shift);
    const auto half = static_cast<std::uint32_t>(take<std::uint16_t>(bytes)) << 16;  // what bfloat16 holds
    if (index > 0xffff'ffffu) break;
    const bool finite = (half & 0x7f80'0000u) != 0x7f80'0000u;
    entries.push_back(static_cast<std::uint32_t>(index), std::bit_cast<float>(finite ? half : 0x3f80'0000u));
    next = index + 1;
  }
  const std::int64_t length = static_cast<std::int64_t>(std::min<std::uint64_t>(next + room, 1ull << 32));
  if (codec != SparseCodec::coo && encoded_bytes(codec, entries, length) > 1 << 20)
    return;  // slow, and nothing new
  std::vector<std::byte> encoded;
  encode(codec, entries, length, non_finite, encoded);
  const ExpectedBlock expected{
      .length = length, .max_count = static_cast<std::int64_t>(entries.size()), .peer = 1};
  Entries out;
  require(accepted(codec, encoded, expected, out) && same(out, entries));
  require(decode(codec, encoded, expected, out).non_finite == non_finite);
  encoded[change / 8 % encoded.size()] ^= std::byte{1} << change % 8;
  if (accepted(codec, encoded, expected, out)) {
    require(!same(out, entries) || decode(codec, encoded, expected, out).non_finite != non_finite);
  }
}

}  // namespace
}  // namespace weft::wire

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const auto codec = static_cast<weft::wire::SparseCodec>(data[0] % 3);
  const auto bytes = std::as_bytes(std::span(data, size)).subspan(1);
  weft::wire::garbage(codec, bytes);
  weft::wire::round_trip(codec, bytes);
  return 0;
}
