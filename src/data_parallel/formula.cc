#include "data_parallel/formula.h"

#include <vector>

#include "data_parallel/quotas.h"
#include "data_parallel/schemes.h"

namespace weft {

namespace {

SchemeCost with_quota(const DataParallel& parallel, int bucket, std::int64_t quota, SchemeShape shape) {
  std::vector<ParameterInfo> parts;
  for (const BucketPiece& piece : parallel.plan().bucket(bucket).pieces)
    parts.push_back(parallel.plan().parameter(piece.parameter));
  shape.quota = quota;
  shape.parts = parts;
  SchemeCost sum;
  for (const Comm& step : parallel.steps()) {
    shape.size = step.size();
    shape.node_size = 1;  // as BucketRun takes them: flat, whatever ranks are in it
    const SchemeCost cost = cost_of(lossless_scheme(), parallel.scheme_options(), shape);
    sum = {sum.bytes + cost.bytes, sum.seconds + cost.seconds};
  }
  if (!parallel.steps().empty()) return sum;
  shape.node_size = parallel.group().node_size();
  shape.teams = parallel.state().bucket(bucket).work().team_figures.choice;
  return cost_of(find_scheme(parallel.call(bucket).algorithm), parallel.scheme_options(), shape);
}

}  // namespace

SchemeCost cost_of(const DataParallel& parallel, int bucket, int size, const LinkCost& link,
                   std::size_t micro_op_bytes) {
  return with_quota(parallel, bucket, parallel.call(bucket).k,
                    {.size = size, .quota = 0, .parts = {}, .link = link, .micro_op_bytes = micro_op_bytes});
}

// Quotas move from step to step, and so do the bytes of packed indices: they are most where all buckets are
// equally dense, because what a bucket's indices take grows ever more slowly with its quota.
std::int64_t formula_bytes(const DataParallel& parallel, int size, const LinkCost& link,
                           std::size_t micro_op_bytes) {
  const auto selects = [&](int b) { return find_scheme(parallel.call(b).algorithm).selects; };
  std::vector<std::int64_t> lengths;
  std::int64_t k = 0;
  for (int b = 0; b < parallel.plan().num_buckets(); ++b) {
    lengths.push_back(selects(b) ? parallel.plan().bucket(b).count : 0);
    if (selects(b)) k += parallel.call(b).k;
  }
  const std::vector<std::int64_t> quotas = proportional_quotas(lengths, k);
  const SchemeShape shape{
      .size = size, .quota = 0, .parts = {}, .link = link, .micro_op_bytes = micro_op_bytes};
  std::int64_t sum = 0;
  for (int b = 0; b < parallel.plan().num_buckets(); ++b) {
    const std::int64_t quota = selects(b) ? quotas[static_cast<std::size_t>(b)] : parallel.call(b).k;
    sum += with_quota(parallel, b, quota, shape).bytes;
  }
  return sum;
}

}  // namespace weft
