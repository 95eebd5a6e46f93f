// Rows of a table that is cut by columns, and lists of row ids: plain functions on spans.
//
// A list of ids is sorted and has no id twice, unless said otherwise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace weft {

// Those of `ids` (any order, any number of times), as a list. REQUIRES: each fits.
std::vector<std::int32_t> unique_ids(std::span<const std::int64_t> ids);
// Everything that is in one of the lists.
std::vector<std::int32_t> union_of(std::span<const std::span<const std::int32_t>> lists);
// Places in `ids` of those that are in `others` too (`in`), and of the rest. Both lists.
struct SplitIds {
  std::vector<std::int32_t> in, out;
};
SplitIds split_ids(std::span<const std::int32_t> ids, std::span<const std::int32_t> others);
// ids[places[i]]: a list where places are one.
std::vector<std::int32_t> ids_at(std::span<const std::int32_t> ids, std::span<const std::int32_t> places);
// The place in `ids` of each of `wanted`. REQUIRES: it is there.
std::vector<std::int32_t> places_of(std::span<const std::int32_t> wanted, std::span<const std::int32_t> ids);
std::vector<std::int32_t> places_of(std::span<const std::int64_t> wanted, std::span<const std::int32_t> ids);

// Columns [first, first + count) of a matrix of `width` columns.
struct Columns {
  std::size_t width = 0, first = 0, count = 0;
};

// Row i of `out`, of columns.count elements, becomes those columns of row rows[i] of `from`.
template <class T>
void gather_rows(std::span<const T> from, const Columns& columns, std::span<const std::int32_t> rows,
                 std::span<T> out);
// Those columns of row rows[i] of `out` become row i of `from`, of columns.count elements.
template <class T>
void place_rows(std::span<const T> from, const Columns& columns, std::span<const std::int32_t> rows,
                std::span<T> out);
// Row rows[i] of `out`, of `width` elements, gets row i of `from` added.
template <class T>
void add_rows(std::span<const T> from, std::size_t width, std::span<const std::int32_t> rows,
              std::span<T> out);

}  // namespace weft
