// What a `weft bench embedding` measures, checked.
#pragma once

#include <cstdint>

namespace weft {

struct EmbeddingBench {
  std::int64_t rows = 32768, columns = 64;
  std::int64_t tokens = 2560;  // of a rank, drawn by Zipf's law
  double zipf = 1;             // its exponent
  std::int64_t negatives = 0;  // ids beside them that all ranks have, log-uniform
};

}  // namespace weft
