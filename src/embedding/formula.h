// What the ranks send for a table in a step, by its way: in integers, from the lists of a batch.
//
// Of rank k, with w_k of d columns, U_k rows in its list, S the sum of all U_k, T_k its tokens, values of s
// bytes, P ranks; l_k(o): rows of its list that rank o updates; u_o: rows of all lists that rank o updates:
//
//   columns          ids 4 U_k (P-1)   rows w_k (S - U_k) s                  gradients (d - w_k) U_k s
//   rows             ids 4 U_k (P-1)   rows (sum over j != k of l_j(k)) d s  gradients (U_k - l_k(k)) d s
//   pushed           ids 4 U_k (P-1)   gradients (U_k - l_k(k)) d s          values u_k d s (P-1)
//   none             ids 4 U_k (P-1)   gradients U_k d s (P-1)
//   none, shared     the same without the rows that all lists have, and the all-reduce of those
//   none, tokens     gradients (8 + (8 + d s) T_k) (P-1)
//   dense            gradients: the all-reduce of the table
//
// A row for padding is looked up and has no gradient.
#pragma once

#include <array>
#include <cstdint>
#include <numeric>
#include <vector>

#include "embedding/ways.h"
#include "weft/comm.h"

namespace weft {

// A table and what the ranks read of it in a step.
struct TableBatch {
  std::int64_t rows = 0, columns = 0;
  std::int64_t value_bytes = 4;
  std::int64_t padding = -1;                     // -1: none
  std::vector<std::vector<std::int32_t>> lists;  // of each rank, as in row_lists.h
  std::vector<std::int64_t> tokens;              // of each rank, without padding
};

// In the order in which they follow each other in a step.
enum class TablePhase : std::uint8_t { ids, rows, gradients, values };
inline constexpr int kTablePhases = 4;

struct TableTraffic {
  struct Port {
    std::array<std::int64_t, kTablePhases> sent{}, received{};
    std::int64_t all_sent() const { return std::accumulate(sent.begin(), sent.end(), std::int64_t{0}); }
    std::int64_t all_received() const {
      return std::accumulate(received.begin(), received.end(), std::int64_t{0});
    }
  };
  std::vector<Port> ports;  // of each rank; of an all-reduce every one has what the busiest sends
  bool exact = true;        // of the busiest rank; false: a bound, where rows are gathered and all-reduced

  // In a step, through the busiest port, out or in. (Of a server's phases one goes out and the other comes
  // in: they overlap, as its ranks are not all at the same place.)
  std::int64_t busiest() const;
};

// Of a hybrid embedding. `link`: by which all-reduces are chosen. REQUIRES: a list for each rank, or (of
// TableGather::tokens) tokens. A rank that does not know the others' has its own port all the same.
TableTraffic table_traffic(const TableLayout& layout, TableGather gather, const TableBatch& batch,
                           const LinkCost& link);
// REQUIRES: the way is no scheme.
TableTraffic table_traffic(const TableWay& way, const TableBatch& batch, const LinkCost& link);

}  // namespace weft
