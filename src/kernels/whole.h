// Rows of numbers as whole numbers of few bits, and a scale for each row: plain functions on spans.
//
//   scale = largest |value| of the row / L, L = 2^(bits - 1) - 1
//   code  = value / scale to the nearest whole number, ties to even: -L .. L
//   what it stands for = scale code: within half a scale of the value, and the largest one to a rounding
//
// A row of which a value is not finite, or which is so small that it has no scale, has the scale NaN, or 0: it
// stands for as many NaNs, or zeros.
//
// Coded: the scales of all rows, float32; then row by row the codes + L as `bits` bits, the lowest ones of a byte first,
// each row from a byte of its own; then zeros to a multiple of 4 bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace weft {

struct WholeShape {
  std::int64_t rows = 0, columns = 0;
  int bits = 4;  // 4 or 8
};

std::int64_t whole_bytes(const WholeShape& shape);
// `matrix` becomes what is left: itself less what the codes stand for, exactly. A row with a NaN for a scale stays.
// False: there was one. REQUIRES: `coded` of whole_bytes(), aligned for float32.
bool to_whole(const WholeShape& shape, std::span<float> matrix, std::span<std::byte> coded);
// REQUIRES: as above.
void from_whole(const WholeShape& shape, std::span<const std::byte> coded, std::span<float> matrix);

}  // namespace weft
