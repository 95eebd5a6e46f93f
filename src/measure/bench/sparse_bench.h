// What a `weft bench sparse_allreduce` measures, checked.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "data_parallel/schemes.h"
#include "workload/distributions.h"

namespace weft {

struct SparseBench {
  std::int64_t length = 0;  // as --length counts it; under --byte-scale virtual elements
  Distribution distribution = Distribution::gaussian;
  // Its name and buckets are not used: each case has a name of its own, and buckets are equal.
  SchemeOptions scheme;
  int buckets = 0;  // 0: one operation, without the data-parallel layer
  int steps_before = 3;
  bool shifted = false;  // one draw, in every step shifted by another distance
  bool check = true;
  bool crossover = false;
};

// Entries of `density` of `length` elements: rounded, at least one.
inline std::int64_t entries_at(double density, std::int64_t length) {
  return std::clamp<std::int64_t>(std::llround(density * static_cast<double>(length)), 1, length);
}

}  // namespace weft
