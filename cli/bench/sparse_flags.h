// The flags of `weft bench sparse_allreduce`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "measure/bench/sparse_bench.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace weft::cli {

// As typed.
struct TypedSparse {
  std::int64_t length = std::int64_t{1} << 20;
  SchemeOptions scheme;
  std::string distribution = "gaussian", residual = "gres", quotas;
  int steps_before = 3;
  std::optional<std::int64_t> buckets;
  bool shifted = false, no_check = false, crossover = false;
  std::vector<CLI::Option*> flags;  // of this family alone
};

void add_sparse_options(CLI::App& verb, TypedSparse& typed);
// Throws UsageError.
SparseBench checked(const TypedSparse& typed, int ranks);
// Throws UsageError if one of them was given: they are for sparse_allreduce.
void refuse_sparse_options(const TypedSparse& typed);

}  // namespace weft::cli
