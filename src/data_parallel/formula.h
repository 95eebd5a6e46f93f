// What the operations of a step send by their formulas: to stand beside what was measured.
#pragma once

#include <cstdint>

#include "collectives/sparse_allreduce/call.h"
#include "data_parallel/data_parallel.h"

namespace weft {

// A call of a sparse all-reduce as its formulas take it.
SparseShape shape_of(const SparseOptions& call, std::int64_t length, int size, const LinkCost& link,
                     std::size_t micro_op_bytes);

// What a bucket's operation sends, of the busiest rank, and how long it takes on the wire alone, by its
// formulas: sparse entries count 8 bytes, as the paper's codec has them; powersgd's two sums by the
// all-reduce that they take.
struct BucketCost {
  std::int64_t bytes = 0;
  double seconds = 0;
};
BucketCost cost_of(const DataParallel& parallel, int bucket, int size, const LinkCost& link,
                   std::size_t micro_op_bytes);

// Payload that the busiest rank sends in a step, all buckets together: exact for one dense bucket, else a
// bound, because the busiest rank of one bucket is not that of another.
std::int64_t formula_bytes(const DataParallel& parallel, int size, const LinkCost& link,
                           std::size_t micro_op_bytes);

}  // namespace weft
