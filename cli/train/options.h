// The flags of `weft train`, and what they mean together.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "train/run_folder.h"
#include "train_flags.h"
#include "weft/train/run.h"
#include "weft/world.h"
#include "workload/train_options.h"
#include "world/placement.h"

namespace weft::cli {

// What a plan chooses, so that it is not in the options yet: --scheme auto, --tables auto, --expert-slices auto,
// --compressed-stages auto, with it --factor-rank auto, --backward-messages critical.
struct Asked {
  bool scheme = false, tables = false, slices = false, stages = false, rank = false, messages = false;
  bool any() const { return scheme || tables || slices || stages || messages; }
};

// Checked.
struct TrainCommand {
  TrainOptions options;
  TrainRun run;  // without its folders, which a place may lack yet
  RunPlace place;
  int ranks = 4;
  std::optional<EmulatedLink> link;
  Computation computation;
  Asked asked;
  bool trace = false;
  std::string named_model;  // as --model has it; empty: it was not given
  std::string config;       // config.toml
};

// Reads flags, and the config file that they name; for a run that goes on and names none, that run's own.
// Throws UsageError, or CLI::ParseError (which --help is one of).
TrainCommand read_train(const std::vector<std::string>& arguments, const Placement& place);

}  // namespace weft::cli
