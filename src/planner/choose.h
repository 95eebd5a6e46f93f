// `--scheme auto`: which gradients are compressed, by prediction. "Stay dense, because ..." is a normal
// answer: compression that cannot pay is refused.
//
//   Step 1  predict a step with everything dense. Where hardly anything of it is exposed, everything stays so
//   Step 2  predict one with the sparse scheme. Where that is not faster, everything stays dense
//   Step 3  a bucket whose selection and sparse exchange take longer than its dense exchange stays dense;
//           predict a step with the others compressed, and take the fastest of what was predicted
#pragma once

#include <string>
#include <vector>

#include "planner/plan.h"

namespace weft {

struct Candidate {
  std::string name;  // "dense", "spardl", "spardl with 3 parameters dense"
  Prediction prediction;
};

struct Choice {
  SchemeOptions scheme;               // what to train with: a row of the table of schemes, never "auto"
  std::string why;                    // one sentence
  std::vector<Candidate> candidates;  // what was predicted, in order
};

// `emulation.parallel.scheme.name` is not used: dense is compared with `sparse`, by the other options there.
Choice choose_scheme(const Outline& outline, EmulationOptions emulation, const SimulationOptions& simulation,
                     const std::string& sparse = "spardl");

}  // namespace weft
