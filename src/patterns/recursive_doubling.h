// Recursive doubling for any size. The core is the largest power of two; each rank beyond it (an extra) first
// gives its vector to rank - core and at the end gets the result back. Inside the core, rank r exchanges with
// r XOR 2^h.
#pragma once

#include <bit>

namespace weft {

constexpr int doubling_core(int size) {
  return static_cast<int>(std::bit_floor(static_cast<unsigned>(size)));
}
constexpr bool doubling_has_extras(int size) { return doubling_core(size) != size; }
constexpr int doubling_exchanges(int size) {
  return std::bit_width(static_cast<unsigned>(doubling_core(size))) - 1;
}
constexpr int doubling_hops(int size) {
  return doubling_exchanges(size) + (doubling_has_extras(size) ? 2 : 0);
}
constexpr int doubling_partner(int rank, int exchange) { return rank ^ (1 << exchange); }
// The extra of this core rank, or -1.
constexpr int doubling_extra_of(int rank, int size) {
  return rank + doubling_core(size) < size ? rank + doubling_core(size) : -1;
}

static_assert(doubling_core(1) == 1 && doubling_hops(1) == 0 && doubling_hops(8) == 3 &&
              doubling_hops(5) == 4);
static_assert(doubling_extra_of(0, 5) == 4 && doubling_extra_of(1, 5) == -1 && doubling_extra_of(3, 8) == -1);
static_assert(doubling_partner(doubling_partner(5, 1), 1) == 5);

}  // namespace weft
