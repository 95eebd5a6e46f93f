// Outlines of models as JSON files (docs/measuring.md has their fields).
#pragma once

#include <filesystem>
#include <string>

#include "workload/outline.h"

namespace weft {

std::string outline_json(const Outline& outline);
// Everything is checked: throws UsageError of one sentence that names the file and what is wrong with it.
Outline read_outline(const std::filesystem::path& file);
// Throws Error if it cannot be written.
void write_outline(const std::filesystem::path& file, const Outline& outline);

}  // namespace weft
