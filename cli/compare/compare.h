#pragma once

#include "compare/options.h"

namespace weft::cli {

// Measures what is missing and shows all. `models`: what LibTorch does, if it is built in.
int run_comparison(const CompareCommand& command, Models models);

}  // namespace weft::cli
