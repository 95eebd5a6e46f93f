// A shard: the part of a tensor that a rank holds, as a box of it. A range of rows or columns, an expert (an
// index of the first dimension), a layer of stacked ones, or all of it.
//
//   Shard::whole({4, 3})              all 12 elements
//   Shard::range({4, 3}, 1, 2, 1)     the last column
//   Shard::range({8, 4, 3}, 0, 5, 1)  expert 5 of 8
//
// Elements of a shard lie row-major, without the others between them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "weft/function_ref.h"

namespace weft {

struct Shard {
  std::vector<std::int64_t> shape;   // of the tensor; empty: a scalar
  std::vector<std::int64_t> first;   // of each dimension: where the box begins
  std::vector<std::int64_t> extent;  // of each dimension: how far it goes

  static Shard whole(std::vector<std::int64_t> shape);
  // REQUIRES: there is such a dimension.
  static Shard range(std::vector<std::int64_t> shape, std::size_t dimension, std::int64_t first,
                     std::int64_t count);

  std::int64_t num_elements() const;     // of the box
  std::int64_t tensor_elements() const;  // of the tensor
  bool is_whole() const { return extent == shape; }
  friend bool operator==(const Shard&, const Shard&) = default;
};

// Why it cannot be (a box outside of its tensor, more elements than can be counted), or "".
std::string trouble_with(const Shard& shard);

// Elements that both have. REQUIRES: shards of one tensor.
std::int64_t common_elements(const Shard& a, const Shard& b);

// Calls f(place in `from`, place in `to`, number) for runs that are contiguous in both, in the order of
// `from`. REQUIRES: shards of one tensor.
void for_each_run(const Shard& from, const Shard& to,
                  FunctionRef<void(std::int64_t from_at, std::int64_t to_at, std::int64_t count)> f);

// "[4,3]", or "[0:4,2:3] of [4,3]".
std::string text_of(const Shard& shard);
// Of a part of the tensor `name`: with its box behind, where it is not all of it.
std::string name_of_part(const std::string& name, const Shard& shard);

}  // namespace weft
