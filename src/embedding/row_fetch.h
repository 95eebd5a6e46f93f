// Values of rows, from whoever holds or updates them to whoever reads them. All ranks know all lists, so no
// ids travel.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "embedding/layout.h"
#include "embedding/row_lists.h"

namespace weft {

// To each rank the rows of its list, as far as this one holds them; from each rank those of the own list.
// Bytes of a rank with w of d columns and U of the sum S of all lists, values of s bytes: columns
// w (S - U) s; rows: those of the others' lists that it holds, d s each; none and pushed: nothing.
template <class T>
class RowFetch {
 public:
  struct From {
    const TableLayout* layout = nullptr;
    std::int64_t columns = 0;   // of the table
    std::span<const T> values;  // that this rank holds
  };
  // Where they go: all columns of the rows of `list`, one after the other; among them those that are fetched.
  struct Into {
    std::span<const std::int32_t> list;
    std::vector<T>* rows = nullptr;
  };
  // `lists` stay until the task is done, as does what `from` and `into` name.
  Task<void> run(Comm comm, const RowLists* lists, From from, Into into);

 private:
  double copy(const Comm& comm, std::span<const std::int32_t> rows, const From& from, const Into& into);
  double pack(const Comm& comm, const RowLists& lists, const From& from);
  double place(const Comm& comm, const From& from, const Into& into);

  std::vector<std::vector<std::int32_t>> rows_;  // that come from each rank
  Flow<T> flow_;
};

// The new values of rows that somebody had a gradient for, from those that update them to everybody
// (TableCut::pushed). Bytes of a rank that updates u of them: u d s (P-1).
template <class T>
class RowPull {
 public:
  // `lists`: rows of each rank; the same on all ranks.
  void plan(const Comm& comm, const TableLayout& layout, const RowLists& lists);
  // `table`: all rows, of `columns` each; it stays until the task is done.
  Task<void> run(Comm comm, std::span<T> table, std::int64_t columns);

 private:
  std::vector<std::vector<std::int32_t>> rows_;  // of each owner: their places in the table
  Flow<T> flow_;
};

extern template class RowFetch<float>;
extern template class RowFetch<double>;
extern template class RowPull<float>;
extern template class RowPull<double>;

}  // namespace weft
