// The 16-bit floats as inline, branch-free code that a compiler turns into vector instructions. dtype.cc is
// the same code behind the public names.
#pragma once

#include <bit>
#include <cstdint>

#include "weft/dtype.h"

namespace weft::half {

inline constexpr std::uint32_t kFloatNaN = 0x7fc00000u;
inline constexpr std::uint16_t kBfloat16NaN = 0x7fc0u;
inline constexpr std::uint16_t kFloat16NaN = 0x7e00u;

[[gnu::always_inline]] inline float widen(bfloat16 x) {
  return __builtin_bit_cast(float, static_cast<std::uint32_t>(x.bits) << 16);
}

// Rounds the lower half away: adding 0x7fff, and one more if the upper half is odd, carries exactly when
// nearest even rounds up (into the exponent too, and from the largest finite value into infinity).
[[gnu::always_inline]] inline bfloat16 narrow_bfloat16(float x) {
  const std::uint32_t u = __builtin_bit_cast(std::uint32_t, x);
  const std::uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const bool is_nan = (u & 0x7fffffffu) > 0x7f800000u;
  return {static_cast<std::uint16_t>(is_nan ? kBfloat16NaN : rounded)};
}

// The exponent is moved from bias 15 to 127; the two ends are special: infinity and NaN keep an exponent of
// all ones, and a subnormal 0.m x 2^-14 is made as (1.m - 1.0) x 2^-14, which is exact.
[[gnu::always_inline]] inline float widen(float16 x) {
  const std::uint32_t magnitude = static_cast<std::uint32_t>(x.bits & 0x7fffu) << 13;
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16;
  const std::uint32_t exponent = magnitude & (0x7c00u << 13);
  const std::uint32_t normal = magnitude + ((127u - 15u) << 23);
  const std::uint32_t special = normal + ((128u - 16u) << 23);
  const float one = __builtin_bit_cast(float, normal + (1u << 23)) - __builtin_bit_cast(float, 113u << 23);
  const std::uint32_t subnormal = __builtin_bit_cast(std::uint32_t, one);
  const std::uint32_t finite = exponent == 0 ? subnormal : normal;
  return __builtin_bit_cast(float, sign | (exponent == (0x7c00u << 13) ? special : finite));
}

// Normal results round as above. Below 2^-14 the addition of 0.5 lets the floating-point unit shift and
// round: the last bit of 0.5 + x is 2^-24, the smallest float16.
[[gnu::always_inline]] inline float16 narrow_float16(float x) {
  const std::uint32_t u = __builtin_bit_cast(std::uint32_t, x);
  const std::uint32_t magnitude = u & 0x7fffffffu;
  const std::uint32_t sign = (u >> 16) & 0x8000u;
  const std::uint32_t normal = (magnitude - ((127u - 15u) << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const float shifted = __builtin_bit_cast(float, magnitude) + 0.5f;
  const std::uint32_t subnormal =
      __builtin_bit_cast(std::uint32_t, shifted) - __builtin_bit_cast(std::uint32_t, 0.5f);
  const std::uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
  // 65520 = 0x477ff000 and above round to infinity, which is what `normal` gives up to 2^16.
  const std::uint32_t value = magnitude >= (143u << 23) ? 0x7c00u : finite;
  return {static_cast<std::uint16_t>(magnitude > 0x7f800000u ? kFloat16NaN : (sign | value))};
}

}  // namespace weft::half
