// Reductions as sequential loops, each element in the order of additions that its algorithm documents. They
// share no code with the algorithms: blocks, trees and hops are written out again.
#pragma once

#include <string_view>
#include <vector>

#include "reference/data.h"

namespace weft::reference {

// Which block of `size` element i of n belongs to: the first n mod size blocks are one longer.
inline int block_of_index(std::int64_t i, std::int64_t n, int size) {
  int block = 0;
  for (std::int64_t end = 0; block < size; ++block) {
    end += n / size + (block < n % size ? 1 : 0);
    if (i < end) return block;
  }
  return block;
}

// Of a vector that is cut for the places of a node, and these blocks again for the nodes: whose element i is.
inline int place_of_index(std::size_t i, std::size_t n, int node_size) {
  return block_of_index(static_cast<std::int64_t>(i), static_cast<std::int64_t>(n), node_size);
}
inline int node_of_index(std::size_t i, std::size_t n, int size, int node_size) {
  const int place = place_of_index(i, n, node_size);
  const auto length = static_cast<std::int64_t>(n);
  const auto count = [&](int at) { return length / node_size + (at < length % node_size ? 1 : 0); };
  auto within = static_cast<std::int64_t>(i);
  for (int before = 0; before < place; ++before) within -= count(before);
  return block_of_index(within, count(place), size / node_size);
}

// x[b] + (x[b-1] + ( ... + (x[b+2] + x[b+1])))
template <class T>
T ring_sum(const std::vector<T>& x, int block, Reduction reduction) {
  const std::size_t size = x.size();
  const auto b = static_cast<std::size_t>(block);
  T sum = x[(b + 1) % size];
  for (std::size_t i = 2; i <= size; ++i) sum = scalar::fold_one(x[(b + i) % size], sum, reduction);
  return sum;
}

// ((x[0] + x[1]) + x[2]) + ...
template <class T>
T rank_order_sum(const std::vector<T>& x, Reduction reduction) {
  T sum = x[0];
  for (std::size_t r = 1; r < x.size(); ++r) sum = scalar::fold_one(sum, x[r], reduction);
  return sum;
}

// The ranks beyond the largest power of two join first; then neighbours, pairs of neighbours ...
template <class T>
T doubling_sum(std::vector<T> x, Reduction reduction) {
  std::size_t core = 1;
  while (2 * core <= x.size()) core *= 2;
  for (std::size_t r = 0; r + core < x.size(); ++r) x[r] = scalar::fold_one(x[r], x[r + core], reduction);
  for (std::size_t width = 1; width < core; width *= 2) {
    for (std::size_t r = 0; r + width < core; r += 2 * width)
      x[r] = scalar::fold_one(x[r], x[r + width], reduction);
  }
  return x[0];
}

// What rank `owner - distance` holds of the block once the sums of all ranks up to `gap` further away have
// reached it.
template <class T>
T halving_sum(const std::vector<T>& x, int block, Reduction reduction) {
  const int size = static_cast<int>(x.size());
  std::vector<T> at(x.size());  // by distance before the owner
  for (int d = 0; d < size; ++d)
    at[static_cast<std::size_t>(d)] = x[static_cast<std::size_t>((block - d + size) % size)];
  int gap = 1;
  while (2 * gap < size) gap *= 2;
  for (int held = size; gap >= 1 && size > 1; held = gap, gap /= 2) {
    for (int d = 0; d < held - gap; ++d) {
      T& near = at[static_cast<std::size_t>(d)];
      near = scalar::fold_one(near, at[static_cast<std::size_t>(d + gap)], reduction);
    }
  }
  return at[0];
}

// Inside each node the ring of its ranks, where block `place` is summed; of these sums the ring of the nodes,
// where block `node` is.
template <class T>
T two_level_sum(const std::vector<T>& x, int node_size, int place, int node, Reduction reduction) {
  std::vector<T> sums;
  for (auto first = x.begin(); first != x.end(); first += node_size)
    sums.push_back(ring_sum(std::vector<T>(first, first + node_size), place, reduction));
  return ring_sum(sums, node, reduction);
}

// `node_size`: of two_level.
template <class T>
std::vector<T> all_reduce(std::string_view algorithm, const Inputs<T>& inputs, Reduction reduction,
                          int node_size = 1) {
  const auto size = static_cast<int>(inputs.size());
  const std::size_t n = inputs[0].size();
  std::vector<T> result(n);
  for (std::size_t i = 0; i < n; ++i) {
    std::vector<T> x;
    for (const std::vector<T>& input : inputs) x.push_back(input[i]);
    const int block = block_of_index(static_cast<std::int64_t>(i), static_cast<std::int64_t>(n), size);
    if (algorithm == "ring")
      result[i] = ring_sum(x, block, reduction);
    else if (algorithm == "recursive_doubling")
      result[i] = doubling_sum(x, reduction);
    else if (algorithm == "rabenseifner")
      result[i] = halving_sum(x, block, reduction);
    else if (algorithm == "direct")
      result[i] = rank_order_sum(x, reduction);
    else if (algorithm == "two_level")
      result[i] = two_level_sum(x, node_size, place_of_index(i, n, node_size),
                                node_of_index(i, n, size, node_size), reduction);
    else
      throw UsageError("no reference for this algorithm: write one");
  }
  return result;
}

// Sums in long double and how far a sum in T may be from them: at most size-1 roundings, each at most half a
// unit in the last place of a partial sum, which is at most the sum of magnitudes.
struct Bound {
  long double sum = 0;
  double tolerance = 0;
};
template <class T>
Bound exact_sum(const Inputs<T>& inputs, std::size_t i) {
  Bound bound;
  double magnitudes = 0;
  for (const std::vector<T>& input : inputs) {
    bound.sum += static_cast<long double>(as_double(input[i]));
    magnitudes += std::abs(as_double(input[i]));
  }
  const double half_unit = sizeof(T) == 8               ? 0x1p-53
                           : sizeof(T) == 4             ? 0x1p-24
                           : std::is_same_v<T, float16> ? 0x1p-11
                                                        : 0x1p-8;
  // 2 %: partial sums grow by the roundings themselves. Below 2^-14 a float16 rounds to multiples of 2^-24.
  const double subnormal = std::is_same_v<T, float16> ? 0x1p-25 : 0;
  bound.tolerance = 1.02 * static_cast<double>(inputs.size() - 1) * (magnitudes * half_unit + subnormal);
  return bound;
}

}  // namespace weft::reference
