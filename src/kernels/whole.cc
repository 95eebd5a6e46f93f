#include "kernels/whole.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace weft {

namespace {

constexpr float kNearest = 0x1.8p23F;  // added and taken away again: the nearest whole number, ties to even

int levels_of(int bits) { return (1 << (bits - 1)) - 1; }
std::size_t row_bytes(const WholeShape& shape) {
  return static_cast<std::size_t>((shape.columns * shape.bits + 7) / 8);
}
std::size_t scales_bytes(const WholeShape& shape) {
  return static_cast<std::size_t>(shape.rows) * sizeof(float);
}

// NaN where a value is not finite: a comparison with one is false, a sum with one is not finite.
float scale_of(std::span<const float> row, int levels) {
  float most = 0, sum = 0;
  for (const float v : row) {
    most = std::max(most, std::abs(v));
    sum += v * 0.0F;
  }
  if (sum != 0) return std::numeric_limits<float>::quiet_NaN();
  const auto all = static_cast<float>(levels);
  const float scale = most / all;
  return std::isinf(scale * all) ? std::nextafter(scale, 0.0F) : scale;  // what it stands for is finite
}

// The nearest whole number to v / scale. (A scale that has lost bits may be too small for the largest value.)
float code_of(float v, float scale, float levels) {
  const float nearest = (v / scale + kNearest) - kNearest;
  return std::min(std::max(nearest, -levels), levels);
}

// Codes become bits; `row` becomes what is left.
void put_row(std::span<float> row, float scale, int bits, std::byte* into) {
  const int levels = levels_of(bits);
  const std::size_t per_byte = 8 / static_cast<std::size_t>(bits);
  for (std::size_t first = 0; first < row.size(); first += per_byte) {
    unsigned byte = 0;
    const std::size_t count = std::min(per_byte, row.size() - first);
    for (std::size_t i = 0; i < count; ++i) {
      float& value = row[first + i];
      const float code = scale == 0 ? 0.0F : code_of(value, scale, static_cast<float>(levels));
      const float stands_for = scale * code;
      value -= stands_for;
      byte |= static_cast<unsigned>(static_cast<int>(code) + levels) << (i * static_cast<std::size_t>(bits));
    }
    *into++ = static_cast<std::byte>(byte);
  }
}

}  // namespace

std::int64_t whole_bytes(const WholeShape& shape) {
  const std::size_t bytes = scales_bytes(shape) + static_cast<std::size_t>(shape.rows) * row_bytes(shape);
  return static_cast<std::int64_t>((bytes + 3) / 4 * 4);
}

bool to_whole(const WholeShape& shape, std::span<float> matrix, std::span<std::byte> coded) {
  std::byte* codes = coded.data() + scales_bytes(shape);
  const auto columns = static_cast<std::size_t>(shape.columns);
  bool finite = true;
  for (std::int64_t r = 0; r < shape.rows; ++r, codes += row_bytes(shape)) {
    const std::span<float> row = matrix.subspan(static_cast<std::size_t>(r) * columns, columns);
    const float scale = scale_of(row, levels_of(shape.bits));
    std::memcpy(coded.data() + static_cast<std::size_t>(r) * sizeof(float), &scale, sizeof(scale));
    if (std::isnan(scale)) {
      std::memset(codes, 0, row_bytes(shape));
      finite = false;
    } else {
      put_row(row, scale, shape.bits, codes);
    }
  }
  std::fill(codes, coded.data() + coded.size(), std::byte{0});
  return finite;
}

void from_whole(const WholeShape& shape, std::span<const std::byte> coded, std::span<float> matrix) {
  const std::byte* codes = coded.data() + scales_bytes(shape);
  const auto columns = static_cast<std::size_t>(shape.columns);
  const int levels = levels_of(shape.bits);
  const std::size_t per_byte = 8 / static_cast<std::size_t>(shape.bits);
  const unsigned mask = (1U << shape.bits) - 1;
  for (std::int64_t r = 0; r < shape.rows; ++r, codes += row_bytes(shape)) {
    float scale = 0;
    std::memcpy(&scale, coded.data() + static_cast<std::size_t>(r) * sizeof(float), sizeof(scale));
    float* row = matrix.data() + static_cast<std::size_t>(r) * columns;
    for (std::size_t i = 0; i < columns; ++i) {
      const unsigned bits = std::to_integer<unsigned>(codes[i / per_byte]) >>
                            (i % per_byte * static_cast<std::size_t>(shape.bits));
      row[i] = scale * static_cast<float>(static_cast<int>(bits & mask) - levels);
    }
  }
}

}  // namespace weft
