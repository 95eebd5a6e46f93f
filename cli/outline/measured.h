// The outline that emulated runs go by where none is named. (weft-torch only.)
#pragma once

#include "workload/outline.h"
#include "workload/train_options.h"

namespace weft::cli {

// One rank alone, with the share of the global batch that each of `ranks` has.
Outline measured_outline(const TrainOptions& options, int ranks);

}  // namespace weft::cli
