// An order of [0, size) under a key, one place at a time: no table, no state.
#pragma once

#include <cstdint>

#include "weft/random.h"

namespace weft {

class Permutation {
 public:
  // REQUIRES: 1 <= size <= 2^62.
  Permutation(std::int64_t size, std::uint64_t seed, std::uint64_t which);
  std::int64_t operator()(std::int64_t i) const;  // REQUIRES: 0 <= i < size

 private:
  std::uint64_t round_trip(std::uint64_t x) const;

  std::uint64_t size_;
  std::uint64_t which_;
  int half_bits_ = 1;
  PhiloxKey key_;
};

}  // namespace weft
