// Gradients of some rows of a table in one step, summed over the ranks at whoever updates the rows
// (layout.h).
//
//   Step 1  pack  what goes to each rank: all ranks know all lists, so no ids travel
//   Step 2  run   one all-to-all; blocks are added in the order of the ranks, and the sum is divided once
//
// Two other ways for a table that every rank holds (TableGather):
//   shared  rows that are in every rank's list (negatives that are drawn once for all) are all-reduced: n
//           bytes of them cost 2 n (P-1)/P in place of n (P-1), from 3 ranks on. Their order of additions is
//           the all-reduce's
//   tokens  what a framework does that sums nothing before it sends: every rank tells the others how many
//           tokens it has, then sends 8 bytes and a row for each of them, duplicates included. The strategy
//           has gradients that are summed by row already, so the first token of a row carries the sum and the
//           others zeros: bytes, packing and additions are those of the real thing, the result is exact
//
// Bytes that rank k sends, with d columns (w_k its own), U_k rows in its list, values of s bytes:
//   columns (d - w_k) U_k s; rows: those of its list that others update, d s each; none U_k d s (P-1); tokens
//   (8 + (8 + d s) T_k) (P-1), T_k being its tokens
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "embedding/options.h"
#include "embedding/row_lists.h"
#include "kernels/rows.h"

namespace weft {

// Of all sums of a table.
struct RowSumRules {
  const TableLayout* layout = nullptr;
  TableGather gather = TableGather::rows;
  std::int64_t rows = 0, columns = 0;  // of the table
  double divisor = 1;
};

template <class T>
class RowSum {
 public:
  // This rank's gradient: of the rows of `list`, all columns. `tokens`: of each of its tokens the place of
  // its row there, for TableGather::tokens.
  struct Gradient {
    std::span<const T> values;
    std::span<const std::int32_t> list, tokens;
  };

  // Before pack(): rows of each rank, or (TableGather::tokens) of this one alone. Behind run(): `all` is what
  // this rank has the sums of.
  RowLists lists;

  // Returns its seconds in virtual time.
  double pack(const Comm& comm, const RowSumRules& rules, const Gradient& gradient);
  // `rules` stay until the task is done.
  Task<void> run(Comm comm, const RowSumRules* rules);

  std::span<const std::int32_t> places() const { return at_; }  // of the sums in the memory of the table
  std::span<T> values() { return sum_; }                        // the sums, own columns
  std::span<const T> values() const { return sum_; }
  std::int32_t bad() const { return bad_; }  // a row whose sum is not finite; -1: there is none

 private:
  double pack_rows(const Comm& comm, const RowSumRules& rules, const Gradient& gradient);
  double pack_tokens(const Comm& comm, const Gradient& gradient, std::int64_t columns);
  static Task<void> gather_tokens(Comm comm, RowSum* sum, const RowSumRules* rules);
  void take_ids(const Comm& comm, const RowSumRules& rules);
  double add(const Comm& comm, const RowSumRules& rules);

  Flow<T> flow_;
  std::vector<std::vector<std::int32_t>> places_;  // of each rank's rows among the sums
  std::vector<std::int32_t> at_;
  std::vector<T> sum_;
  std::int32_t bad_ = -1;
  // shared
  std::vector<std::int32_t> shared_;  // places of the rows that are all-reduced
  std::vector<T> reduced_;
  // tokens
  std::vector<std::int64_t> num_tokens_;  // of each rank
  Flow<std::int64_t> ids_;
};

extern template class RowSum<float>;
extern template class RowSum<double>;

}  // namespace weft
