// Tensor parallelism: ranks cut the matrices of a layer among them and add up what each makes of the same tokens.
// What is cut, and what is added: src/step/tensor.h.
#pragma once

namespace weft {

struct TensorOptions {
  // affects results (sums differ by rounding)
  int ranks = 1;
  int rank = 0;  // which of them this is
  // What they add up travels as bfloat16: each rank's share is rounded to nearest even, and every addition again. Not
  // so the scores of which a loss is made, two numbers a token.
  bool bf16 = false;
  bool tables = true;  // tables that are looked up only are cut as well; false: whoever holds them cuts them

  bool is_whole() const { return ranks == 1; }
};

}  // namespace weft
