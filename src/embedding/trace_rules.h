// What a trace must show of a table that a hybrid embedding has (hybrid.h), beside the rules of all traffic
// (weft/trace.h): nobody reads a row before what was to be done to it is done.
//   1  the rows of a step leave when the prior rows of the step before are updated
//   2  delayed rows are applied before the next step's prior rows are, and before rows are looked up for the
//      step after it, in advance too
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "weft/trace.h"

namespace weft {

// One sentence for each breach. `first_slot`: of the table, as its row of the plan has it.
std::vector<std::string> verify_table(const Trace& trace, std::string_view table, std::uint32_t first_slot);

}  // namespace weft
