// Sizes as `--bytes` takes them, and the two figures that every series of times is reduced to. Shared with
// bench/mpi_peer.cc.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
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

// The smallest value that at least this share of the values does not exceed. REQUIRES: values; 0 < share
// <= 1.
inline double quantile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  const double position = std::ceil(share * static_cast<double>(values.size())) - 1;
  return values[static_cast<std::size_t>(std::max(0.0, position))];
}
inline double median_of(std::vector<double> values) { return quantile(std::move(values), 0.5); }

}  // namespace weft
