// `--scheme auto`: what is done to which gradients, by prediction. "Stay dense, because ..." is a normal
// answer: compression that cannot pay is refused.
//
//   Step 1  predict a step with everything dense. Where hardly anything of it is exposed, everything stays so
//   Step 2  predict one with each other scheme that auto may take (data_parallel/schemes.h) and that sends
//           clearly fewer bytes by its formula: low rank factors of a model without large matrices do not
//   Step 3  what loses more must save kWorthLosing of the step of what loses less: first those that round every
//           element against dense, then the fastest of those that leave some out against the better of these
//   Step 4  where a scheme that selects was taken: a bucket whose selection and sparse exchange take longer than its dense
//           exchange stays dense; predict a step with the others compressed, and take it if it is faster
#pragma once

#include <string>
#include <vector>

#include "planner/plan.h"
#include "workload/table_choice.h"

namespace weft {

inline constexpr double kWorthLosing = 0.1;

struct Candidate {
  std::string name;  // "dense", "spardl", "spardl with 3 parameters dense"
  Prediction prediction;
};

struct Choice {
  SchemeOptions scheme;               // what to train with: a row of the table of schemes, never "auto"
  std::string why;                    // one sentence
  std::string why_row;                // why a tensor is sent so, in short
  std::vector<Candidate> candidates;  // what was predicted, in order
};

// `emulation.parallel.scheme.name` is not used, the other options there are.
Choice choose_scheme(const Outline& outline, EmulationOptions emulation, const SimulationOptions& simulation);

// Says in the rows of the scheme that was chosen why it was; those that stay dense have their own reasons.
void explain(Plan& plan, const Choice& choice);
// The same of tables: before what else there is to say of them.
void explain(Plan& plan, const TablesChoice& choice);

}  // namespace weft
