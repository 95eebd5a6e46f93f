// The plain twins of the fast kernels: one element at a time, written to be read. They are the definition;
// tests compare.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <type_traits>

#include "weft/dtype.h"
#include "weft/error.h"

namespace weft::scalar {

// a (reduction) b for int32, int64, float and double.
template <class T>
T fold_one(T a, T b, Reduction reduction) {
  if constexpr (std::is_floating_point_v<T>) {
    if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<T>::quiet_NaN();
    if (reduction == Reduction::sum) {
      const T sum = a + b;
      return std::isnan(sum) ? std::numeric_limits<T>::quiet_NaN() : sum;  // inf - inf
    }
    const bool a_is_less = a < b || (a == b && std::signbit(a));
    return (reduction == Reduction::min) == a_is_less ? a : b;
  } else {
    using Unsigned = std::make_unsigned_t<T>;
    if (reduction == Reduction::sum)
      return static_cast<T>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b));
    return (reduction == Reduction::min) == (a < b) ? a : b;
  }
}
inline bfloat16 fold_one(bfloat16 a, bfloat16 b, Reduction reduction) {
  return to_bfloat16(fold_one(to_float(a), to_float(b), reduction));
}
inline float16 fold_one(float16 a, float16 b, Reduction reduction) {
  return to_float16(fold_one(to_float(a), to_float(b), reduction));
}

// Calls f with a value of the C++ type that `dtype` names.
template <class F>
void with_type(DType dtype, F f) {
  switch (dtype) {
    case DType::float32:
      return f(float{});
    case DType::float64:
      return f(double{});
    case DType::bfloat16:
      return f(bfloat16{});
    case DType::float16:
      return f(float16{});
    case DType::int32:
      return f(std::int32_t{});
    case DType::int64:
      return f(std::int64_t{});
    case DType::bytes:
      break;
  }
  throw UsageError("bytes have no sum, minimum or maximum: name the element type");
}

inline void fold_two(const Dense& into, std::span<const std::byte> a, std::span<const std::byte> b,
                     Reduction reduction) {
  with_type(into.dtype, [&]<class T>(T) {
    for (std::size_t i = 0; i < static_cast<std::size_t>(into.count); ++i) {
      T x;
      T y;
      std::memcpy(&x, a.data() + i * sizeof(T), sizeof(T));
      std::memcpy(&y, b.data() + i * sizeof(T), sizeof(T));
      const T z = fold_one(x, y, reduction);
      std::memcpy(into.data + i * sizeof(T), &z, sizeof(T));
    }
  });
}

}  // namespace weft::scalar
