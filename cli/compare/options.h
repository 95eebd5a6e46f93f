// The flags of `weft compare`, and what they mean together.
#pragma once

#include <string>
#include <vector>

#include "measure/comparison.h"
#include "world/placement.h"

namespace weft::cli {

struct CompareCommand {
  ComparisonOptions options;  // checked
  std::string named_model;    // as --model has it; empty: it was not given
};

// Throws UsageError, or CLI::ParseError (which --help is one of).
CompareCommand read_compare(const std::vector<std::string>& arguments, const Placement& place);

}  // namespace weft::cli
