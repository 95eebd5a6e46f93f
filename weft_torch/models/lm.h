// A recurrent language model: embedding, LSTM layers, and a softmax over all words or over sampled ones.
#pragma once

#include "weft_torch/models/model.h"

namespace weft {

std::unique_ptr<Model> make_lm(const ModelOptions& options);

}  // namespace weft
