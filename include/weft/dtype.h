// Element types and typed views of dense data.
//
// The 16-bit floats are storage types. A reduction of them converts to float, computes there, and rounds to
// nearest even once per addition, so the result is fixed by the order of additions alone.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>

namespace weft {

enum class DType : std::uint8_t { bytes, float32, float64, bfloat16, float16, int32, int64 };
enum class Reduction : std::uint8_t { sum, min, max };

constexpr std::size_t size_of(DType t) {
  switch (t) {
    case DType::bytes:
      return 1;
    case DType::bfloat16:
    case DType::float16:
      return 2;
    case DType::float32:
    case DType::int32:
      return 4;
    case DType::float64:
    case DType::int64:
      return 8;
  }
  return 1;
}

constexpr std::string_view name_of(DType t) {
  constexpr std::string_view names[] = {"bytes",   "float32", "float64", "bfloat16",
                                        "float16", "int32",   "int64"};
  return static_cast<std::size_t>(t) < std::size(names) ? names[static_cast<std::size_t>(t)] : "unknown";
}

constexpr std::string_view name_of(Reduction r) {
  constexpr std::string_view names[] = {"sum", "min", "max"};
  return static_cast<std::size_t>(r) < std::size(names) ? names[static_cast<std::size_t>(r)] : "unknown";
}

struct bfloat16 {
  std::uint16_t bits = 0;
  friend bool operator==(bfloat16, bfloat16) = default;
};
struct float16 {
  std::uint16_t bits = 0;
  friend bool operator==(float16, float16) = default;
};

inline float to_float(bfloat16 x) { return std::bit_cast<float>(std::uint32_t{x.bits} << 16); }
float to_float(float16 x);
bfloat16 to_bfloat16(float x);  // nearest even; NaN stays a (quiet) NaN
float16 to_float16(float x);    // nearest even; overflow becomes infinity

template <class T>
constexpr DType dtype_of() {
  if constexpr (std::is_same_v<T, float>)
    return DType::float32;
  else if constexpr (std::is_same_v<T, double>)
    return DType::float64;
  else if constexpr (std::is_same_v<T, bfloat16>)
    return DType::bfloat16;
  else if constexpr (std::is_same_v<T, float16>)
    return DType::float16;
  else if constexpr (std::is_same_v<T, std::int32_t>)
    return DType::int32;
  else if constexpr (std::is_same_v<T, std::int64_t>)
    return DType::int64;
  else {
    static_assert(std::is_same_v<T, std::byte>, "not an element type of weft");
    return DType::bytes;
  }
}

// A vector of `count` elements that somebody else owns. The memory must stay until the operation's ticket is
// done.
struct Dense {
  std::byte* data = nullptr;
  std::int64_t count = 0;
  DType dtype = DType::bytes;

  Dense() = default;
  Dense(std::byte* first, std::int64_t elements, DType type) : data(first), count(elements), dtype(type) {}
  template <class T>
  Dense(std::span<T> s)  // NOLINT(google-explicit-constructor): a span of numbers is a Dense
      : data(reinterpret_cast<std::byte*>(s.data())),
        count(static_cast<std::int64_t>(s.size())),
        dtype(dtype_of<T>()) {}

  std::size_t size_bytes() const { return static_cast<std::size_t>(count) * size_of(dtype); }
  std::span<std::byte> bytes() const { return {data, size_bytes()}; }
  // Elements [first, first + n). REQUIRES: inside the vector.
  Dense sub(std::int64_t first, std::int64_t n) const {
    return {data + static_cast<std::size_t>(first) * size_of(dtype), n, dtype};
  }
};

}  // namespace weft
