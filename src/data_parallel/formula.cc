#include "data_parallel/formula.h"

#include <bit>

#include "collectives/registry.h"

namespace weft {

SparseShape shape_of(const SparseOptions& call, std::int64_t length, int size, const LinkCost& link,
                     std::size_t micro_op_bytes) {
  SparseShape shape;
  shape.size = size;
  shape.length = length;
  shape.k = call.k;
  shape.blocks = call.blocks == "dealt" ? Deal::Kind::dealt : Deal::Kind::contiguous;
  shape.link = link;
  shape.micro_op_bytes = micro_op_bytes;
  const bool power = std::has_single_bit(static_cast<unsigned>(call.teams));
  TeamChoice teams{call.teams, call.gather == "r-sag" || (call.gather == "auto" && power)};
  if (teams.teams == 0) teams = choose_teams(size, length, call.k, link);
  shape.teams = teams.teams;
  shape.recursive = teams.recursive;
  return shape;
}

namespace {

// The two sums of powersgd.
BucketCost factor_cost(const LowRank& low_rank, std::string_view all_reduce, Shape shape,
                       const LinkCost& link) {
  BucketCost sum;
  for (const std::int64_t count : {low_rank.first_count(), low_rank.second_count()}) {
    shape.count = count;
    if (count == 0) continue;
    const auto& row = pick(Family::all_reduce, all_reduce, shape, link);
    sum.bytes += static_cast<std::int64_t>(row.bytes(shape));
    sum.seconds += row.seconds(shape, link);
  }
  return sum;
}

}  // namespace

BucketCost cost_of(const DataParallel& parallel, int bucket, int size, const LinkCost& link,
                   std::size_t micro_op_bytes) {
  if (size == 1) return {};
  if (const LowRank* const low_rank = parallel.low_rank(bucket)) {
    const Shape shape{.size = size, .micro_op_bytes = micro_op_bytes};
    return factor_cost(*low_rank, parallel.order_of_additions(), shape, link);
  }
  const SparseOptions& call = parallel.call(bucket);
  const SparseShape shape =
      shape_of(call, parallel.plan().bucket(bucket).count, size, link, micro_op_bytes);
  const SparseAlgorithm& row = find_sparse_algorithm(call.algorithm);
  return {coo_bytes(row, shape), sparse_wire_seconds(row, shape, link)};
}

std::int64_t formula_bytes(const DataParallel& parallel, int size, const LinkCost& link,
                           std::size_t micro_op_bytes) {
  std::int64_t sum = 0;
  for (int b = 0; b < parallel.plan().num_buckets(); ++b)
    sum += cost_of(parallel, b, size, link, micro_op_bytes).bytes;
  return sum;
}

}  // namespace weft
