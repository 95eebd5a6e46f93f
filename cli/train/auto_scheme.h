// `--scheme auto` of a training run: what is chosen, by whom, and how it is kept.
#pragma once

#include <optional>
#include <string>

#include "planner/choose.h"
#include "weft/world.h"
#include "workload/train_options.h"

namespace weft::cli {

// By the plan's prediction for this outline and link (none: the link by which algorithms are chosen, where
// `launched`, else no limit).
Choice choose_for(const TrainOptions& options, int ranks, const std::optional<EmulatedLink>& link,
                  const Outline& outline, bool launched = false);

// A choice in one line for other ranks, and back.
std::string line_of(const Choice& choice);
void take_line(const std::string& line, TrainOptions& options, std::string& why);

// config.toml with the scheme that was chosen, so that a run that goes on does so with it.
std::string with_scheme(const std::string& config, const SchemeOptions& scheme);

}  // namespace weft::cli
