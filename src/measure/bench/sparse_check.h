// What a step of a sparse all-reduce was worth, from exact sums of what all ranks put in and kept.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace weft {

// Some elements of the vector, in any order; each element of the vector is in one rank's part.
struct SparsePart {
  std::vector<double> put_in;  // sum over ranks of gradient + residual, as each rank rounds it to float32
  std::vector<double> left;    // sum over ranks of the new residual
  std::vector<float> result;   // 0: not chosen
};

struct SparseWorth {
  double captured_energy = 0;  // above 1 where more than k entries were chosen
  double energy_of_best = 0;   // of as many of the largest as were chosen: never above 1
  double energy_share = 0;
  double mass_error = 0;   // relative to
  double largest_sum = 0;  // of what was put in
};

// Over all ranks, element by element; what has one part only passes functions that do nothing.
struct OverRanks {
  std::function<void(std::vector<double>&)> sum, max;
};

// `k` as in the call.
SparseWorth weigh(const SparsePart& part, std::int64_t k, const OverRanks& over);

// What rows that sum selections must give: each rank's k largest (then lower index) added in rank order.
// False if `result` is another. For lossless codecs.
bool is_sum_of_selections(const std::vector<std::vector<float>>& put_in, std::int64_t k,
                          const std::vector<float>& result);

}  // namespace weft
