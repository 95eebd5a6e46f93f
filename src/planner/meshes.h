// Which mesh of so many ranks is fastest, by prediction: `weft plan --mesh auto`, and below a plan that was asked for
// without a mesh.
//
//   Step 1  of every mesh that may be: the seconds that its slowest rank computes. No step is shorter
//   Step 2  in the order of these, predict a step of each (planner/plan.h). One whose seconds are not below the step
//           of the last of the best so far cannot be among them: it is left out
//   Step 3  of the best: what limits them
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "planner/plan.h"
#include "workload/elements.h"

namespace weft {

// A mesh (of the emulation), and the tokens that one of its data-parallel ranks has of the same step.
struct MeshCase {
  Outline outline;
  EmulationOptions emulation;
};

struct PlannedMesh {
  Mesh mesh;
  int micro_batches = 1;
  Prediction prediction;
  RankElements elements;  // of the stage that has most
  std::string why;        // what limits it
};

struct MeshesChoice {
  std::vector<PlannedMesh> best;  // fastest first; of equal ones, in the order of the cases
  int cases = 0;
  int left_out = 0;  // of them, that no step was predicted of
};

// A lower bound of a step: what the rank that computes most computes, without rows of experts, of which the others
// may have more.
double least_step_seconds(const MeshCase& mesh);

// The `most` fastest. `progress`: told how many cases are done, of how many. REQUIRES: at least one case, all of
// simulation.ranks.
MeshesChoice compare_meshes(const std::vector<MeshCase>& cases, const SimulationOptions& simulation, int most,
                            const std::function<void(int done, int cases)>& progress = {});

}  // namespace weft
