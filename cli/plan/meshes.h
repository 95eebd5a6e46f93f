// Meshes that a plan tries, as flags say them, and what is printed of the best.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string_view>

#include "planner/meshes.h"
#include "stage_flags.h"

namespace weft::cli {

// Ranks of a plan without a mesh up to which the others are tried without being asked for.
inline constexpr int kMostTriedUnasked = 32;

// Its layers can be dealt to stages, and their matrices cut.
bool can_be_cut(std::string_view model);

// The outline of one data-parallel rank of the mesh that the options have.
using OutlineOfMesh = std::function<Outline(const TrainOptions& options)>;

inline constexpr int kMicroBatches = 4;  // a stage, at most, where their number was not typed

// The best few of the meshes of simulation.ranks that the model can be trained on. `flags`: resolved but for their
// mesh; flags of stages are of those that have some; what is still "auto" is as it is by default, the scheme dense.
// `accumulates`: their micro-batches were typed; else as many as a rank has sequences, at most kMicroBatches a stage.
// Throws UsageError where there is no mesh at all.
MeshesChoice try_meshes(const TrainFlags& flags, bool accumulates, const OutlineOfMesh& outline,
                        const SimulationOptions& simulation);

void print_meshes(const MeshesChoice& meshes, int ranks, bool nodes);
nlohmann::ordered_json json_of(const MeshesChoice& meshes);

}  // namespace weft::cli
