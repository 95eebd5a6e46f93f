// Files of results.
#pragma once

#include <filesystem>
#include <string>

namespace weft {

// Throws Error that names the file and why.
void write_file(const std::filesystem::path& path, const std::string& content);
// One line more, on disk when it returns. Throws Error.
void append_line(const std::filesystem::path& path, const std::string& line);
// Empty where there is none.
std::string read_file(const std::filesystem::path& path);

}  // namespace weft
