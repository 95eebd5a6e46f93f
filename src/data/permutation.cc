// A Feistel network over the next even power of two, walked until it lands inside: at most 4 trips on
// average.
//   Step 1  cut the number into two halves of equal width
//   Step 2  eight rounds: (left, right) = (right, left ^ philox(right)); invertible whatever philox gives
//   Step 3  a result outside [0, size) is put in again: the walk is a cycle of a permutation, so it comes
//           back inside
// Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002.
#include "data/permutation.h"

namespace weft {

namespace {

constexpr std::uint32_t kPurpose = 0x7065'726du;  // "perm"
constexpr std::uint32_t kRounds = 8;

}  // namespace

Permutation::Permutation(std::int64_t size, std::uint64_t seed, std::uint64_t which)
    : size_(static_cast<std::uint64_t>(size)),
      which_(which),
      key_{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)} {
  while (half_bits_ < 31 && std::uint64_t{1} << (2 * half_bits_) < size_) ++half_bits_;
}

std::uint64_t Permutation::round_trip(std::uint64_t x) const {
  const std::uint64_t mask = (std::uint64_t{1} << half_bits_) - 1;
  // Step 1
  std::uint64_t left = x >> half_bits_, right = x & mask;
  // Step 2
  for (std::uint32_t round = 0; round < kRounds; ++round) {
    const PhiloxCounter word =
        philox({static_cast<std::uint32_t>(right), kPurpose ^ round, static_cast<std::uint32_t>(which_),
                static_cast<std::uint32_t>(which_ >> 32)},
               key_);
    const std::uint64_t mixed = left ^ (word[0] & mask);
    left = right;
    right = mixed;
  }
  return left << half_bits_ | right;
}

std::int64_t Permutation::operator()(std::int64_t i) const {
  auto x = static_cast<std::uint64_t>(i);
  do {
    x = round_trip(x);  // Step 3
  } while (x >= size_);
  return static_cast<std::int64_t>(x);
}

}  // namespace weft
