// Products of a matrix with thin factors, and their orthonormal columns: what low-rank compression is made
// of.
//
// A matrix M is row-major, `rows` x `columns`. A factor of r columns is stored column after column, each
// contiguous: P has r x rows floats, Q has r x columns.
//
// What they compute, to the bit, in every build and on every processor (scalar_low_rank.h is the definition):
//   products are float32, each product and each sum rounded apart (no fused multiply-add)
//   a dot product has eight lanes, lane l sums what stands at l, l+8, ..; then ((0+4)+(2+6)) + ((1+5)+(3+7))
//   other sums go up in the index. Nothing depends on the number of threads
//   what orthonormalize() sums is float64, in the same eight lanes
//
// REQUIRES everywhere: sizes fit, nothing overlaps but where it says so; columns >= 1 where there are rows.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace weft {

struct MatrixShape {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  int rank = 0;  // columns of its factors
};

// P = M Q.
void multiply(const MatrixShape& shape, std::span<const float> m, std::span<const float> q,
              std::span<float> p);
// Q = M^T P.
void multiply_transposed(const MatrixShape& shape, std::span<const float> m, std::span<const float> p,
                         std::span<float> q);
// y = P Q^T, m -= y / divisor.
void reconstruct(const MatrixShape& shape, std::span<const float> p, std::span<const float> q, float divisor,
                 std::span<float> y, std::span<float> m);

// A column this long or short is scaled by a power of two first, so that no difference overflows.
inline constexpr double kLong = 0x1p60;
inline constexpr double kScale = 0x1p100;
// Below this part of its length a column's rest is rounding: it depends on the columns before it.
inline constexpr double kDependent = 0x1p-18;

// Modified Gram-Schmidt on columns of `length`, in place. A column that is zero, or that depends on those
// before it, becomes zeros and is named in `zeroed` (overwritten, ascending): never NaN from finite values.
// A column that cancels to less than half is projected twice. REQUIRES: finite values.
void orthonormalize(std::int64_t length, int rank, std::span<float> columns, std::vector<int>& zeroed);
// The same for one column, those before it being orthonormal or zeros. False: it became zeros.
bool orthonormalize_column(std::int64_t length, int column, std::span<float> columns);

}  // namespace weft
