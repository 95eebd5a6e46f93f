// Test data that every rank can compute for every other: a hash of (seed, rank, index).
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "base/identity.h"
#include "kernels/scalar.h"
#include "weft/dtype.h"

namespace weft::reference {

inline std::uint64_t hash(std::uint64_t seed, std::uint64_t rank, std::uint64_t index) {
  return mix(seed ^ mix(rank ^ mix(index)));
}

template <class T>
T from_double(double x) {
  if constexpr (std::is_same_v<T, bfloat16>)
    return to_bfloat16(static_cast<float>(x));
  else if constexpr (std::is_same_v<T, float16>)
    return to_float16(static_cast<float>(x));
  else
    return static_cast<T>(x);
}
template <class T>
double as_double(T x) {
  if constexpr (std::is_same_v<T, bfloat16> || std::is_same_v<T, float16>)
    return static_cast<double>(to_float(x));
  else
    return static_cast<double>(x);
}

// Whole numbers 0 .. 7: 32 of them sum to at most 224, exactly, in every element type (bfloat16 has 8 bits).
template <class T>
T whole_number(std::uint64_t seed, int rank, std::int64_t index) {
  return from_double<T>(static_cast<double>(
      hash(seed, static_cast<std::uint64_t>(rank), static_cast<std::uint64_t>(index)) % 8));
}
// Floats of (-1, 1), whose sums round; all bits for integers, whose sums wrap.
template <class T>
T any_number(std::uint64_t seed, int rank, std::int64_t index) {
  const std::uint64_t h = hash(seed, static_cast<std::uint64_t>(rank), static_cast<std::uint64_t>(index));
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(h);
  else
    return from_double<T>(static_cast<double>(static_cast<std::int64_t>(h)) * 0x1p-63);
}

// x[rank][index]
template <class T>
using Inputs = std::vector<std::vector<T>>;

template <class T>
Inputs<T> make_inputs(int size, std::int64_t count, std::uint64_t seed, bool whole) {
  Inputs<T> inputs(static_cast<std::size_t>(size), std::vector<T>(static_cast<std::size_t>(count)));
  for (int r = 0; r < size; ++r) {
    for (std::int64_t i = 0; i < count; ++i) {
      inputs[static_cast<std::size_t>(r)][static_cast<std::size_t>(i)] =
          whole ? whole_number<T>(seed, r, i) : any_number<T>(seed, r, i);
    }
  }
  return inputs;
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

}  // namespace weft::reference
