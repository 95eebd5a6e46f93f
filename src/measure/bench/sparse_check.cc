#include "measure/bench/sparse_check.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/select.h"

namespace weft {

namespace {

constexpr std::size_t kBins = 1 << 16;
constexpr int kLowBits = 15;  // a magnitude_key has 31 bits

// How many elements are in a bin of magnitudes, and their squares.
struct Histogram {
  std::vector<double> bins = std::vector<double>(2 * kBins);
  void add(std::size_t bin, double value) {
    bins[2 * bin] += 1;
    bins[2 * bin + 1] += value * value;
  }
};

// Takes bins from the top until `wanted` elements are there; the last one in part, its elements being equal.
// Gives the bin where it stopped, with `wanted` and `energy` as before that bin.
std::size_t descend(const Histogram& histogram, double& wanted, double& energy) {
  for (std::size_t bin = kBins; bin-- > 0;) {
    const double count = histogram.bins[2 * bin];
    if (count >= wanted) return bin;
    wanted -= count;
    energy += histogram.bins[2 * bin + 1];
  }
  wanted = 0;
  return kBins;
}

// Squared sum of the `wanted` largest.
double top_energy(const SparsePart& part, double wanted, const OverRanks& over) {
  const auto key = [](double value) { return magnitude_key(static_cast<float>(value)); };
  double energy = 0;
  Histogram high;
  for (const double v : part.put_in) high.add(key(v) >> kLowBits, v);
  over.sum(high.bins);
  const std::size_t bin = descend(high, wanted, energy);
  if (bin == kBins) return energy;
  Histogram low;
  for (const double v : part.put_in) {
    if (key(v) >> kLowBits == bin) low.add(key(v) & ((1u << kLowBits) - 1), v);
  }
  over.sum(low.bins);
  const std::size_t last = descend(low, wanted, energy);
  if (last == kBins || low.bins[2 * last] == 0) return energy;
  return energy + wanted * low.bins[2 * last + 1] / low.bins[2 * last];
}

}  // namespace

SparseWorth weigh(const SparsePart& part, std::int64_t k, const OverRanks& over) {
  std::vector<double> sums(3);   // chosen energy, whole energy, how many were chosen
  std::vector<double> worst(2);  // lost mass, largest sum
  for (std::size_t i = 0; i < part.put_in.size(); ++i) {
    const double x = part.put_in[i];
    sums[0] += part.result[i] != 0 ? x * x : 0;
    sums[1] += x * x;
    sums[2] += part.result[i] != 0 ? 1 : 0;
    worst[0] = std::max(worst[0], std::abs(x - static_cast<double>(part.result[i]) - part.left[i]));
    worst[1] = std::max(worst[1], std::abs(x));
  }
  over.sum(sums);
  over.max(worst);
  const auto captured = [&](double entries) {
    const double best = top_energy(part, entries, over);
    return best > 0 ? sums[0] / best : 1;
  };
  SparseWorth worth;
  worth.captured_energy = captured(static_cast<double>(k));
  worth.energy_of_best = captured(sums[2]);
  worth.energy_share = sums[1] > 0 ? sums[0] / sums[1] : 1;
  worth.mass_error = worst[1] > 0 ? worst[0] / worst[1] : worst[0];
  worth.largest_sum = worst[1];
  return worth;
}

bool is_sum_of_selections(const std::vector<std::vector<float>>& put_in, std::int64_t k,
                          const std::vector<float>& result) {
  const std::size_t n = put_in.front().size();
  std::vector<float> expected(n);
  std::vector<std::uint32_t> order(n);
  for (const std::vector<float>& mine : put_in) {
    std::iota(order.begin(), order.end(), 0u);
    const auto larger = [&mine](std::uint32_t a, std::uint32_t b) {
      const std::uint32_t x = magnitude_key(mine[a]), y = magnitude_key(mine[b]);
      return x != y ? x > y : a < b;
    };
    const auto end = order.begin() + std::min<std::ptrdiff_t>(k, static_cast<std::ptrdiff_t>(n));
    std::partial_sort(order.begin(), end, order.end(), larger);
    for (auto it = order.begin(); it != end; ++it) expected[*it] += mine[*it];
  }
  return expected == result;
}

}  // namespace weft
