// What the kernels cost on this machine, measured: KernelCosts of one thread, for runs in virtual time and
// for plans.
#pragma once

#include <cstdint>

#include "weft/kernel_costs.h"

namespace weft {

// What is typical of the job: costs are not quite proportional to sizes.
struct MeasureKernelsOptions {
  std::int64_t elements = std::int64_t{1} << 20;  // of a bucket
  double density = 0.01;                          // of what is selected from it
  int ranks = 4;  // whose buckets take turns: what one finds in the cache is what the others have left there
  int repetitions = 2;
};

// Processor time of the calling thread, medians over ranks and repetitions; about 0.3 s with these options.
// Every figure is positive. Throws UsageError for fewer than 4,096 elements, a density outside of (0, 1], no
// ranks and no repetitions.
KernelCosts measure_kernels(const MeasureKernelsOptions& options = {});

}  // namespace weft
