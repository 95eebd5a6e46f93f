// The flags of `weft outline`, and an outline as people read it.
#pragma once

#include <string>
#include <vector>

#include "weft_torch/outline/measure.h"
#include "workload/outline.h"

namespace weft::cli {

// Checked.
struct OutlineCommand {
  OutlineOptions options;
  double flops_per_second = 0;  // 0: measured
  std::string file;             // to write
  std::string shown;            // file to show instead of making one
};
// Throws UsageError, or CLI::ParseError (which --help is one of).
OutlineCommand read_outline_flags(const std::vector<std::string>& arguments);

// Writes it to the command's file, and prints it.
void keep(const OutlineCommand& command, const Outline& outline);

}  // namespace weft::cli
