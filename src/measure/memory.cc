#include "measure/memory.h"

#include <malloc.h>

#include <fstream>
#include <limits>
#include <sstream>
#include <string>

#include "measure/text.h"
#include "weft/error.h"

namespace weft {

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

void check_memory(const MemoryNeed& need, double available_bytes) {
  if (need.bytes() <= available_bytes) return;
  throw UsageError(std::to_string(need.ranks) + " ranks with " + std::to_string(need.parameters + need.held) +
                   " parameters together need about " + size_text(need.bytes()) + ", and " +
                   size_text(available_bytes) + " are free: fewer ranks, or a smaller model");
}

void keep_freed_memory() {
  constexpr int kAhead = 64 << 20;
  ::mallopt(M_MMAP_MAX, 0);
  ::mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
  ::mallopt(M_TOP_PAD, kAhead);
}

}  // namespace weft
