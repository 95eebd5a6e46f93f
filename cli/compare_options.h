// The flags of `weft compare`, and what they mean together.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "train_flags.h"
#include "transports/link_spec.h"
#include "workload/train_options.h"
#include "world/placement.h"

namespace weft::cli {

struct NamedLink {
  std::string name;              // "1gbit,50us", kNoLink
  std::optional<LinkSpec> spec;  // none: not shaped
};

// Checked.
struct CompareCommand {
  TrainOptions options;  // of every scheme; its scheme is set for each, its steps for all
  std::vector<std::string> schemes;
  std::vector<double>
      bucket_mibs;  // that every scheme is tried with, its row being the fastest; none: the options'
  std::vector<NamedLink> links;  // as asked for; the unshaped one comes on top
  Computation computation;
  std::int64_t measured_steps = 15;
  int ranks = 4;
  bool json = false;
  std::filesystem::path folder;
  std::string settings;   // what every point of a folder has in common, as lines of config.toml
  std::string selection;  // the other lines: which points are wanted
};

inline constexpr std::int64_t kWarmUpSteps = 3;

// Throws UsageError, or CLI::ParseError (which --help is one of).
CompareCommand read_compare(const std::vector<std::string>& arguments, const Placement& place);

}  // namespace weft::cli
