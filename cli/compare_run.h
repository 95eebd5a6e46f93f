// The runs of a comparison: one world for each scheme, all of them alive, taking turns.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "compare_options.h"
#include "compare_point.h"
#include "compare_turns.h"
#include "data/source.h"
#include "weft/world.h"
#include "workload/emulate.h"
#include "workload/outline.h"

namespace weft::cli {

// Runs a scheme's ranks from beginning to end, each calling lane.before_step() before every step.
using Work = std::function<Recorded(const std::string& scheme, Lane& lane)>;
struct Round {
  std::size_t number = 0, rounds = 0;  // from 0
  std::string scheme;
};
struct Listener {
  std::function<void()> first_opened;  // the first scheme's ranks are there, no other's
  std::function<void(const Round& round)> turn;
  std::function<void(const std::string& scheme, const Recorded& recorded)> done;
};
// Each scheme's `work` on a thread of its own; one at a time has the turn, and who begins changes from round
// to round. Rethrows the first failure, when all have ended.
void take_turns(const std::vector<std::string>& schemes, int ranks, const Turns& turns, const Work& work,
                const Listener& listener);

// Of one scheme or a variant of it.
TrainOptions options_of(const CompareCommand& command, const std::string& scheme, const Turns& turns);

// A model that is trained. `parameters` is set before the first step. REQUIRES: all outlive the work.
Work train_work(const CompareCommand& command, const NamedLink& link, const Turns& turns,
                std::shared_ptr<const DataSource> source, std::int64_t& parameters);
// Timers and gradients by an outline.
Work emulate_work(const CompareCommand& command, const NamedLink& link, const Turns& turns,
                  const Outline& outline);
// The same in virtual time, where nobody takes turns.
Recorded simulate_scheme(const TrainOptions& options, int ranks, const NamedLink& link,
                         const Outline& outline, const SimulatedCosts& costs);

}  // namespace weft::cli
