// An encoder and a decoder of attention: two tables, and a projection of its own to the words. transformer, or
// bert2gpt2-moe: with experts in some layers of either.
#pragma once

#include <memory>
#include <string_view>

#include "weft_torch/models/model.h"

namespace weft {

std::unique_ptr<Model> make_transformer(std::string_view name, const ModelOptions& options);

}  // namespace weft
