// Element-wise reduction kernels on spans.
//
// What they compute, to the bit and in every build (scalar.h is the definition):
//   integers        sum wraps around
//   16-bit floats   widened to float, reduced there, rounded to nearest even once per addition
//   NaN             on either side it makes the result NaN, for min and max too: always the same quiet NaN
//   min, max        -0 is below +0
// So a (reduction) b and b (reduction) a are the same bits, and ranks that combine two values from both ends
// agree.
#pragma once

#include <cstddef>
#include <span>

#include "weft/dtype.h"

namespace weft {

// into[i] = into[i] (reduction) from[i]. REQUIRES: from.size() == into.size_bytes(), no overlap; either may
// be unaligned; dtype not bytes.
void fold_into(const Dense& into, std::span<const std::byte> from, Reduction reduction);
// into[i] = a[i] (reduction) b[i]: the same value as copying a to into and folding b. REQUIRES: as above;
// `into` may be a or b, but must not overlap them otherwise.
void fold_two(const Dense& into, std::span<const std::byte> a, std::span<const std::byte> b,
              Reduction reduction);

}  // namespace weft
