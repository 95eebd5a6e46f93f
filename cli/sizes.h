// Sizes as `--bytes` takes them. Shared with bench/mpi_peer.cc.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "base/units.h"
#include "weft/error.h"

namespace weft {

// "N" or "FROM..TO": FROM, doubled as long as it is not above TO. Throws UsageError.
inline std::vector<std::size_t> parse_sizes(std::string_view text) {
  const std::size_t dots = text.find("..");
  if (dots == std::string_view::npos) return {parse_bytes(text)};
  const std::size_t from = parse_bytes(text.substr(0, dots));
  const std::size_t to = parse_bytes(text.substr(dots + 2));
  if (from == 0 || to < from) {
    throw UsageError("--bytes '" + std::string(text) +
                     "': FROM..TO starts above 0 and does not end below its start");
  }
  std::vector<std::size_t> sizes;
  for (std::size_t bytes = from; bytes <= to; bytes *= 2) {
    sizes.push_back(bytes);
    if (bytes > to / 2) break;
  }
  return sizes;
}

}  // namespace weft
