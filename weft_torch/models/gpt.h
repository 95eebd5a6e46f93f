// A decoder as in GPT-2: learned positions, pre-norm layers of causal attention and a GELU MLP, and a head
// that shares the embedding's weight. gpt, or gpt-moe: with experts in some layers.
#pragma once

#include <memory>
#include <string_view>

#include "weft_torch/models/model.h"

namespace weft {

std::unique_ptr<Model> make_gpt(std::string_view name, const ModelOptions& options);

}  // namespace weft
