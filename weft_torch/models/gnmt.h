// An encoder and a decoder of LSTM layers with attention between them: two tables, and a projection of its own
// to the words.
#pragma once

#include "weft_torch/models/model.h"

namespace weft {

std::unique_ptr<Model> make_gnmt(const ModelOptions& options);

}  // namespace weft
