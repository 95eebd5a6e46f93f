#include "data_parallel/formula.h"

#include <vector>

#include "data_parallel/schemes.h"

namespace weft {

SchemeCost cost_of(const DataParallel& parallel, int bucket, int size, const LinkCost& link,
                   std::size_t micro_op_bytes) {
  std::vector<ParameterInfo> parts;
  for (const BucketPiece& piece : parallel.plan().bucket(bucket).pieces)
    parts.push_back(parallel.plan().parameter(piece.parameter));
  const SparseOptions& call = parallel.call(bucket);
  const Scheme& scheme = find_scheme(call.algorithm);
  const SchemeShape shape{
      .size = size, .quota = call.k, .parts = parts, .link = link, .micro_op_bytes = micro_op_bytes};
  return cost_of(scheme, parallel.scheme_options(), shape);
}

std::int64_t formula_bytes(const DataParallel& parallel, int size, const LinkCost& link,
                           std::size_t micro_op_bytes) {
  std::int64_t sum = 0;
  for (int b = 0; b < parallel.plan().num_buckets(); ++b)
    sum += cost_of(parallel, b, size, link, micro_op_bytes).bytes;
  return sum;
}

}  // namespace weft
