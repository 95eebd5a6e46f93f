// `--compressed-stages auto`: how many stages have their gradients compressed. In a pipeline the last
// stage ends a step first, so that its sum has until the first stage ends: where that is long enough, compressing it
// would lose something for nothing.
//
// A step is predicted with each number of stages, and the smallest is taken that is within half a percent of the
// fastest, which is as far as predictions can be told apart. It is a constant of the plan from then on: agreed
// between ranks, and saved with the run.
//
// `--factor-rank auto`: and how many columns factors have, those of gradients and those between stages alike. Fewer
// lose more of every gradient, so that each halving must save a twentieth of a step: of 32, 16, .. 1 the largest is
// taken from which no smaller one saves as much, each with its own number of stages.
#pragma once

#include <string>
#include <vector>

#include "planner/plan.h"

namespace weft {

struct StagesChoice {
  struct Candidate {
    int compressed = 0;
    int columns = 0;
    double step_seconds = 0;
  };
  int compressed = 0;
  int columns = 0;                    // of all factors; 0: nobody has asked
  std::string why;                    // one sentence
  std::vector<Candidate> candidates;  // one for each number of stages, or of columns

  void apply(SchemeOptions& scheme, StageOptions& stage, BackwardOptions& backward) const;
};

// `emulation.stage.compressed` is not used; with `and_rank` the columns of factors are not, either. REQUIRES: several
// stages.
StagesChoice choose_compressed_stages(const Outline& outline, const EmulationOptions& emulation,
                                      const SimulationOptions& simulation, bool and_rank = false);

}  // namespace weft
