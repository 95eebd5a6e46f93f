#include "memory.h"

#include <malloc.h>

#include <fstream>
#include <limits>
#include <sstream>
#include <string>

#include "text.h"
#include "weft/error.h"

namespace weft::cli {

double available_memory() {
  ::malloc_trim(0);
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name;
    double kib = 0;
    if (words >> name >> kib && name == "MemAvailable:") return kib * 1024;
  }
  return std::numeric_limits<double>::infinity();
}

void check_memory(std::size_t schemes, int ranks, std::int64_t parameters, double copies,
                  double available_bytes) {
  const double worlds = static_cast<double>(schemes) * ranks;
  const double needed = worlds * copies * sizeof(float) * static_cast<double>(parameters);
  if (needed <= available_bytes) return;
  throw UsageError(
      std::to_string(schemes) + (schemes == 1 ? " scheme of " : " schemes of ") + std::to_string(ranks) +
      " ranks with " + std::to_string(parameters) + " parameters need about " + size_text(needed) +
      " at once, and " + size_text(available_bytes) +
      " are free: fewer ranks, a smaller model, or fewer --schemes at a time into the same --out");
}

}  // namespace weft::cli
