// Plain text from files.
#pragma once

#include <string>
#include <string_view>

namespace weft {

struct Text {
  std::string path;
  std::string content;
  int files = 0;
};

// A file, or all text files below a folder in the order of their paths: those without a NUL in their first 4
// KiB (what else is there is passed over, and so are links). Throws UsageError where nothing can be read, or
// all is empty.
Text read_text(const std::string& path);

// The text that tools/setup installs (Debian's `fortunes`: 2.4 MB of English quotations and short prose).
inline constexpr std::string_view kDefaultText = "/usr/share/games/fortunes";

}  // namespace weft
