// `--backward-messages critical`: which gradients between stages travel as factors, by the seconds of a step. Those do
// whose slack is below what it saves (pipeline/message_slack.h); the others have the time, and lose nothing.
//
// Seconds are those that plans go by: blocks by the outline, sums of tensor-parallel ranks with them; messages by the
// link that algorithms are chosen by, through a port that the ranks of a node share; coding by the kernels. Behind a
// stage's last backward comes what that does not hide of the sum of its gradients.
//
// It is chosen before a run, for so many micro-batches; what is chosen is a value of the options like any other:
// compared between ranks, saved with the run.
#pragma once

#include <string>

#include "pipeline/message_slack.h"
#include "planner/plan.h"

namespace weft {

struct MessagesChoice {
  std::string messages;  // for BackwardOptions
  int chosen = 0, all = 0, epilogue = 0;
  // Of a step by these seconds: with what was chosen, and where none, those of the epilogue, all are factors.
  double step_seconds = 0, none_seconds = 0, epilogue_seconds = 0, all_seconds = 0;
  std::string why;  // one sentence
};

// `emulation.backward.messages` is not used. Throws UsageError of one sentence: nothing goes back as factors or whole
// numbers, or there is nothing to time it by.
MessagesChoice choose_messages(const Outline& outline, EmulationOptions emulation,
                               const SimulationOptions& simulation);

// What it goes by. REQUIRES: several stages, a planned link.
PipelineTimes pipeline_times(const Outline& outline, const EmulationOptions& emulation,
                             const SimulationOptions& simulation);

}  // namespace weft
