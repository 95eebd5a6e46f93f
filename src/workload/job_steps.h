// Steps of a job from those of its ranks: from the end of a step on its last rank to the end of the next on
// its last. Ranks that need not end a step together take turns in being late, and the slowest rank of every
// step would count each delay twice.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace weft {

// `ranks`: each rank's seconds, step after step; all have as many. `pauses`: steps before which all ranks
// stand still and then begin together; the first step is one anyway.
std::vector<double> job_steps(std::span<const std::vector<double>> ranks,
                              std::span<const std::int64_t> pauses = {});

}  // namespace weft
