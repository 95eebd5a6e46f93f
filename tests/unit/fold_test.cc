// The fold kernels against their plain twin, and the 16-bit floats against arithmetic.
#include "kernels/fold.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/scalar.h"
#include "reference/data.h"
#include "weft/error.h"

namespace weft {
namespace {

constexpr DType kNumbers[] = {DType::float32, DType::float64, DType::bfloat16,
                              DType::float16, DType::int32,   DType::int64};
constexpr Reduction kReductions[] = {Reduction::sum, Reduction::min, Reduction::max};

// Half of the values are any bits (NaN, infinities and subnormals among them), half are of a few special
// ones.
template <class T>
T special(std::uint64_t h) {
  if (h % 2 == 0) {
    std::array<std::byte, sizeof(T)> bits;
    const std::uint64_t any = mix(h);
    std::memcpy(bits.data(), &any, sizeof(T));
    return std::bit_cast<T>(bits);
  }
  const double values[] = {0.0,  -0.0,     1.0,     -1.0,      INFINITY, -INFINITY, NAN,
                           -NAN, 0x1p-149, 0x1p-24, -0x1p-133, 65504,    65519,     3e38};
  if constexpr (std::is_integral_v<T>)
    return (h >> 7) % 3 == 0 ? std::numeric_limits<T>::max() : std::numeric_limits<T>::min();
  else
    return reference::from_double<T>(values[(h >> 1) % std::size(values)]);
}

template <class T>
std::vector<std::byte> special_bytes(std::size_t n, std::uint64_t seed, std::size_t offset) {
  std::vector<std::byte> bytes(n * sizeof(T) + offset);
  for (std::size_t i = 0; i < n; ++i) {
    const T value = special<T>(reference::hash(seed, 0, i));
    std::memcpy(bytes.data() + offset + i * sizeof(T), &value, sizeof(T));
  }
  return bytes;
}

TEST(Fold, EqualsItsPlainTwinToTheBit) {
  for (const DType dtype : kNumbers) {
    for (const Reduction reduction : kReductions) {
      for (const std::size_t n : {0, 1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 65, 127, 1001}) {
        for (const std::size_t offset : {0, 1, 3}) {
          scalar::with_type(dtype, [&]<class T>(T) {
            const std::vector<std::byte> a = special_bytes<T>(n, 1, offset);
            const std::vector<std::byte> b = special_bytes<T>(n, 2, offset);
            const auto left = std::span(a).subspan(offset);
            const auto right = std::span(b).subspan(offset);
            const auto count = static_cast<std::int64_t>(n);
            std::vector<std::byte> expected(n * sizeof(T));
            scalar::fold_two(Dense(expected.data(), count, dtype), left, right, reduction);
            std::vector<std::byte> in_place(a);
            fold_into(Dense(in_place.data() + offset, count, dtype), right, reduction);
            in_place.erase(in_place.begin(), in_place.begin() + static_cast<std::ptrdiff_t>(offset));
            EXPECT_EQ(in_place, expected)
                << name_of(dtype) << " " << name_of(reduction) << " " << n << " +" << offset;
            std::vector<std::byte> out(n * sizeof(T));
            fold_two(Dense(out.data(), count, dtype), left, right, reduction);
            EXPECT_EQ(out, expected) << name_of(dtype) << " " << name_of(reduction) << " " << n << " +"
                                     << offset;
            fold_two(Dense(out.data(), count, dtype), right, left, reduction);
            EXPECT_EQ(out, expected) << "turned around: " << name_of(dtype) << " " << name_of(reduction);
          });
        }
      }
    }
  }
}

TEST(Fold, EveryPairOfSixteenBitClassesRoundsLikeTheTwin) {  // every value against a sample of others
  for (const DType dtype : {DType::bfloat16, DType::float16}) {
    std::vector<std::uint16_t> a(65536);
    std::vector<std::uint16_t> b(65536);
    std::vector<std::uint16_t> expected(65536);
    for (std::uint64_t round = 0; round < 8; ++round) {
      for (std::size_t i = 0; i < a.size(); ++i) {
        a[i] = static_cast<std::uint16_t>(i);
        b[i] = static_cast<std::uint16_t>(reference::hash(round, 5, i));
      }
      const Dense into(reinterpret_cast<std::byte*>(a.data()), 65536, dtype);
      scalar::fold_two(Dense(reinterpret_cast<std::byte*>(expected.data()), 65536, dtype),
                       std::as_bytes(std::span(a)), std::as_bytes(std::span(b)), Reduction::sum);
      fold_into(into, std::as_bytes(std::span(b)), Reduction::sum);
      EXPECT_EQ(a, expected) << name_of(dtype);
    }
  }
}

TEST(Fold, NaNAndSignedZeroAreDefined) {
  const auto fold = [](float a, float b, Reduction reduction) {
    fold_into(Dense(std::span(&a, 1)), std::as_bytes(std::span(&b, 1)), reduction);
    return std::bit_cast<std::uint32_t>(a);
  };
  for (const Reduction reduction : kReductions) {
    EXPECT_EQ(fold(std::nanf("123"), 1.0f, reduction), 0x7fc00000u);
    EXPECT_EQ(fold(1.0f, -std::nanf("7"), reduction), 0x7fc00000u);
  }
  EXPECT_EQ(fold(INFINITY, -INFINITY, Reduction::sum), 0x7fc00000u);
  EXPECT_EQ(fold(INFINITY, -INFINITY, Reduction::min), std::bit_cast<std::uint32_t>(-INFINITY));
  EXPECT_EQ(fold(0.0f, -0.0f, Reduction::min), 0x80000000u);
  EXPECT_EQ(fold(0.0f, -0.0f, Reduction::max), 0u);
}

TEST(Fold, RefusesBytesAndWrongLengths) {
  std::vector<std::byte> a(8);
  EXPECT_THROW(fold_into(Dense(a.data(), 8, DType::bytes), a, Reduction::sum), UsageError);
  EXPECT_THROW(fold_into(Dense(a.data(), 1, DType::float32), a, Reduction::sum), UsageError);
  EXPECT_THROW(fold_into(Dense(a.data(), 1, DType::int64), a, static_cast<Reduction>(9)), UsageError);
}

double half_value(std::uint16_t bits) {  // by the definition of the format
  const int exponent = bits >> 10 & 31;
  const int fraction = bits & 1023;
  const double magnitude =
      exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

TEST(Float16, EveryValueIsWhatTheFormatSays) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const float16 x{static_cast<std::uint16_t>(bits)};
    if ((bits & 0x7c00) == 0x7c00) {
      EXPECT_EQ(std::isnan(to_float(x)), (bits & 1023) != 0);
      EXPECT_EQ(std::isinf(to_float(x)), (bits & 1023) == 0);
      continue;
    }
    EXPECT_EQ(static_cast<double>(to_float(x)), half_value(x.bits)) << bits;
    EXPECT_EQ(to_float16(to_float(x)), x) << bits;
  }
}

// Between two neighbours the middle goes to the even one, and whatever is off the middle to the nearer one.
template <class Half, class Narrow>
void check_rounding(std::uint32_t first_infinity, Narrow narrow) {
  for (std::uint32_t bits = 0; bits + 1 < first_infinity; ++bits) {
    const float low = to_float(Half{static_cast<std::uint16_t>(bits)});
    const float high = to_float(Half{static_cast<std::uint16_t>(bits + 1)});
    const float middle = low + (high - low) / 2;
    if (middle == low || middle == high) continue;  // below the smallest float
    for (const std::uint32_t sign : {0u, 0x8000u}) {
      const float s = sign != 0 ? -1.0f : 1.0f;
      EXPECT_EQ(narrow(s * middle).bits, (bits + (bits & 1)) | sign) << bits;
      EXPECT_EQ(narrow(s * std::nextafter(middle, 0.0f)).bits, bits | sign) << bits;
      EXPECT_EQ(narrow(s * std::nextafter(middle, INFINITY)).bits, (bits + 1) | sign) << bits;
    }
  }
}
TEST(Float16, RoundsToNearestEven) {
  check_rounding<float16>(0x7c00, to_float16);
  EXPECT_EQ(to_float16(65519.996f).bits, 0x7bff);
  EXPECT_EQ(to_float16(65520.0f).bits, 0x7c00);
  EXPECT_EQ(to_float16(-1e30f).bits, 0xfc00);
  EXPECT_EQ(to_float16(0x1p-25f).bits, 0);
  EXPECT_EQ(to_float16(std::nanf("")).bits & 0x7c00, 0x7c00);
}
TEST(Bfloat16, RoundsToNearestEven) {
  check_rounding<bfloat16>(0x7f80, to_bfloat16);
  EXPECT_EQ(to_bfloat16(std::numeric_limits<float>::max()).bits, 0x7f80);
  EXPECT_TRUE(std::isnan(to_float(to_bfloat16(std::bit_cast<float>(0x7f800001u)))));
}

}  // namespace
}  // namespace weft
