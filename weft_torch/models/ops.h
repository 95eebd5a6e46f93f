// Operations on tensors that several models use.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <string>

#include "weft_torch/models/model.h"

namespace weft {

// Tensors to train, filled from (seed, name, element).
Parameter normal_parameter(std::uint64_t seed, std::string name, torch::IntArrayRef shape, double deviation);
Parameter uniform_parameter(std::uint64_t seed, std::string name, torch::IntArrayRef shape, double bound);
Parameter constant_parameter(std::string name, torch::IntArrayRef shape, double value);

// Where in the model and for which tokens: [sequences, length, features] from sequence `first_sequence` on.
struct DropoutSite {
  double probability = 0;
  std::uint32_t site = 0;  // differs between the places of a model
  std::int64_t first_sequence = 0;
};
// As torch's dropout: what is kept is scaled up. The mask is a function of (seed, step, site, token,
// feature).
torch::Tensor keyed_dropout(const torch::Tensor& x, const DropoutSite& where, const StepContext& context);

// The sum of the cross entropy over targets that are counted; logits [tokens, vocabulary], targets [tokens].
torch::Tensor cross_entropy_sum(const torch::Tensor& logits, const torch::Tensor& targets);

}  // namespace weft
