// The plain twins of kernels/low_rank.h, written to be read: they are the definition, and tests compare.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/low_rank.h"

namespace weft::scalar {

template <class Sum, class A, class B>
Sum dot(const A* a, const B* b, std::int64_t count) {
  Sum lanes[8] = {};
  for (std::int64_t i = 0; i < count; ++i) lanes[i % 8] += static_cast<Sum>(a[i]) * static_cast<Sum>(b[i]);
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

inline void multiply(const MatrixShape& s, std::span<const float> m, std::span<const float> q,
                     std::span<float> p) {
  for (int k = 0; k < s.rank; ++k) {
    for (std::int64_t i = 0; i < s.rows; ++i) {
      p[static_cast<std::size_t>(k * s.rows + i)] =
          dot<float>(&m[static_cast<std::size_t>(i * s.columns)], &q[static_cast<std::size_t>(k * s.columns)],
                     s.columns);
    }
  }
}

inline void multiply_transposed(const MatrixShape& s, std::span<const float> m, std::span<const float> p,
                                std::span<float> q) {
  for (int k = 0; k < s.rank; ++k) {
    for (std::int64_t j = 0; j < s.columns; ++j) {
      float sum = 0;
      for (std::int64_t i = 0; i < s.rows; ++i) {
        sum += p[static_cast<std::size_t>(k * s.rows + i)] * m[static_cast<std::size_t>(i * s.columns + j)];
      }
      q[static_cast<std::size_t>(k * s.columns + j)] = sum;
    }
  }
}

inline void reconstruct(const MatrixShape& s, std::span<const float> p, std::span<const float> q,
                        float divisor, std::span<float> y, std::span<float> m) {
  for (std::int64_t i = 0; i < s.rows; ++i) {
    for (std::int64_t j = 0; j < s.columns; ++j) {
      float sum = 0;
      for (int k = 0; k < s.rank; ++k) {
        sum += p[static_cast<std::size_t>(k * s.rows + i)] * q[static_cast<std::size_t>(k * s.columns + j)];
      }
      y[static_cast<std::size_t>(i * s.columns + j)] = sum;
      m[static_cast<std::size_t>(i * s.columns + j)] -= sum / divisor;
    }
  }
}

inline bool orthonormalize_column(std::int64_t length, int column, std::span<float> columns) {
  float* const v = columns.data() + column * length;
  const auto norm = [&] { return std::sqrt(dot<double>(v, v, length)); };
  double given = norm();
  if (given > kLong || given < 1 / kLong) {
    for (std::int64_t i = 0; i < length; ++i)
      v[i] = static_cast<float>(v[i] / (given > kLong ? kScale : 1 / kScale));
    given = norm();
  }
  double left = given;
  for (int pass = 0; pass < 2; ++pass) {
    for (int k = 0; k < column; ++k) {
      const float* const u = columns.data() + k * length;
      const double along = dot<double>(v, u, length);
      for (std::int64_t i = 0; i < length; ++i) v[i] = static_cast<float>(v[i] - along * u[i]);
    }
    left = norm();
    if (left > given / 2) break;
  }
  const bool kept = left > given * kDependent;
  for (std::int64_t i = 0; i < length; ++i) v[i] = kept ? static_cast<float>(v[i] / left) : 0.0F;
  return kept;
}

inline void orthonormalize(std::int64_t length, int rank, std::span<float> columns,
                           std::vector<int>& zeroed) {
  zeroed.clear();
  for (int k = 0; k < rank; ++k) {
    if (!scalar::orthonormalize_column(length, k, columns)) zeroed.push_back(k);
  }
}

}  // namespace weft::scalar
