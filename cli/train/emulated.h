// weft train --compute emulated: the run's traffic, with timers in place of the model.
#pragma once

#include "measure/emulated.h"
#include "train/options.h"

namespace weft::cli {

// Ranks as threads, in wall time or (--transport sim) in virtual time. `measure`: of the model's outline
// where none is named; may be empty where one is.
void emulate_training(const TrainCommand& command, const MeasureOutline& measure);

}  // namespace weft::cli
