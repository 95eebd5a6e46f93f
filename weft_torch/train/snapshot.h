// A model's parameters as rows of a registry of state, and whether a checkpoint is of this model.
#pragma once

#include <string>
#include <vector>

#include "state/checkpoint.h"
#include "weft_torch/models/model.h"

namespace weft {

inline constexpr std::string_view kModelOwner = "model", kModelValue = "value";

// Their values. They are replicated on `peers`; the model outlives the rows.
std::vector<LiveRow> model_rows(const Model& model,
                                const std::function<Peers(const ParameterShape& of)>& holders);

// Throws UsageError for a checkpoint of another model: other names, shapes or types.
void check_model(const Model& model, const Checkpoint& checkpoint);

}  // namespace weft
