// The page of a comparison: compare.html, which needs nothing but itself, and its charts as files.
//
//   step_time[-LINK].svg       bars of step time by part
//   loss_by_step.svg           real computation only
//   loss_by_time[-LINK].svg
//   speedup.svg                where links were swept
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "measure/point.h"

namespace weft {

struct PageOptions {
  std::filesystem::path folder;
  std::string model;
  std::string settings;  // as lines of config.toml
};
// Gives the page's path. REQUIRES: rows, as rows_of() orders them. Throws Error if it cannot be written.
std::filesystem::path write_page(const PageOptions& options, const std::vector<Row>& rows);

}  // namespace weft
