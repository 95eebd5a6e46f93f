// Tiles of rows share what is read of a factor. Each kernel is compiled as it is and for AVX2, which is taken
// where the processor has it; src/CMakeLists.txt compiles this file without contraction into fused
// multiply-adds, so that both give the same bits. Lanes are vectors of the compiler, passed by reference
// only: by value their calling convention would depend on the instruction set.
#include "kernels/low_rank.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>

namespace weft {

namespace {

using Index = std::int64_t;

constexpr Index kLanes = 8;
typedef float Floats __attribute__((vector_size(kLanes * sizeof(float))));     // NOLINT(modernize-use-using)
typedef double Doubles __attribute__((vector_size(kLanes * sizeof(double))));  // NOLINT(modernize-use-using)

[[gnu::always_inline]] inline void load(const float* from, Floats& to) { std::memcpy(&to, from, sizeof(to)); }
[[gnu::always_inline]] inline void store(const Floats& from, float* to) {
  std::memcpy(to, &from, sizeof(from));
}
// The first `count` lanes; the others are zeros.
[[gnu::always_inline]] inline void load_part(const float* from, Index count, Floats& to) {
  to = Floats{};
  std::memcpy(&to, from, static_cast<std::size_t>(count) * sizeof(float));
}

template <class Lanes>
[[gnu::always_inline]] inline auto sum_of(const Lanes& x) {
  return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

// kRows rows of M by kColumns columns of Q.
template <int kRows, int kColumns>
[[gnu::always_inline]] inline void dots(const MatrixShape& s, const float* __restrict m,
                                        const float* __restrict q, float* __restrict p) {
  Floats sums[kRows][kColumns] = {};
  Index j = 0;
  for (; j + kLanes <= s.columns; j += kLanes) {
    Floats right[kColumns];
    for (int k = 0; k < kColumns; ++k) load(q + k * s.columns + j, right[k]);
    for (int i = 0; i < kRows; ++i) {
      Floats left;
      load(m + i * s.columns + j, left);
      for (int k = 0; k < kColumns; ++k) sums[i][k] += left * right[k];
    }
  }
  for (int i = 0; j < s.columns && i < kRows; ++i) {
    Floats left;
    load_part(m + i * s.columns + j, s.columns - j, left);
    for (int k = 0; k < kColumns; ++k) {
      Floats right;
      load_part(q + k * s.columns + j, s.columns - j, right);
      sums[i][k] += left * right;
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int k = 0; k < kColumns; ++k) p[k * s.rows + i] = sum_of(sums[i][k]);
  }
}

template <int kRows>
[[gnu::always_inline]] inline void multiply_rows(const MatrixShape& s, const float* m, const float* q,
                                                 float* p) {
  int k = 0;
  for (; k + 2 <= s.rank; k += 2) dots<kRows, 2>(s, m, q + k * s.columns, p + k * s.rows);
  if (k < s.rank) dots<kRows, 1>(s, m, q + k * s.columns, p + k * s.rows);
}

struct Multiply {
  [[gnu::always_inline]] static inline void run(const MatrixShape& s, const float* m, const float* q,
                                                float* p) {
    constexpr int kTile = 4;
    Index i = 0;
    for (; i + kTile <= s.rows; i += kTile) multiply_rows<kTile>(s, m + i * s.columns, q, p + i);
    for (; i < s.rows; ++i) multiply_rows<1>(s, m + i * s.columns, q, p + i);
  }
};

// Of M^T P: some columns of M, some columns of P, and the sums with a distance of their own.
struct Part {
  Index m_stride, p_stride, q_stride;
  Index width;  // columns of M
  int rank;
};

// q += what kRows rows of M give, one row after the other, in kVectors vectors of columns. (Two are a line of
// the cache. Rows and columns whose distance is a power of two share few places in it: a line that is used up
// at once need not stay.)
template <int kRows, int kVectors>
[[gnu::always_inline]] inline void add_tile(const Part& s, const float* __restrict m,
                                            const float* __restrict p, float* __restrict q) {
  Floats left[kRows][kVectors];
  for (int i = 0; i < kRows; ++i) {
    for (int v = 0; v < kVectors; ++v) load(m + i * s.m_stride + v * kLanes, left[i][v]);
  }
  for (int k = 0; k < s.rank; ++k) {
    Floats sums[kVectors];
    for (int v = 0; v < kVectors; ++v) load(q + k * s.q_stride + v * kLanes, sums[v]);
    for (int i = 0; i < kRows; ++i) {
      for (int v = 0; v < kVectors; ++v) sums[v] += p[k * s.p_stride + i] * left[i][v];
    }
    for (int v = 0; v < kVectors; ++v) store(sums[v], q + k * s.q_stride + v * kLanes);
  }
}

template <int kRows>
[[gnu::always_inline]] inline void add_rows(const Part& s, const float* __restrict m,
                                            const float* __restrict p, float* __restrict q) {
  Index j = 0;
  for (; j + 2 * kLanes <= s.width; j += 2 * kLanes) add_tile<kRows, 2>(s, m + j, p, q + j);
  for (; j + kLanes <= s.width; j += kLanes) add_tile<kRows, 1>(s, m + j, p, q + j);
  for (; j < s.width; ++j) {
    for (int k = 0; k < s.rank; ++k) {
      float sum = q[k * s.q_stride + j];
      for (int i = 0; i < kRows; ++i) sum += p[k * s.p_stride + i] * m[i * s.m_stride + j];
      q[k * s.q_stride + j] = sum;
    }
  }
}

struct MultiplyTransposed {
  static constexpr Index kStrip = 64;
  static constexpr int kMostColumns = 32;
  static constexpr int kFew = 8;

  [[gnu::always_inline]] static inline void add_all(const Part& part, Index rows, const float* m,
                                                    const float* p, float* q) {
    constexpr int kTile = 4;
    Index i = 0;
    for (; i + kTile <= rows; i += kTile) add_rows<kTile>(part, m + i * part.m_stride, p + i, q);
    for (; i < rows; ++i) add_rows<1>(part, m + i * part.m_stride, p + i, q);
  }

  // Few columns: M is read once, as it lies. Many: strips of it, so that their sums stay in the cache.
  [[gnu::always_inline]] static inline void run(const MatrixShape& s, const float* m, const float* p,
                                                float* q) {
    for (Index j = 0; j < s.rank * s.columns; ++j) q[j] = 0;
    if (s.rank <= kFew) {
      const Part whole{s.columns, s.rows, s.columns, s.columns, s.rank};
      return add_all(whole, s.rows, m, p, q);
    }
    for (Index j = 0; j < s.columns; j += kStrip) {
      for (int k = 0; k < s.rank; k += kMostColumns) {
        float sums[kMostColumns * kStrip] = {};
        const Part part{s.columns, s.rows, kStrip, std::min(kStrip, s.columns - j),
                        std::min(kMostColumns, s.rank - k)};
        add_all(part, s.rows, m + j, p + k * s.rows, sums);
        for (int c = 0; c < part.rank; ++c) {
          std::memcpy(q + (k + c) * s.columns + j, sums + c * kStrip,
                      static_cast<std::size_t>(part.width) * sizeof(float));
        }
      }
    }
  }
};

template <int kRows, int kVectors>
[[gnu::always_inline]] inline void reconstruct_tile(const MatrixShape& s, const float* __restrict p,
                                                    const float* __restrict q, float divisor,
                                                    float* __restrict y, float* __restrict m) {
  Floats sums[kRows][kVectors] = {};
  for (int k = 0; k < s.rank; ++k) {
    Floats right[kVectors];
    for (int v = 0; v < kVectors; ++v) load(q + k * s.columns + v * kLanes, right[v]);
    for (int i = 0; i < kRows; ++i) {
      for (int v = 0; v < kVectors; ++v) sums[i][v] += p[k * s.rows + i] * right[v];
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int v = 0; v < kVectors; ++v) {
      const Index at = i * s.columns + v * kLanes;
      Floats left;
      load(m + at, left);
      store(sums[i][v], y + at);
      left -= sums[i][v] / divisor;
      store(left, m + at);
    }
  }
}

template <int kRows>
[[gnu::always_inline]] inline void reconstruct_rows(const MatrixShape& s, const float* __restrict p,
                                                    const float* __restrict q, float divisor,
                                                    float* __restrict y, float* __restrict m) {
  Index j = 0;
  for (; j + 2 * kLanes <= s.columns; j += 2 * kLanes)
    reconstruct_tile<kRows, 2>(s, p, q + j, divisor, y + j, m + j);
  for (; j + kLanes <= s.columns; j += kLanes) reconstruct_tile<kRows, 1>(s, p, q + j, divisor, y + j, m + j);
  for (; j < s.columns; ++j) {
    for (int i = 0; i < kRows; ++i) {
      float sum = 0;
      for (int k = 0; k < s.rank; ++k) sum += p[k * s.rows + i] * q[k * s.columns + j];
      y[i * s.columns + j] = sum;
      m[i * s.columns + j] -= sum / divisor;
    }
  }
}

struct Reconstruct {
  [[gnu::always_inline]] static inline void run(const MatrixShape& s, const float* p, const float* q,
                                                float divisor, float* y, float* m) {
    constexpr int kTile = 4;
    Index i = 0;
    for (; i + kTile <= s.rows; i += kTile) {
      reconstruct_rows<kTile>(s, p + i, q, divisor, y + i * s.columns, m + i * s.columns);
    }
    for (; i < s.rows; ++i) {
      reconstruct_rows<1>(s, p + i, q, divisor, y + i * s.columns, m + i * s.columns);
    }
  }
};

struct Dot {
  [[gnu::always_inline]] static inline void run(const float* a, const float* b, Index count, double& out) {
    Doubles sums = {};
    Floats left;
    Floats right;
    Index i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      load(a + i, left);
      load(b + i, right);
      sums += __builtin_convertvector(left, Doubles) * __builtin_convertvector(right, Doubles);
    }
    if (i < count) {
      load_part(a + i, count - i, left);
      load_part(b + i, count - i, right);
      sums += __builtin_convertvector(left, Doubles) * __builtin_convertvector(right, Doubles);
    }
    out = sum_of(sums);
  }
};

struct Subtract {
  [[gnu::always_inline]] static inline void run(float* __restrict v, const float* __restrict u, Index count,
                                                double along) {
    for (Index i = 0; i < count; ++i) {
      v[i] = static_cast<float>(static_cast<double>(v[i]) - along * static_cast<double>(u[i]));
    }
  }
};

struct Divide {
  [[gnu::always_inline]] static inline void run(float* v, Index count, double by) {
    for (Index i = 0; i < count; ++i) v[i] = static_cast<float>(static_cast<double>(v[i]) / by);
  }
};

#if defined(__x86_64__)
template <class Kernel, class... Args>
[[gnu::target("avx2")]] void avx2(Args&... args) {
  Kernel::run(args...);
}
#endif

template <class Kernel, class... Args>
void plain(Args&... args) {
  Kernel::run(args...);
}

template <class Kernel, class... Args>
void run(Args&&... args) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return avx2<Kernel>(args...);
#endif
  return plain<Kernel>(args...);
}

double dot(const float* a, const float* b, Index count) {
  double out = 0;
  run<Dot>(a, b, count, out);
  return out;
}

}  // namespace

