// What the operations of a step send by their formulas: to stand beside what was measured.
#pragma once

#include <cstdint>

#include "data_parallel/data_parallel.h"

namespace weft {

// What the operation of a bucket sends, of the busiest rank (schemes.h), and how long that takes on the wire
// alone.
SchemeCost cost_of(const DataParallel& parallel, int bucket, int size, const LinkCost& link,
                   std::size_t micro_op_bytes);

// Payload that the busiest rank sends in a step, all buckets together: exact for one dense bucket, else a
// bound, also because the busiest rank of one bucket is not that of another.
std::int64_t formula_bytes(const DataParallel& parallel, int size, const LinkCost& link,
                           std::size_t micro_op_bytes);

}  // namespace weft
