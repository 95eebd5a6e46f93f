// Who holds what of a table, in four ways.
//
//   columns   every rank some columns of all rows: what travels does not depend on which ids are frequent
//   rows      rows dealt to `owners` ranks by their id, all columns; owners = size: hashed over all ranks,
//             fewer: servers, each of which has as many ranks to serve
//   none      every rank all of it: looking up needs nobody, and a gradient goes to everybody
//   pushed    every rank all of it, but a row is updated by its owner alone, of `owners` ranks, which then
//             tells everybody the new values
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "weft/collective.h"

namespace weft {

enum class TableCut : std::uint8_t { columns, rows, none, pushed };
constexpr std::string_view name_of(TableCut cut) {
  constexpr std::string_view names[] = {"columns", "rows", "none", "pushed"};
  return names[static_cast<std::size_t>(cut)];
}

class TableLayout {
 public:
  // REQUIRES: 1 <= owners <= size.
  TableLayout(TableCut cut, std::int64_t rows, std::int64_t columns, int size, int owners)
      : cut_(cut), rows_(rows), columns_(columns), size_(size), owners_(owners) {}

  // Whoever holds rows has memory for so many of them, which the others share: for walks of which nobody
  // looks at a value.
  void share_memory(std::int64_t rows) { memory_rows_ = static_cast<std::int32_t>(rows); }
  // Rows that a rank has memory for.
  std::int64_t memory_rows(int rank) const {
    return memory_rows_ > 0 ? std::min<std::int64_t>(memory_rows_, num_rows(rank)) : num_rows(rank);
  }

  TableCut cut() const { return cut_; }
  BlockRange columns(int rank) const {
    return cut_ == TableCut::columns ? block_of(columns_, size_, rank) : BlockRange{0, columns_};
  }
  // Every rank holds all rows with all columns.
  bool replicated() const { return cut_ == TableCut::none || cut_ == TableCut::pushed; }
  // A row has one rank that updates it.
  bool dealt() const { return cut_ == TableCut::rows || cut_ == TableCut::pushed; }
  // The rank that updates a row, where rows are dealt.
  int owner(std::int64_t row) const { return rank_of_owner(static_cast<int>(row % owners_)); }
  bool holds(std::int64_t row, int rank) const { return cut_ != TableCut::rows || owner(row) == rank; }
  std::int64_t num_rows(int rank) const {
    if (cut_ != TableCut::rows) return rows_;
    for (int o = 0; o < owners_; ++o) {
      if (rank_of_owner(o) == rank) return (rows_ - o + owners_ - 1) / owners_;
    }
    return 0;
  }
  // Where a row lies in the memory of whoever holds it.
  std::int32_t place(std::int32_t row) const {
    const std::int32_t held = cut_ == TableCut::rows ? row / static_cast<std::int32_t>(owners_) : row;
    return memory_rows_ > 0 ? held % memory_rows_ : held;
  }
  // Rows of a list that `from` sends to `to`, which looks them up; and those of a gradient that go to
  // `owner`.
  std::vector<std::int32_t> served(std::span<const std::int32_t> list, int from, int to) const {
    if (!replicated()) return of_owner(list, from);
    return from == to ? std::vector<std::int32_t>(list.begin(), list.end()) : std::vector<std::int32_t>();
  }
  std::vector<std::int32_t> of_owner(std::span<const std::int32_t> list, int rank) const {
    std::vector<std::int32_t> out;
    if (!dealt()) return {list.begin(), list.end()};
    for (const std::int32_t row : list) {
      if (owner(row) == rank) out.push_back(row);
    }
    return out;
  }
  // Elements that the busiest rank sends in a step where every rank reads so many rows, and no row is read by two
  // ranks: what a plan goes by.
  double elements_expected(double rows) const {
    const auto others = static_cast<double>(size_ - 1), d = static_cast<double>(columns_);
    if (cut_ == TableCut::none) return others * rows * d;
    if (dealt()) {
      const double share = 1.0 / owners_;  // of an owner
      const double served = replicated() ? size_ * share : share;
      return rows * d * (others * served + (1 - share));
    }
    const auto w = static_cast<double>(columns(0).count);
    return rows * (w * others + (d - w));
  }

 private:
  // Servers stand apart: of 8 ranks with 2 owners, 0 and 4.
  int rank_of_owner(int o) const { return static_cast<int>(std::int64_t{o} * size_ / owners_); }

  TableCut cut_;
  std::int64_t rows_, columns_;
  int size_, owners_;
  std::int32_t memory_rows_ = 0;  // 0: all
};

}  // namespace weft
