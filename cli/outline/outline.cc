// weft outline: measures the blocks of a model, or counts them in FLOPs, and writes them as a file that
// emulated and simulated runs go by.
#include <cstdio>

#include "measure/memory.h"
#include "measure/outline_file.h"
#include "outline/measured.h"
#include "outline/options.h"
#include "torch_verbs.h"
#include "verbs.h"

namespace weft::cli {

Outline measured_outline(const TrainOptions& options, int ranks) {
  OutlineOptions measuring;
  measuring.train = options;
  measuring.train.accumulate = 1;           // whoever goes by the outline cuts its steps
  measuring.train.sizes.experts.ranks = 1;  // and deals its experts and layers
  measuring.train.sizes.stage = {};
  measuring.train.sizes.tensor = {};
  measuring.train.backward = {};
  measuring.sequences = sequences_of_rank(options, mesh_of(options.sizes, ranks).dp);
  return measure_outline(measuring);
}

int outline(const std::vector<std::string>& arguments) {
  if (const std::optional<int> status = outline_without_torch(arguments)) return *status;
  keep_freed_memory();
  const OutlineCommand command = read_outline_flags(arguments);
  keep(command, measure_outline(command.options));
  return kOk;
}

}  // namespace weft::cli
