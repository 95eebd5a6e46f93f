// The plain twins of kernels/low_rank.h, written to be read: they are the definition, and tests compare. Values are
// float; as double (multiply<double>(..)) they show what holds but for rounding.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "kernels/low_rank.h"

namespace weft::scalar {

// T is said, never deduced: whatever becomes a span may be given.
template <class T>
using Read = std::type_identity_t<std::span<const T>>;
template <class T>
using Written = std::type_identity_t<std::span<T>>;

template <class Sum, class A, class B>
Sum dot(const A* a, const B* b, std::int64_t count) {
  Sum lanes[8] = {};
  for (std::int64_t i = 0; i < count; ++i) lanes[i % 8] += static_cast<Sum>(a[i]) * static_cast<Sum>(b[i]);
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

template <class T = float>
void multiply(const MatrixShape& s, Read<T> m, Read<T> q, Written<T> p) {
  for (int k = 0; k < s.rank; ++k) {
    for (std::int64_t i = 0; i < s.rows; ++i) {
      p[static_cast<std::size_t>(k * s.rows + i)] =
          dot<T>(&m[static_cast<std::size_t>(i * s.columns)], &q[static_cast<std::size_t>(k * s.columns)],
                 s.columns);
    }
  }
}

template <class T = float>
void multiply_transposed(const MatrixShape& s, Read<T> m, Read<T> p, Written<T> q) {
  for (int k = 0; k < s.rank; ++k) {
    for (std::int64_t j = 0; j < s.columns; ++j) {
      T sum = 0;
      for (std::int64_t i = 0; i < s.rows; ++i) {
        sum += p[static_cast<std::size_t>(k * s.rows + i)] * m[static_cast<std::size_t>(i * s.columns + j)];
      }
      q[static_cast<std::size_t>(k * s.columns + j)] = sum;
    }
  }
}

template <class T = float>
void reconstruct(const MatrixShape& s, Read<T> p, Read<T> q, std::type_identity_t<T> divisor, Written<T> y,
                 Written<T> m) {
  for (std::int64_t i = 0; i < s.rows; ++i) {
    for (std::int64_t j = 0; j < s.columns; ++j) {
      T sum = 0;
      for (int k = 0; k < s.rank; ++k) {
        sum += p[static_cast<std::size_t>(k * s.rows + i)] * q[static_cast<std::size_t>(k * s.columns + j)];
      }
      y[static_cast<std::size_t>(i * s.columns + j)] = sum;
      m[static_cast<std::size_t>(i * s.columns + j)] -= sum / divisor;
    }
  }
}

template <class T = float>
bool orthonormalize_column(std::int64_t length, int column, Written<T> columns) {
  T* const v = columns.data() + column * length;
  const auto norm = [&] { return std::sqrt(dot<double>(v, v, length)); };
  double given = norm();
  if (given > kLong || given < 1 / kLong) {
    for (std::int64_t i = 0; i < length; ++i)
      v[i] = static_cast<T>(v[i] / (given > kLong ? kScale : 1 / kScale));
    given = norm();
  }
  double left = given;
  for (int pass = 0; pass < 2; ++pass) {
    for (int k = 0; k < column; ++k) {
      const T* const u = columns.data() + k * length;
      const double along = dot<double>(v, u, length);
      for (std::int64_t i = 0; i < length; ++i) v[i] = static_cast<T>(v[i] - along * u[i]);
    }
    left = norm();
    if (left > given / 2) break;
  }
  const bool kept = left > given * kDependent;
  for (std::int64_t i = 0; i < length; ++i) v[i] = kept ? static_cast<T>(v[i] / left) : T{0};
  return kept;
}

template <class T = float>
void orthonormalize(std::int64_t length, int rank, Written<T> columns, std::vector<int>& zeroed) {
  zeroed.clear();
  for (int k = 0; k < rank; ++k) {
    if (!scalar::orthonormalize_column<T>(length, k, columns)) zeroed.push_back(k);
  }
}

}  // namespace weft::scalar
