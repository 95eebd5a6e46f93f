// libFuzzer: the lines by which a file of shards tells its rows. What parses is written again and must read
// the same; what does not is a UsageError and nothing else.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "state/row_lines.h"
#include "weft/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    std::string again;
    const std::vector<weft::RowLine> lines = weft::lines_of(text, "fuzz");
    for (const weft::RowLine& line : lines) again += weft::text_of(line) + "\n";
    const std::vector<weft::RowLine> twice = weft::lines_of(again, "fuzz");
    if (twice.size() != lines.size()) std::abort();
    for (std::size_t i = 0; i < lines.size(); ++i) {
      if (!(twice[i].row == lines[i].row) || twice[i].held != lines[i].held) std::abort();
      if (!weft::trouble_with(lines[i].row).empty()) std::abort();
    }
  } catch (const weft::UsageError&) {
  }
  return 0;
}