void multiply(const MatrixShape& shape, std::span<const float> m, std::span<const float> q,
              std::span<float> p) {
  run<Multiply>(shape, m.data(), q.data(), p.data());
}

void multiply_transposed(const MatrixShape& shape, std::span<const float> m, std::span<const float> p,
                         std::span<float> q) {
  run<MultiplyTransposed>(shape, m.data(), p.data(), q.data());
}

void reconstruct(const MatrixShape& shape, std::span<const float> p, std::span<const float> q, float divisor,
                 std::span<float> y, std::span<float> m) {
  run<Reconstruct>(shape, p.data(), q.data(), divisor, y.data(), m.data());
}

bool orthonormalize_column(std::int64_t length, int column, std::span<float> columns) {
  float* const v = columns.data() + column * length;
  double given = std::sqrt(dot(v, v, length));
  if (given > kLong || given < 1 / kLong) {
    run<Divide>(v, length, given > kLong ? kScale : 1 / kScale);
    given = std::sqrt(dot(v, v, length));
  }
  double left = given;
  for (int pass = 0; pass < 2; ++pass) {
    for (int k = 0; k < column; ++k) {
      const float* const u = columns.data() + k * length;
      run<Subtract>(v, u, length, dot(v, u, length));
    }
    left = std::sqrt(dot(v, v, length));
    if (left > given / 2) break;
  }
  if (left > given * kDependent) {
    run<Divide>(v, length, left);
    return true;
  }
  for (Index i = 0; i < length; ++i) v[i] = 0;
  return false;
}

void orthonormalize(std::int64_t length, int rank, std::span<float> columns, std::vector<int>& zeroed) {
  zeroed.clear();
  for (int k = 0; k < rank; ++k) {
    if (!orthonormalize_column(length, k, columns)) zeroed.push_back(k);
  }
}

}  // namespace weft
