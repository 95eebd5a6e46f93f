// Vectors that travel as bfloat16: rounded to nearest even (what is too large becomes infinity), and back. Who keeps
// what rounding takes away calls round_to_bfloat16() of codec.h before; then nothing is lost here.
#pragma once

#include <cstddef>
#include <span>

#include "base/half.h"

namespace weft::wire {

// REQUIRES, both: as many of one as of the other.
inline void narrow(std::span<const float> values, std::span<bfloat16> into) {
  for (std::size_t i = 0; i < values.size(); ++i) into[i] = half::narrow_bfloat16(values[i]);
}

inline void widen(std::span<const bfloat16> values, std::span<float> into) {
  for (std::size_t i = 0; i < values.size(); ++i) into[i] = half::widen(values[i]);
}

}  // namespace weft::wire
