#include "wire/rice.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace weft::wire {

namespace {

// Bits of all codes with parameter r.
std::int64_t bits_with(std::span<const std::uint32_t> indices, int r) {
  std::uint64_t unary = indices[0] >> r;
  for (std::size_t i = 1; i < indices.size(); ++i) unary += (indices[i] - indices[i - 1] - 1) >> r;
  return static_cast<std::int64_t>(unary) + static_cast<std::int64_t>(indices.size()) * (r + 1);
}

// The 64 bits from `at` on, zeros behind the end.
std::uint64_t peek(std::span<const std::byte> bytes, std::uint64_t at) {
  const auto first = static_cast<std::size_t>(at / 8);
  std::uint64_t word = 0;
  if (first + 8 <= bytes.size())
    std::memcpy(&word, bytes.data() + first, 8);
  else if (first < bytes.size())
    std::memcpy(&word, bytes.data() + first, bytes.size() - first);
  return word >> at % 8;  // 57 of them at least
}

}  // namespace

// Halving all gaps saves the less the smaller they are, so the bits fall and then rise with the parameter:
// going downhill from a guess ends at the least.
RiceChoice choose_rice(std::span<const std::uint32_t> indices) {
  const std::uint64_t mean = (std::uint64_t{indices.back()} + 1) / indices.size();
  int r = std::clamp(static_cast<int>(std::bit_width(mean)) - 1, 0, 31);
  std::int64_t bits = bits_with(indices, r);
  bool fell = false;
  for (; r < 31; ++r) {
    const std::int64_t next = bits_with(indices, r + 1);
    if (next >= bits) break;
    bits = next;
    fell = true;
  }
  if (fell) return {r, bits};
  for (; r > 0; --r) {
    const std::int64_t next = bits_with(indices, r - 1);
    if (next > bits) break;
    bits = next;
  }
  return {r, bits};
}

void write_rice_codes(std::span<const std::uint32_t> indices, int parameter, std::span<std::byte> into) {
  std::uint64_t word = 0;  // the lowest `filled` bits wait; always fewer than 32
  int filled = 0;
  std::byte* next = into.data();
  const auto flush = [&] {
    if (filled < 32) return;
    std::memcpy(next, &word, 4);
    next += 4;
    word >>= 32;
    filled -= 32;
  };
  const std::uint32_t low_mask = (1u << parameter) - 1;
  std::uint32_t expected = 0;  // the index of a gap of 0
  for (const std::uint32_t index : indices) {
    const std::uint32_t gap = index - expected;
    std::uint32_t zeros = gap >> parameter;
    for (; zeros >= 32; zeros -= 32) {
      filled += 32;
      flush();
    }
    filled += static_cast<int>(zeros);
    flush();
    word |= std::uint64_t{1} << filled | std::uint64_t{gap & low_mask} << (filled + 1);
    filled += 1 + parameter;
    flush();
    expected = index + 1;
  }
  std::memcpy(next, &word, static_cast<std::size_t>((filled + 7) / 8));
}

RiceResult read_rice_codes(std::span<const std::byte> bytes, int parameter, std::int64_t length,
                           std::span<std::uint32_t> into) {
  const std::uint64_t end = bytes.size() * 8;
  const std::uint64_t low_mask = (std::uint64_t{1} << parameter) - 1;
  const auto limit = static_cast<std::uint64_t>(length);
  std::uint64_t at = 0;
  std::uint64_t expected = 0;
  for (std::uint32_t& index : into) {
    std::uint64_t word = peek(bytes, at);
    std::uint64_t zeros = 0;
    while (word == 0) {  // 57 zeros at least, or the end
      zeros += 57;
      at += 57;
      if (at >= end) return {.fault = "it ends inside its indices"};
      if (zeros << parameter > limit) return {.fault = "an index is outside the block"};
      word = peek(bytes, at);
    }
    const int more = std::countr_zero(word);
    at += static_cast<std::uint64_t>(more) + 1;
    zeros += static_cast<std::uint64_t>(more);
    const std::uint64_t low = more + 1 + parameter <= 57 ? word >> more >> 1 : peek(bytes, at);
    at += static_cast<std::uint64_t>(parameter);
    expected += (zeros << parameter) + (low & low_mask);
    if (expected >= limit) return {.fault = "an index is outside the block"};
    index = static_cast<std::uint32_t>(expected++);
  }
  if (at > end) return {.fault = "it ends inside its indices"};
  if (at % 8 != 0 && static_cast<std::uint8_t>(bytes[at / 8]) >> at % 8 != 0) {
    return {.fault = "its indices are not filled up with zeros"};
  }
  return {.bytes = static_cast<std::size_t>((at + 7) / 8)};
}

}  // namespace weft::wire
