// A decoder as in GPT-2: learned positions, pre-norm layers of causal attention and a GELU MLP, and a head
// that shares the embedding's weight.
#pragma once

#include "weft_torch/models/model.h"

namespace weft {

std::unique_ptr<Model> make_gpt(const ModelOptions& options);

}  // namespace weft
