// The shapes of the models that weft knows: blocks, parts, parameters, FLOPs. No torch here: tables, plans
// and outlines by FLOPs are made in every build.
#pragma once

#include <string_view>

#include "weft/train/model_options.h"
#include "weft/train/shape.h"

namespace weft {

// Throws UsageError as check_model() does.
ModelShape model_shape(std::string_view model, const ModelOptions& options);

}  // namespace weft
