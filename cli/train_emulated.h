// weft train --compute emulated: the run's traffic, with timers in place of the model.
#pragma once

#include <filesystem>

#include "train_options.h"

namespace weft::cli {

// Ranks as threads, in wall time or (--transport sim) in virtual time. `folder` is there.
void emulate_training(const TrainCommand& command, const std::filesystem::path& folder);

}  // namespace weft::cli
