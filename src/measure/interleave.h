// The runs of a comparison: one world for each variant, all of them alive, taking turns.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "measure/point.h"
#include "measure/turns.h"

namespace weft {

// Runs a variant's ranks from beginning to end, each calling lane.before_step() before every step.
using RunVariant = std::function<Recorded(const std::string& variant, Lane& lane)>;
struct Round {
  std::size_t number = 0, rounds = 0;  // from 0
  std::string variant;
};
struct Listener {
  // The first variant's ranks are there, no other's. False: memory does not hold all of them, so that each
  // runs alone, one after another. May throw: not even one fits.
  std::function<bool()> all_fit;
  std::function<void(const Round& round)> turn;
  std::function<void(const std::string& variant, const Recorded& recorded, bool side_by_side)> done;
};
// Each variant's `work` on a thread of its own; one at a time has the turn, and who begins changes from round
// to round. Rethrows the first failure, when all have ended.
void take_turns(const std::vector<std::string>& variants, int ranks, const Turns& turns,
                const RunVariant& work, const Listener& listener);

}  // namespace weft
