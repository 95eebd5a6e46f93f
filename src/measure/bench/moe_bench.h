// What a `weft bench moe` measures, checked.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace weft {

struct MoeBench {
  std::int64_t tokens = 1024;  // of a rank; 0: the tokens of a routing file, dealt to the ranks
  std::int64_t width = 256;
  int experts = 8, choices = 1;
  double capacity_factor = 1.25;     // 0: none is dropped
  std::vector<int> slices = {1, 2};  // each is measured
  std::string routing = "uniform";   // or zipf, or the name of a file
  double zipf = 1;                   // its exponent
};

}  // namespace weft
