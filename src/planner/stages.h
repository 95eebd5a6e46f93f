// `--compressed-stages auto`: how many stages have their gradients compressed. In a pipeline the last
// stage ends a step first, so that its sum has until the first stage ends: where that is long enough, compressing it
// would lose something for nothing.
//
// A step is predicted with each number of stages, and the smallest is taken that is within half a percent of the
// fastest, which is as far as predictions can be told apart. It is a constant of the plan from then on: agreed
// between ranks, and saved with the run.
#pragma once

#include <string>
#include <vector>

#include "planner/plan.h"

namespace weft {

struct StagesChoice {
  struct Candidate {
    int compressed = 0;
    double step_seconds = 0;
  };
  int compressed = 0;
  std::string why;  // one sentence
  std::vector<Candidate> candidates;
};

// `emulation.stage.compressed` is not used. REQUIRES: several stages.
StagesChoice choose_compressed_stages(const Outline& outline, EmulationOptions emulation,
                                      const SimulationOptions& simulation);

}  // namespace weft
