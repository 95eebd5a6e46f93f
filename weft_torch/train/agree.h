// What one rank finds out and all ranks go by, and failures that all ranks must end with.
//
// All ranks call these in the same order; each is one or two short operations.
#pragma once

#include <functional>
#include <string>

#include "weft/world.h"

namespace weft {

// What `f` gives on rank 0. If it throws there, every rank throws an Error with that sentence.
std::string from_rank_0(World& world, const std::function<std::string()>& f);

// Every rank runs `f`; where it throws on some rank, every rank throws an Error with the sentence of the
// first of them, which it names unless that is rank 0.
void on_all_ranks(World& world, const std::function<void()>& f);

}  // namespace weft
