// The part of a layer's elements that reach a magnitude, as far as it can be told from one number: near
// exp(-y) for y scales. Only of additions, products, quotients and roots, which every machine rounds alike:
// what ranks conclude from it is the same everywhere.
#pragma once

#include <cmath>

namespace weft {

inline constexpr int kTailSquarings = 8;
inline constexpr double kTailPower = 1 << kTailSquarings;

// (1 + y/256)^-256
inline double tail(double y) {
  double base = 1 / (1 + y / kTailPower);
  for (int i = 0; i < kTailSquarings; ++i) base *= base;
  return base;
}

// The y with tail(y) = part. REQUIRES: 0 < part <= 1.
inline double tail_inverse(double part) {
  double root = 1 / part;
  for (int i = 0; i < kTailSquarings; ++i) root = std::sqrt(root);
  return kTailPower * (root - 1);
}

}  // namespace weft
