// Flags of stages and tensor-parallel ranks: what they mean together, and which of them would change nothing.
#pragma once

#include <functional>
#include <string_view>

#include "train_flags.h"

namespace weft::cli {

// Whether a flag, without its dashes, stands where something was asked for: on the command line, or in a variant's name.
using IsTyped = std::function<bool(std::string_view flag)>;
inline bool nothing_typed(std::string_view) { return false; }

void add_stage_flags(Settings& settings, TrainFlags& flags);
// Of a mesh with so many stages, into flags.options. Throws UsageError, also for what is of stages where there is one.
void resolve_stages(TrainFlags& flags, int stages);
bool is_bf16(const char* flag, const std::string& text);  // or float32; throws UsageError

// Whether gradients, or what goes back between stages, travel as factors.
bool has_factors(const TrainFlags& flags);
// What was said of gradients between stages before, of a run that goes on or of all variants, gives way to what is typed:
// they travel as factors or as whole numbers.
void give_way(BackwardOptions& backward, const IsTyped& typed);
// Throws UsageError of one sentence for a flag that was typed and would change nothing of the run. (Others may come with
// a configuration, or be what variants of a comparison have in common.) REQUIRES: resolved.
void check_effect(const TrainFlags& flags, const IsTyped& typed);
// Flags of what the mesh has none of, as if they had not been there, but for those that were typed.
void without_axes(TrainFlags& flags, const Mesh& mesh, const IsTyped& typed = nothing_typed);

}  // namespace weft::cli
