// How many elements of parameters ranks have: what memory, and walks in virtual time, are asked for.
//
// Thread: any.
#pragma once

#include <cstdint>
#include <string_view>

#include "weft/train/options.h"
#include "workload/emulate.h"

namespace weft {

// Of tables that are cut, the ranks' parts. Rows of tables that a hybrid embedding has are there with their moments, and
// nothing else: no gradient, no bucket.
struct RankElements {
  std::int64_t dense = 0, held = 0;
  std::int64_t all() const { return dense + held; }
};

// Of one that has this shape; so many ranks deal tables among them.
RankElements elements_of_rank(const ModelShape& shape, const TablesOptions& options, int data_ranks);

// Of the whole job together, each rank with its stage, its experts and its share of what is cut.
RankElements elements_of_ranks(const Outline& outline, const EmulationOptions& options, int ranks);
RankElements elements_of_ranks(std::string_view model, const ModelOptions& sizes,
                               const TablesOptions& options, int ranks);

}  // namespace weft
