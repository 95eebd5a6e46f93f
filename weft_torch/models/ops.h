// Operations on tensors that several models use.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "weft_torch/models/model.h"

namespace weft {

// What parameters begin with, from (seed, name, element).
InitialValues normal_values(std::uint64_t seed, std::string name, double deviation);
InitialValues uniform_values(std::uint64_t seed, std::string name, double bound);
InitialValues constant_values(double value);
// Rows of `columns` elements, of which the last is 0: a bias behind its weights.
InitialValues with_bias_column(InitialValues weights, std::int64_t columns);

// Where in the model and for which tokens: [sequences, length, features] from sequence `first_sequence` on.
struct DropoutSite {
  double probability = 0;
  std::uint32_t site = 0;  // differs between the places of a model
  std::int64_t first_sequence = 0;
};
// As torch's dropout: what is kept is scaled up. The mask is a function of (seed, step, site, token,
// feature).
torch::Tensor keyed_dropout(const torch::Tensor& x, const DropoutSite& where, const StepContext& context);

// Multiplied by 1 - amount .. 1 + amount: a function of the same.
torch::Tensor keyed_jitter(const torch::Tensor& x, double amount, const DropoutSite& where,
                           const StepContext& context);

struct LstmSizes {
  std::int64_t cells = 0, outputs = 0;  // the same unless what it gives is projected
  bool both_directions = false;
};
// One LSTM layer from a zero state, [sequences, length, outputs] (of both directions side by side). Weights
// as torch orders them: of input and state, biases of both, perhaps the projection; then those of the other
// direction.
torch::Tensor lstm_layer(const torch::Tensor& x, const std::vector<torch::Tensor>& weights,
                         const LstmSizes& sizes, const StepContext& context);

// The sum of the cross entropy over targets that are counted; logits [tokens, vocabulary], targets [tokens].
torch::Tensor cross_entropy_sum(const torch::Tensor& logits, const torch::Tensor& targets);

// The same where each of several ranks has the logits of some classes (step/tensor.h): what it gives away of them,
// [ranks, 2, tokens], zeros but for its own place; and the loss from the sum of all. `targets`: among its classes,
// where they are.
torch::Tensor class_scores(const torch::Tensor& logits, const torch::Tensor& targets, int ranks, int rank);
torch::Tensor scores_loss(const torch::Tensor& scores, const torch::Tensor& targets);

}  // namespace weft
