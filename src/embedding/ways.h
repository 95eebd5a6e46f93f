// The ways to exchange a table, by name: what `--tables` says. One row each; planner, bench and trainer walk
// the list.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "embedding/options.h"
#include "weft/train/tables_options.h"

namespace weft {

struct TableWay {
  std::string_view name, summary;
  // Whose it is: a table that is gradients like all others belongs to data parallelism, under the scheme of
  // the run or densely; else a HybridEmbedding has it.
  enum class Kind : std::uint8_t { scheme, dense, hybrid } kind = Kind::hybrid;
  std::string_view all_reduce = "auto";  // of a dense one: SchemeOptions::all_reduce
  // Of a hybrid embedding:
  TableCut cut = TableCut::columns;
  TableGather gather = TableGather::rows;
  int ranks_per_owner = 1;  // of rows that are dealt: 1: all ranks have some; 4: one server for four ranks
  std::string_view scheduling = "horizontal";  // one of table_scheduling_names()

  // Its tables can be saved and loaded: no rank's part is rows here and there.
  bool keeps_state() const {
    return kind != Kind::hybrid || cut == TableCut::columns || cut == TableCut::none;
  }
};

std::span<const TableWay> table_ways();
// Throws UsageError with the nearest name.
const TableWay& find_table_way(std::string_view name);

// Of each table, as TablesOptions::way says it.
class TableWays {
 public:
  // Throws UsageError.
  explicit TableWays(std::string_view text);

  const TableWay& of(std::string_view table) const;
  const std::vector<std::string>& named() const { return names_; }  // tables that have one of their own
  std::vector<const TableWay*> all() const;                         // that some table may have, each once
  bool any(TableWay::Kind kind) const;
  // Throws UsageError where some table could not be saved.
  void check_saved() const;

 private:
  const TableWay* others_;
  std::vector<std::string> names_;
  std::vector<const TableWay*> ways_;  // of them
};

// What a HybridEmbedding of `size` ranks is told of a way and of the run's options for tables. dtype,
// divisor, optimizer, lookahead, updates_wait and first_slot are for the caller to set. REQUIRES: a hybrid
// way; check_tables() passed.
HybridOptions hybrid_options(const TableWay& way, const TablesOptions& options, int size);

}  // namespace weft
