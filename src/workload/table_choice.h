// `--tables auto`: the way of each table of a model, by what its batches look up (the outline says) and by the
// link. embedding/choose.h has the formulas.
#pragma once

#include <string>
#include <vector>

#include "embedding/choose.h"
#include "weft/train/optimizer_options.h"
#include "weft/train/tables_options.h"
#include "workload/outline.h"

namespace weft {

// As the outline's ids have them in two successive steps of all ranks; of more than 64, in those of 64.
TableFigures table_figures(const OutlineTable& table, int ranks, std::uint64_t seed);

struct TablesChoice {
  struct Of {
    std::string table, way, why;
  };
  TablesOptions tables;  // what to train with: never "auto"
  std::vector<Of> rows;
  std::string why() const;  // one sentence for all of them
};

// Of the ways with which a run can be saved. `given.way` is not used. What is learned does not hang on the choice: where the optimizer moves rows that have
// no gradient (adam, adamw) "dense" is not among the ways, and where it has no rule for rows (momentum) tables
// stay gradients like all others. So do those that the outline says nothing of.
TablesChoice choose_tables(const Outline& outline, TablesOptions given, const OptimizerOptions& optimizer,
                           int ranks, std::uint64_t seed, const LinkCost& link);

}  // namespace weft
