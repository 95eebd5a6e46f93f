// What is said of a hybrid embedding (hybrid.h).
#pragma once

#include <cstdint>
#include <string>

#include "embedding/layout.h"
#include "state/optimizer.h"
#include "weft/dtype.h"

namespace weft {

struct TableInfo {
  std::string name;  // of the parameter
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  int use = 0;                // place of its first use among the model's parameters; 0: it is read first
  std::int64_t padding = -1;  // a row whose gradient is dropped; -1: none
  double rows_per_step = 0;   // that a rank's batch reads, for the plan; 0: nobody has said
};

// What a rank sends of a table that every rank holds (TableCut::none).
enum class TableGather : std::uint8_t {
  rows,    // the rows of its list, summed over their tokens
  shared,  // of them, those that are in every rank's list are all-reduced
  tokens   // an id and a row for every token, as frameworks do that sum nothing before they send
};

struct HybridOptions {
  // affects results; equal on all ranks
  std::string name = "embedding";  // of the strategy
  std::string way = "embrace";     // what plan rows call it
  DType dtype = DType::float32;    // of the tables and their gradients: this or float64
  double divisor = 0;              // of the sum over the ranks; 0: the size of the group
  OptimizerOptions optimizer;      // of rows: validate_rows()
  TableCut cut = TableCut::columns;
  int owners = 0;  // of rows that are dealt: how many ranks have some; 0: all
  TableGather gather = TableGather::rows;
  std::int64_t memory_rows = 0;  // that a rank has memory for, all rows sharing it: only for walks of which
                                 // nobody looks at a value. 0: each has its own
  // The step may be left out or its gradients scaled (StepOptions): rows are updated behind the verdict.
  bool updates_wait = false;
  // affects speed only; equal on all ranks
  bool lookahead = true;     // batches are known one step ahead, as in StepOptions
  bool horizontal = true;    // the next lookup starts as soon as its rows are updated; else where it is read
  bool vertical = true;      // rows that the next batch reads travel first, the others with most slack
  bool two_sided = false;    // rows that this batch leaves alone are looked up for the next one in advance
  double split_below = 0.8;  // share of prior rows above which they are not told apart any more
  bool counted = true;       // false: another rank with the same results answers for their norm
  std::uint32_t first_slot = 0;  // takes 1, and kTableExchanges for each table
};

inline TableLayout layout_of(const TableInfo& table, const HybridOptions& options, int size) {
  TableLayout out(options.cut, table.rows, table.columns, size, options.owners);
  out.share_memory(options.memory_rows);
  return out;
}

}  // namespace weft
