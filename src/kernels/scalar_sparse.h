// The plain twins of selection and of the sparse kernels, written to be read: they are the definition, and
// tests compare. They sort, and allocate as they like.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <numeric>
#include <span>
#include <vector>

#include "base/entries.h"
#include "patterns/deal.h"

namespace weft::scalar {

// a comes before b: larger magnitude, then lower index.
inline bool comes_before(float a, std::uint32_t index_a, float b, std::uint32_t index_b) {
  return std::fabs(a) != std::fabs(b) ? std::fabs(a) > std::fabs(b) : index_a < index_b;
}

// The positions of the first k entries in this order, zeros left out, sorted by position.
inline std::vector<std::size_t> positions_of_largest(EntriesView entries, std::int64_t k) {
  std::vector<std::size_t> order(entries.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::erase_if(order, [&](std::size_t i) { return entries.values[i] == 0.0f; });
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return comes_before(entries.values[a], entries.indices[a], entries.values[b], entries.indices[b]);
  });
  order.resize(std::min(order.size(), static_cast<std::size_t>(std::max(k, std::int64_t{0}))));
  std::sort(order.begin(), order.end());
  return order;
}

inline void accumulate(std::span<const float> gradient, std::span<const float> residual,
                       std::span<float> staged) {
  for (std::size_t i = 0; i < staged.size(); ++i)
    staged[i] = gradient[i] + (residual.empty() ? 0.0f : residual[i]);
}

inline Entries cut(std::span<float> staged, const Deal& deal, int block, std::int64_t quota) {
  Entries all;
  for (std::int64_t i = 0; i < deal.count(block); ++i) {
    all.push_back(static_cast<std::uint32_t>(i), staged[static_cast<std::size_t>(deal.global(block, i))]);
  }
  Entries chosen;
  for (const std::size_t i : positions_of_largest(all, quota)) {
    chosen.push_back(all.indices[i], all.values[i]);
    staged[static_cast<std::size_t>(deal.global(block, all.indices[i]))] = 0.0f;
  }
  return chosen;
}

inline Entries merge_add(EntriesView a, EntriesView b) {
  std::map<std::uint32_t, float> sums;
  for (std::size_t i = 0; i < a.size(); ++i) sums.emplace(a.indices[i], a.values[i]);
  for (std::size_t i = 0; i < b.size(); ++i) {
    const auto [at, is_new] = sums.emplace(b.indices[i], b.values[i]);
    if (!is_new) at->second += b.values[i];
  }
  Entries out;
  for (const auto& [index, value] : sums) out.push_back(index, value);
  return out;
}

inline void keep_largest(Entries& entries, std::int64_t k, Entries& discards) {
  const std::vector<std::size_t> kept = positions_of_largest(entries, k);
  Entries largest;
  discards.clear();
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const bool is_kept = std::binary_search(kept.begin(), kept.end(), i);
    if (is_kept)
      largest.push_back(entries.indices[i], entries.values[i]);
    else if (entries.values[i] != 0.0f)
      discards.push_back(entries.indices[i], entries.values[i]);
  }
  entries = largest;
}

}  // namespace weft::scalar
