#include "kernels/rows.h"
#include "measure/bench/embedding.h"

namespace weft {

namespace {

constexpr std::uint64_t kSeed = 1;

OutlineTable outline_of(const EmbeddingBench& bench) {
  OutlineTable out;
  out.name = "table";
  out.rows = bench.rows;
  out.width = bench.columns;
  out.lookups_per_step = bench.tokens;
  out.shared_per_step = bench.negatives;
  out.zipf = bench.zipf;
  return out;
}

}  // namespace

EmbeddingIds::EmbeddingIds(const EmbeddingBench& bench, int ranks)
    : bench_(bench), ranks_(ranks), draws_(outline_of(bench)) {}

std::vector<std::int64_t> EmbeddingIds::ids(int rank, std::int64_t step) const {
  return draws_.ids(kSeed, rank, step);
}

TableBatch EmbeddingIds::batch(std::int64_t step) const {
  TableBatch out;
  out.rows = bench_.rows;
  out.columns = bench_.columns;
  for (int r = 0; r < ranks_; ++r) {
    const std::vector<std::int64_t> all = ids(r, step);
    out.lists.push_back(unique_ids(all));
    out.tokens.push_back(static_cast<std::int64_t>(all.size()));
  }
  return out;
}

}  // namespace weft
