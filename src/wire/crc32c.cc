#include "wire/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace weft::wire {

namespace {

constexpr std::array<std::uint32_t, 256> make_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t c = i;
    for (int bit = 0; bit < 8; ++bit) c = (c & 1u) != 0 ? (c >> 1) ^ 0x82f63b78u : c >> 1;
    table[i] = c;
  }
  return table;
}
constexpr std::array<std::uint32_t, 256> kTable = make_table();

#if defined(__x86_64__)
// The instruction has a latency of three cycles and one a cycle of throughput, so three streams run side by
// side and are joined by multiplying with x^(8n) modulo the polynomial: here by table, for one fixed stream
// length.
constexpr std::size_t kStream = 1024;

constexpr std::uint32_t shift_zero_bytes(std::uint32_t crc, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i) crc = kTable[crc & 0xffu] ^ (crc >> 8);
  return crc;
}

struct ShiftTable {
  std::array<std::array<std::uint32_t, 256>, 4> by_byte{};
};

constexpr ShiftTable make_shift_table() {
  ShiftTable t;
  for (std::uint32_t byte = 0; byte < 4; ++byte) {
    std::array<std::uint32_t, 8> of_bit{};
    for (std::uint32_t bit = 0; bit < 8; ++bit)
      of_bit[bit] = shift_zero_bytes(1u << (8 * byte + bit), kStream);
    for (std::uint32_t v = 0; v < 256; ++v) {
      std::uint32_t x = 0;
      for (std::uint32_t bit = 0; bit < 8; ++bit) {
        if ((v >> bit & 1u) != 0) x ^= of_bit[bit];
      }
      t.by_byte[byte][v] = x;
    }
  }
  return t;
}
constexpr ShiftTable kShift = make_shift_table();

std::uint32_t shift(std::uint32_t crc) {
  return kShift.by_byte[0][crc & 0xffu] ^ kShift.by_byte[1][crc >> 8 & 0xffu] ^
         kShift.by_byte[2][crc >> 16 & 0xffu] ^ kShift.by_byte[3][crc >> 24];
}

std::uint64_t load64(const std::byte* p) {
  std::uint64_t v = 0;
  std::memcpy(&v, p, sizeof v);
  return v;
}

__attribute__((target("sse4.2"))) std::uint32_t crc32c_hardware(std::span<const std::byte> bytes,
                                                                std::uint32_t crc) {
  const std::byte* p = bytes.data();
  std::size_t left = bytes.size();
  std::uint64_t a = ~crc;
  while (left >= 3 * kStream) {
    std::uint64_t b = 0;
    std::uint64_t c = 0;
    for (std::size_t i = 0; i < kStream; i += 8) {
      a = _mm_crc32_u64(a, load64(p + i));
      b = _mm_crc32_u64(b, load64(p + kStream + i));
      c = _mm_crc32_u64(c, load64(p + 2 * kStream + i));
    }
    a = shift(shift(static_cast<std::uint32_t>(a)) ^ static_cast<std::uint32_t>(b)) ^ c;
    p += 3 * kStream;
    left -= 3 * kStream;
  }
  for (; left >= 8; p += 8, left -= 8) a = _mm_crc32_u64(a, load64(p));
  for (; left > 0; ++p, --left)
    a = _mm_crc32_u8(static_cast<std::uint32_t>(a), static_cast<std::uint8_t>(*p));
  return ~static_cast<std::uint32_t>(a);
}
#endif

}  // namespace

std::uint32_t crc32c_table(std::span<const std::byte> bytes, std::uint32_t crc) {
  crc = ~crc;
  for (const std::byte b : bytes) crc = kTable[(crc ^ static_cast<std::uint32_t>(b)) & 0xffu] ^ (crc >> 8);
  return ~crc;
}

bool crc32c_is_hardware() {
#if defined(__x86_64__)
  static const bool has = __builtin_cpu_supports("sse4.2") != 0;
  return has;
#else
  return false;
#endif
}

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t crc) {
#if defined(__x86_64__)
  if (crc32c_is_hardware()) return crc32c_hardware(bytes, crc);
#endif
  return crc32c_table(bytes, crc);
}

}  // namespace weft::wire
