#include "data_parallel/formula.h"

#include <vector>

#include "data_parallel/schemes.h"

namespace weft {

std::int64_t formula_bytes(const DataParallel& parallel, int size, const LinkCost& link,
                           std::size_t micro_op_bytes) {
  std::int64_t sum = 0;
  for (int b = 0; b < parallel.plan().num_buckets(); ++b) {
    std::vector<ParameterInfo> parts;
    for (const BucketPiece& piece : parallel.plan().bucket(b).pieces)
      parts.push_back(parallel.plan().parameter(piece.parameter));
    const SparseOptions& call = parallel.call(b);
    const SchemeShape shape{
        .size = size, .quota = call.k, .parts = parts, .link = link, .micro_op_bytes = micro_op_bytes};
    sum += payload_bytes(find_scheme(call.algorithm), parallel.scheme_options(), shape);
  }
  return sum;
}

}  // namespace weft
