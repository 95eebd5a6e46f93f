// `--tables auto`: which way a table takes, by cost.
//
// Seconds of a step's exchanges of a table that is alone on the link, P ranks, U rows in a rank's list,
// values of s bytes, a and b the link's latency and seconds per byte; ids are 4 bytes each:
//   dense       the all-reduce of the table that the registry predicts to be fastest: 2 (P-1)/P V d s b where
//               it is long
//   allgather   ids, and (P-1) (U d s b + a); of rows that all lists have, the all-reduce
//   parallax    ids, and twice what a server of four ranks sends or gets: (P-1) (U d s b / servers + a)
//   hashed      the same with as many servers as ranks
//   columns     ids, and 2 ((P-1) a + (P-1) U w s b), w being the most columns that a rank has
// Without latency and ids: allgather is faster than dense below U / V = 2 / P, columns are faster than dense
// below U / V = 1 and than allgather for all P > 2.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "weft/comm.h"

namespace weft {

// Of a table in a step, measured or expected; equal on all ranks.
struct TableFigures {
  std::int64_t rows = 0, columns = 0;
  double tokens = 0;        // of a rank
  double unique_ratio = 1;  // rows in a rank's list over its tokens
  double shared_rows = 0;   // of them, that are in every rank's list
  double prior_share = 0;   // of the rows of the lists, that some rank's next batch reads
  int size = 1;             // ranks
  std::int64_t value_bytes = 4;

  double unique_rows() const { return tokens * unique_ratio; }
};

struct TableCost {
  std::string_view way;  // one of table_way_names()
  double seconds = 0;
};

struct TableChoice {
  std::string way;
  bool splits = false;           // of its rows into prior and delayed: worth it below prior_share 0.8
  std::string why;               // one sentence
  std::vector<TableCost> costs;  // the fastest first
};

// Of each way that may be chosen. REQUIRES: figures that can be.
std::vector<TableCost> table_costs(const TableFigures& figures, const LinkCost& link);

// The fastest of them; among equals the one that table_costs() names first. `ways`: those that may be taken;
// empty: all. Throws UsageError for figures that cannot be or a way without a cost.
TableChoice choose_table_way(const TableFigures& figures, const LinkCost& link,
                             std::span<const std::string_view> ways = {});

}  // namespace weft
