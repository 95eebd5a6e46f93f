// A layer of experts in a model, part by part (ExpertShape in weft/train/shape.h; src/experts/route.h for who
// goes where). Between its parts nothing but tensors passes, so that rows may come from other ranks, and leave
// for them.
#pragma once

#include <torch/types.h>

#include <span>
#include <vector>

#include "experts/route.h"
#include "weft/train/shape.h"
#include "weft_torch/models/layers.h"

namespace weft {

struct ExpertLayer {
  ExpertShape shape;
  RouteOptions route;
  double jitter = 0;
  Affine norm;
  torch::Tensor gate;                          // [experts, width]
  Affine shared_up, shared_down;               // undefined: none is shared
  torch::Tensor up, up_bias, down, down_bias;  // of this rank's experts: [experts, ...]
};

RouteOptions route_options(const ExpertOptions& options);

// Whom tokens choose, by what the gate sees of them, [tokens, width]: the best first, of equal ones the first.
struct Choices {
  torch::Tensor logits, probabilities;  // [tokens, experts]
  torch::Tensor chosen, weights;        // [tokens, choices]
};
Choices choose_experts(const ExpertLayer& layer, const torch::Tensor& seen);

// What the gate gives, in the order of its shape: weights, rows, router, rows of each slice, counts of each
// slice. `seen`: what it sees of `h`, which is [tokens, width].
std::vector<torch::Tensor> pass_gate(const ExpertLayer& layer, const torch::Tensor& h,
                                     const torch::Tensor& seen);

// Rows through one of this rank's experts.
torch::Tensor pass_expert(const ExpertLayer& layer, std::int64_t expert, const torch::Tensor& rows);

// Rows of a slice through this rank's experts. `counts`: [experts], or [sources, this rank's experts].
// With a queue their backward is in halves (weight_queue.h).
torch::Tensor pass_experts(const ExpertLayer& layer, const torch::Tensor& rows, const torch::Tensor& counts,
                           WeightQueue* queue = nullptr);

// What a token's experts made of it, with its weights; of one that was dropped, nothing. [tokens, width]
torch::Tensor merge_rows(std::span<const torch::Tensor> combined, const torch::Tensor& weights,
                         const torch::Tensor& rows);

}  // namespace weft
