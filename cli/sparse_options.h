// The flags of `weft bench sparse_allreduce`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "data_parallel/quotas.h"
#include "weft/sparse.h"
#include "workload/distributions.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace weft::cli {

// Checked.
struct SparseBench {
  std::int64_t length = 0;  // as --length counts it; under --byte-scale virtual elements
  double density = 0.01;
  Distribution distribution = Distribution::gaussian;
  std::string codec = "coo", blocks = "dealt", gather = "auto";
  ResidualRule residual = ResidualRule::gres;
  int teams = 0;
  int threads = 1;
  int steps_before = 3;
  int buckets = 0;  // 0: one operation, without the data-parallel layer
  QuotaKind quotas = QuotaKind::adaptive;
  bool check = true;
  bool crossover = false;
};

// As typed.
struct TypedSparse {
  std::int64_t length = std::int64_t{1} << 20;
  double density = 0.01;
  std::string distribution = "gaussian", codec = "packed", blocks = "dealt", gather = "auto",
              residual = "gres", quotas;
  int teams = 0, threads = 1, steps_before = 3;
  std::optional<std::int64_t> buckets;
  bool no_check = false, crossover = false;
  std::vector<CLI::Option*> flags;  // of this family alone
};

void add_sparse_options(CLI::App& verb, TypedSparse& typed);
// Throws UsageError.
SparseBench checked(const TypedSparse& typed, int ranks);
// Throws UsageError if one of them was given: they are for sparse_allreduce.
void refuse_sparse_options(const TypedSparse& typed);

// Entries of `density` of `length` elements: rounded, at least one.
std::int64_t entries_at(double density, std::int64_t length);

}  // namespace weft::cli
