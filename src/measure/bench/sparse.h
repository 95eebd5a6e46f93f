// The parts of `weft bench sparse_allreduce`.
#pragma once

#include <optional>
#include <vector>

#include "measure/bench/run.h"
#include "measure/bench/sparse_check.h"
#include "measure/bench/sparse_vector.h"

namespace weft {

// The operations of a step as their formulas take them.
struct SparseFormula {
  struct Operation {
    const SparseAlgorithm* row = nullptr;
    SparseShape shape;
  };
  std::vector<Operation> operations;              // one, or one for each bucket
  double bytes() const;                           // in the call's codec; of several operations a bound
  int rounds() const;                             // of the one with most: they are in flight together
  bool is_exact(const std::string& codec) const;  // bytes() is what is sent, not only a bound on it
};
// REQUIRES: the vector has run a step.
SparseFormula formula_of(const SparseVector& vector, int ranks, const LinkCost& link,
                         std::size_t micro_op_bytes);

// A case, measured. Of each iteration: the busiest (slowest) rank.
struct SparseMeasured {
  std::vector<double> seconds;
  std::vector<double> select;  // empty: not modelled
  std::vector<double> wire;
  std::vector<double> bytes;
  std::vector<double> formula_bytes;  // adaptive quotas are others in each iteration
  int rounds = 0;
  double entries_out = 0;
  double bytes_per_entry = 0;
  std::optional<SparseWorth> worth;
  SparseFormula formula;  // of the last iteration
  bool correct = true;
};

// Whether mass_error must be no more than the rounding of additions.
bool conserves(const SparseBench& bench, const SparseAlgorithm& row);
// An element is added no more than 2 P times (on its way, and when it comes back as residual), and with
// bfloat16 its rounding error as often again; each addition rounds by 2^-24 of a sum that is no larger than
// `largest`, the sum over ranks of the largest magnitude that they put in. Relative, as mass_error is.
double mass_tolerance(int ranks, double largest, const SparseWorth& worth);
// Whether the result is compared with a plain program: a sum of selections, one vector, not too much of it.
bool checks_sum(const BenchOptions& options, const SparseCase& c);

// On ranks that run.
SparseMeasured measure_sparse(const BenchOptions& options, const SparseCase& c, const BenchRank& rank);
// In virtual time.
SparseMeasured simulate_sparse(const BenchOptions& options, const SparseCase& c);
void bench_crossover(const BenchOptions& options, BenchReport& report);

}  // namespace weft
