// `--expert-slices auto`: in how many slices the rows of experts travel, by prediction. More of them let experts
// compute on one while others are on their way; each costs its messages' latency and its experts' calls.
//
// A step is predicted with each of kSlices, and the fastest is taken, of equal ones that with the fewest. It is
// a constant of the table from then on: agreed between ranks, and saved with the run.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "planner/plan.h"

namespace weft {

inline constexpr std::array kSlices{1, 2, 4, 8};

struct SlicesChoice {
  struct Candidate {
    int slices = 1;
    double step_seconds = 0;
  };
  int slices = 1;
  std::string why;                    // one sentence
  std::vector<Candidate> candidates;  // none where there was nothing to choose
};

// `emulation.experts.slices` is not used. One slice where rows go nowhere, or the policy does not cut them.
// Throws UsageError where the outline does not tell experts apart from their blocks.
SlicesChoice choose_slices(const Outline& outline, EmulationOptions emulation,
                           const SimulationOptions& simulation);

// Says in the rows of experts why they are cut so.
void explain(Plan& plan, const SlicesChoice& choice);

}  // namespace weft
