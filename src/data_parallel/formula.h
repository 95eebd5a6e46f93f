// What the operations of a step send by their formulas: to stand beside what was measured.
#pragma once

#include <cstdint>

#include "data_parallel/data_parallel.h"

namespace weft {

// Payload that the busiest rank sends in the last step, all buckets together (schemes.h): exact for one dense
// bucket, else a bound, also because the busiest rank of one bucket is not that of another. REQUIRES: a step
// has run.
std::int64_t formula_bytes(const DataParallel& parallel, int size, const LinkCost& link,
                           std::size_t micro_op_bytes);

}  // namespace weft
