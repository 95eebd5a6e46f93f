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

// Checked.
struct TrainCommand {
  TrainOptions options;
  TrainRun run;  // without its folders, which a place may lack yet
  RunPlace place;
  int ranks = 4;
  std::optional<EmulatedLink> link;
  Computation computation;
  bool auto_scheme = false;    // --scheme auto: what is chosen is not in `options` yet
  bool auto_tables = false;    // --tables auto: the same
  bool auto_slices = false;    // --expert-slices auto: the same
  bool auto_stages = false;    // --compressed-stages auto: the same
  bool auto_messages = false;  // --backward-messages critical: the same
  bool chooses() const { return auto_scheme || auto_tables || auto_slices || auto_stages || auto_messages; }
  bool trace = false;
  std::string named_model;  // as --model has it; empty: it was not given
  std::string config;       // config.toml
};

// Reads flags, and the config file that they name; for a run that goes on and names none, that run's own.
// Throws UsageError, or CLI::ParseError (which --help is one of).
TrainCommand read_train(const std::vector<std::string>& arguments, const Placement& place);

}  // namespace weft::cli
