// Tensor parallelism: what one of several ranks has of a model whose matrices they cut among them (Shoeybi et al.,
// Megatron-LM, 2019). All of them compute on the same tokens.
//
// A part that is cut becomes up to three:
//
//   before    takes what the part took: what stands before its first cut parameter (a norm). All ranks compute it
//   product   on the rank's share of the cut parameters: gives a share of every value
//   behind    takes the sum of all shares, and what the part took; what stands behind the last cut parameter (a
//             bias, dropout, the residual). All ranks compute it
//
// A rank adds up twice with the others (SumShape): behind the forward of the product what it gave; behind the
// backward of the product the gradient of what it took. Gradients of what all ranks compute are then the same on
// all of them, and those of the cut parameters each rank's own.
//
// Bytes of a rank: two all-reduces of [tokens, width] a cut part, one where the part takes nothing (a table) or,
// of the last part, where what is given is so many scores of a token (kScores of each rank), not its logits. With
// TensorOptions::bf16 they are of bfloat16, but for the scores: those are few, and the loss is made of them.
//
// Thread: any.
#pragma once

#include <string>

#include "weft/train/shape.h"
#include "weft/train/tensor_options.h"

namespace weft {

// Of a token's logits a rank gives away two numbers: the logarithm of the sum of their exponentials, and the target's.
inline constexpr std::int64_t kScores = 2;

// Throws UsageError of one sentence: a rank that is not there, a model without parts that could be cut, a
// dimension that is shorter than the number of ranks.
ModelShape tensor_shape(const ModelShape& whole, const TensorOptions& options);

// Names of what passes between the parts that a cut part becomes.
std::string shared_input(const std::string& part);
std::string share_of(const std::string& part);

}  // namespace weft
