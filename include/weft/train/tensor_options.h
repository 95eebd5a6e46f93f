// Tensor parallelism: ranks cut the matrices of a layer among them and add up what each makes of the same tokens.
// What is cut, and what is added: src/step/tensor.h.
#pragma once

namespace weft {

struct TensorOptions {
  // affects results (sums differ by rounding)
  int ranks = 1;
  int rank = 0;        // which of them this is
  bool tables = true;  // tables that are looked up only are cut as well; false: whoever holds them cuts them

  bool is_whole() const { return ranks == 1; }
};

}  // namespace weft
