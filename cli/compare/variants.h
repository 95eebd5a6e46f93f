// Variants as --variants names them: "dense,spardl+teams=2+bucket-mib=4".
#pragma once

#include <string>
#include <vector>

#include "measure/comparison.h"
#include "train_flags.h"

namespace weft::cli {

std::vector<std::string> split(const std::string& text, char at);

// A scheme's name, then options: flags of gradients, tables and optimizer without their dashes. What a variant does
// not name is as `flags` has it, before anything in them was resolved. Throws UsageError: an unknown name
// (with the nearest), an option that the scheme does not take, the same variant twice, a value that cannot be
// meant.
std::vector<Variant> variants_of(const std::string& text, const TrainFlags& flags,
                                 const Computation& computation, int ranks);

}  // namespace weft::cli
