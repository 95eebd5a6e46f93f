// Open MPI beside weft: `weft bench --against mpi`.
#pragma once

#include <string>
#include <vector>

#include "measure/bench/report.h"

namespace weft::cli {

// On this machine, every tuned algorithm of the family; best median for each size. `program` is this binary.
std::vector<MpiBest> best_of_mpi(const BenchOptions& options, const std::string& program,
                                 BenchReport& report);

}  // namespace weft::cli
