// A rank's training state as a checkpoint has it, from and to a model and its replica.
#pragma once

#include <string>

#include "data_parallel/checkpoint.h"
#include "weft_torch/models/model.h"
#include "weft_torch/train/replica.h"

namespace weft {

// Everything but step, seed and metadata. REQUIRES: the replica is settled.
void save_state(const Model& model, Replica& replica, TrainingSnapshot& snapshot);

// Throws UsageError, `where` first, for a checkpoint of another model: other names, shapes or types.
void load_model(const Model& model, const TrainingSnapshot& snapshot, const std::string& where);

}  // namespace weft
