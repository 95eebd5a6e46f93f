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
std::uint64_t factor_bytes(const LowRank& low_rank, std::string_view all_reduce, Shape shape,
                           const LinkCost& link) {
  std::uint64_t sum = 0;
  for (const std::int64_t count : {low_rank.first_count(), low_rank.second_count()}) {
    shape.count = count;
    if (count > 0) sum += pick(Family::all_reduce, all_reduce, shape, link).bytes(shape);
  }
  return sum;
}

}  // namespace

std::int64_t formula_bytes(const DataParallel& parallel, int size, const LinkCost& link,
                           std::size_t micro_op_bytes) {
  std::int64_t sum = 0;
  for (int b = 0; b < parallel.plan().num_buckets(); ++b) {
    if (const LowRank* const low_rank = parallel.low_rank(b)) {
      const Shape shape{.size = size, .micro_op_bytes = micro_op_bytes};
      sum += static_cast<std::int64_t>(factor_bytes(*low_rank, parallel.order_of_additions(), shape, link));
      continue;
    }
    const SparseOptions& call = parallel.call(b);
    const SparseShape shape = shape_of(call, parallel.plan().bucket(b).count, size, link, micro_op_bytes);
    sum += coo_bytes(find_sparse_algorithm(call.algorithm), shape);
  }
  return sum;
}

}  // namespace weft
