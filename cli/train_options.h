// The flags of `weft train`, and what they mean together.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "run_folder.h"
#include "train_flags.h"
#include "transports/link_spec.h"
#include "weft_torch/train/trainer.h"
#include "workload/train_options.h"
#include "world/placement.h"

namespace weft::cli {

// Checked.
struct TrainCommand {
  TrainOptions options;
  TrainRun run;  // without its folders, which a place may lack yet
  RunPlace place;
  int ranks = 4;
  std::optional<LinkSpec> link;
  Computation computation;
  bool trace = false;
  std::string config;  // config.toml
};

// Reads flags, and the config file that they name; for a run that goes on and names none, that run's own.
// Throws UsageError, or CLI::ParseError (which --help is one of).
TrainCommand read_train(const std::vector<std::string>& arguments, const Placement& place);

}  // namespace weft::cli
