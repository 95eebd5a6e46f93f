// The parts of `weft bench sparse_allreduce`.
#pragma once

#include <optional>
#include <vector>

#include "bench_run.h"
#include "collectives/sparse_allreduce/call.h"
#include "sparse_check.h"

namespace weft::cli {

struct SparseCase {
  const SparseAlgorithm* row = nullptr;
  std::int64_t length = 0;  // real elements
  std::int64_t k = 0;
  std::uint32_t slot = 0;
};

// A case, measured. Of each iteration: the busiest (slowest) rank.
struct SparseMeasured {
  std::vector<double> seconds;
  std::vector<double> select;  // empty: not modelled
  std::vector<double> wire;
  std::vector<double> bytes;
  int rounds = 0;
  double entries_out = 0;
  double bytes_per_entry = 0;
  std::optional<SparseWorth> worth;
  SparseShape shape;
  bool correct = true;
};

SparseOptions sparse_options(const SparseBench& bench, const SparseCase& c);
// The call as its formulas take it.
SparseShape sparse_shape(const BenchOptions& options, const SparseCase& c, const LinkCost& link,
                         std::size_t micro_op_bytes);
// Whether mass_error must be no more than the rounding of additions.
bool conserves(const SparseBench& bench, const SparseAlgorithm& row);
// An element is added no more than 2 P times (on its way, and when it comes back as residual), and with
// bfloat16 its rounding error as often again; each addition rounds by 2^-24 of a sum that is no larger than
// `largest`, the sum over ranks of the largest magnitude that they put in. Relative, as mass_error is.
double mass_tolerance(int ranks, double largest, const SparseWorth& worth);
// What a rank with this residual puts in.
inline float put_in(std::span<const float> gradient, std::span<const float> residual, std::size_t i) {
  return residual.empty() ? gradient[i] : gradient[i] + residual[i];
}
inline constexpr std::int64_t kTopkaChecked = 1 << 20;  // elements of all ranks together

// On ranks that run.
SparseMeasured measure_sparse(const BenchOptions& options, const SparseCase& c, const BenchRank& rank);
// In virtual time.
SparseMeasured simulate_sparse(const BenchOptions& options, const SparseCase& c);
void bench_crossover(const BenchOptions& options, Report& report);

}  // namespace weft::cli
