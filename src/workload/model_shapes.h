// The shapes of the models that weft knows: blocks, parts, parameters, FLOPs. No torch here: tables, plans
// and outlines by FLOPs are made in every build.
#pragma once

#include <string_view>

#include "data/batches.h"
#include "weft/train/model_options.h"
#include "weft/train/shape.h"

namespace weft {

// Columns of lm's LSTMs: of their cells, and of what they give.
inline std::int64_t lstm_width(const ModelOptions& o) { return o.hidden > 0 ? o.hidden : o.width; }
inline std::int64_t lstm_output(const ModelOptions& o) {
  return o.projection > 0 ? o.projection : lstm_width(o);
}

// Of a model with experts: whether a layer, on either side, has some.
bool has_experts(const ModelOptions& options, int layer);

// What a model is trained on. Throws UsageError with the nearest name.
BatchKind batch_kind_of(std::string_view model);

// FLOPs are of a token of a sequence; of pairs, of a target's and of the source's that goes with it. Throws
// UsageError as check_model() does.
ModelShape model_shape(std::string_view model, const ModelOptions& options);
// What the rank of these options has of it: its stage, its share of what tensor-parallel ranks cut.
ModelShape rank_shape(std::string_view model, const ModelOptions& options);

}  // namespace weft
