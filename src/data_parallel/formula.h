// What the operations of a step send by their formulas: to stand beside what was measured.
#pragma once

#include <cstdint>

#include "collectives/sparse_allreduce/call.h"
#include "data_parallel/data_parallel.h"

namespace weft {

// A call of a sparse all-reduce as its formulas take it.
SparseShape shape_of(const SparseOptions& call, std::int64_t length, int size, const LinkCost& link,
                     std::size_t micro_op_bytes);

// Payload that the busiest rank sends in the last step, all buckets together: exact for one dense bucket,
// else a bound, because the busiest rank of one bucket is not that of another and because sparse entries
// count 8 bytes, as the paper's codec has them; powersgd's two sums by the all-reduce that they take.
// REQUIRES: a step has run.
std::int64_t formula_bytes(const DataParallel& parallel, int size, const LinkCost& link,
                           std::size_t micro_op_bytes);

}  // namespace weft
