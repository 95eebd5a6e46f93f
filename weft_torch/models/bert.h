// An encoder as in BERT, with a head that points at the first and the last token of a span.
#pragma once

#include "weft_torch/models/model.h"

namespace weft {

std::unique_ptr<Model> make_bert(const ModelOptions& options);

}  // namespace weft
