// The fold kernels: one loop for every (reduction, type), compiled for several instruction sets, of which the
// widest that the processor has is taken at run time. (Not by target_clones: its resolvers run before a
// sanitizer is ready.)
#include "kernels/fold.h"

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include "base/half.h"
#include "weft/error.h"

namespace weft {

namespace {

struct SumOf {
  template <class T>
  [[gnu::always_inline]] static inline T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      using Unsigned = std::make_unsigned_t<T>;
      return static_cast<T>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b));
    } else {
      const T sum = a + b;
      return sum == sum ? sum : static_cast<T>(__builtin_nan(""));
    }
  }
};

// Min (Below) or max. Of two floats that compare equal the bits are joined: -0 | +0 is -0, -0 & +0 is +0.
template <bool Below>
struct ExtremeOf {
  template <class T>
  [[gnu::always_inline]] static inline T apply(T a, T b) {
    const bool take_a = Below ? a < b : b < a;
    if constexpr (std::is_integral_v<T>) {
      return take_a ? a : b;
    } else {
      using Bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
      const Bits x = __builtin_bit_cast(Bits, a);
      const Bits y = __builtin_bit_cast(Bits, b);
      const Bits unequal = take_a ? x : y;
      const Bits ordered = a == b ? (Below ? (x | y) : (x & y)) : unequal;
      const Bits right = b == b ? ordered : __builtin_bit_cast(Bits, static_cast<T>(__builtin_nan("")));
      return __builtin_bit_cast(T,
                                a == a ? right : __builtin_bit_cast(Bits, static_cast<T>(__builtin_nan(""))));
    }
  }
};

template <class Op, class T>
[[gnu::always_inline]] inline T fold_one(T a, T b) {
  if constexpr (std::is_same_v<T, bfloat16>)
    return half::narrow_bfloat16(Op::apply(half::widen(a), half::widen(b)));
  else if constexpr (std::is_same_v<T, float16>)
    return half::narrow_float16(Op::apply(half::widen(a), half::widen(b)));
  else
    return Op::apply(a, b);
}

// memcpy: neither side need be aligned.
template <class T>
[[gnu::always_inline]] inline T load(const std::byte* from, std::size_t i) {
  T value;
  std::memcpy(&value, from + i * sizeof(T), sizeof(T));
  return value;
}

template <class Op, class T>
[[gnu::always_inline]] inline void loop_into(std::byte* __restrict into, const std::byte* __restrict from,
                                             std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    const T value = fold_one<Op>(load<T>(into, i), load<T>(from, i));
    std::memcpy(into + i * sizeof(T), &value, sizeof(T));
  }
}

template <class Op, class T>
[[gnu::always_inline]] inline void loop_two(std::byte* __restrict into, const std::byte* __restrict a,
                                            const std::byte* __restrict b, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    const T value = fold_one<Op>(load<T>(a, i), load<T>(b, i));
    std::memcpy(into + i * sizeof(T), &value, sizeof(T));
  }
}

struct Plain {
  template <class Op, class T>
  static void into(std::byte* to, const std::byte* from, std::size_t n) {
    loop_into<Op, T>(to, from, n);
  }
  template <class Op, class T>
  static void two(std::byte* to, const std::byte* a, const std::byte* b, std::size_t n) {
    loop_two<Op, T>(to, a, b, n);
  }
};

#if defined(__x86_64__)
struct Avx2 {
  template <class Op, class T>
  [[gnu::target("avx2")]] static void into(std::byte* to, const std::byte* from, std::size_t n) {
    loop_into<Op, T>(to, from, n);
  }
  template <class Op, class T>
  [[gnu::target("avx2")]] static void two(std::byte* to, const std::byte* a, const std::byte* b,
                                          std::size_t n) {
    loop_two<Op, T>(to, a, b, n);
  }
};

struct Avx512 {
  template <class Op, class T>
  [[gnu::target("avx512f,avx512bw,avx512vl,avx512dq")]] static void into(std::byte* to, const std::byte* from,
                                                                         std::size_t n) {
    loop_into<Op, T>(to, from, n);
  }
  template <class Op, class T>
  [[gnu::target("avx512f,avx512bw,avx512vl,avx512dq")]] static void two(std::byte* to, const std::byte* a,
                                                                        const std::byte* b, std::size_t n) {
    loop_two<Op, T>(to, a, b, n);
  }
};
#endif

struct Kernel {
  void (*into)(std::byte*, const std::byte*, std::size_t);
  void (*two)(std::byte*, const std::byte*, const std::byte*, std::size_t);
};
// By DType (less bytes) and Reduction, in the order of the enums.
using Kernels = std::array<std::array<Kernel, 3>, 6>;

template <class Level, class T>
constexpr std::array<Kernel, 3> kernels_of_type() {
  return {{{Level::template into<SumOf, T>, Level::template two<SumOf, T>},
           {Level::template into<ExtremeOf<true>, T>, Level::template two<ExtremeOf<true>, T>},
           {Level::template into<ExtremeOf<false>, T>, Level::template two<ExtremeOf<false>, T>}}};
}

template <class Level>
constexpr Kernels kKernels = {kernels_of_type<Level, float>(),        kernels_of_type<Level, double>(),
                              kernels_of_type<Level, bfloat16>(),     kernels_of_type<Level, float16>(),
                              kernels_of_type<Level, std::int32_t>(), kernels_of_type<Level, std::int64_t>()};

const Kernels& widest_kernels() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    return kKernels<Avx512>;
  }
  if (__builtin_cpu_supports("avx2")) return kKernels<Avx2>;
#endif
  return kKernels<Plain>;
}

const Kernel& kernel_of(DType dtype, Reduction reduction) {
  static const Kernels& kernels = widest_kernels();
  const auto type = static_cast<std::size_t>(dtype);
  const auto operation = static_cast<std::size_t>(reduction);
  if (dtype == DType::bytes) throw UsageError("bytes have no sum, minimum or maximum: name the element type");
  if (type > kernels.size() || operation >= 3) throw UsageError("unknown element type or reduction");
  return kernels[type - 1][operation];
}

void check_lengths(const Dense& into, std::size_t bytes) {
  if (into.size_bytes() != bytes) {
    throw UsageError("fold of " + std::to_string(bytes) + " bytes into " + std::to_string(into.size_bytes()));
  }
}

}  // namespace

void fold_into(const Dense& into, std::span<const std::byte> from, Reduction reduction) {
  check_lengths(into, from.size());
  kernel_of(into.dtype, reduction).into(into.data, from.data(), static_cast<std::size_t>(into.count));
}

void fold_two(const Dense& into, std::span<const std::byte> a, std::span<const std::byte> b,
              Reduction reduction) {
  check_lengths(into, a.size());
  check_lengths(into, b.size());
  if (into.data == a.data()) return fold_into(into, b, reduction);
  if (into.data == b.data()) return fold_into(into, a, reduction);  // the same bits: see fold.h
  kernel_of(into.dtype, reduction).two(into.data, a.data(), b.data(), static_cast<std::size_t>(into.count));
}

}  // namespace weft
