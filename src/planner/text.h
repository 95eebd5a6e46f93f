// Times in sentences of the planner.
#pragma once

#include <cstdio>
#include <string>

namespace weft {

inline std::string milliseconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4g ms", seconds * 1e3);
  return text;
}

}  // namespace weft
