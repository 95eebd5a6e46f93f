// Variants as --variants names them: "dense,spardl+teams=2+bucket-mib=4".
#pragma once

#include <string>
#include <vector>

#include "measure/comparison.h"
#include "train_flags.h"

namespace weft::cli {

std::vector<std::string> split(const std::string& text, char at);

// What short names of --variants stand for, on a mesh with stages: techniques on top of one another, and what they are
// compared with. Factors have the columns of the flags, or kShortRank.
//   dp-powersgd  gradients of parameters as factors; the table that stages share dense
//   naive        everything as factors, and what they leave behind is lost
//   cb           gradients between stages as factors (compressed backpropagation)
//   cb+fe        and the table that stages share summed at once (fused embedding)
//   cb+fe+sc     and gradients of as many stages as it is worth as factors (selective stages)
// Behind each there may be options of its own: cb+fe+sc+factor-rank=auto. Beside short names a variant that names none
// of the flags backward-... is not compressed between stages: those of the command are for the short names.
inline constexpr int kShortRank = 8;
// The long form of a short name, without or with options; any other is its own.
std::string expanded(const std::string& variant, const TrainFlags& flags);

// A short name, or a scheme's and then options: flags of gradients, tables and optimizer without their dashes. What a
// variant does not name is as `flags` has it, before anything in them was resolved. Throws UsageError: an unknown name
// (with the nearest), an option that the scheme does not take, the same variant twice, a value that cannot be
// meant.
std::vector<Variant> variants_of(const std::string& text, const TrainFlags& flags,
                                 const Computation& computation, int ranks);

}  // namespace weft::cli
