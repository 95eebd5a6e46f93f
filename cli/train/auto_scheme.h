// `--scheme auto`, `--tables auto`, `--expert-slices auto`, `--compressed-stages auto` and `--backward-messages critical`
// of a training run: what is chosen, by whom, and how it is kept.
#pragma once

#include <optional>
#include <string>

#include "planner/choose.h"
#include "planner/messages.h"
#include "planner/slices.h"
#include "planner/stages.h"
#include "train/options.h"
#include "weft/world.h"
#include "workload/table_choice.h"
#include "workload/train_options.h"

namespace weft::cli {

// By the plan's prediction for this outline and link (none: the link by which algorithms are chosen, where
// `launched`, else no limit).
Choice choose_for(const TrainOptions& options, int ranks, const std::optional<EmulatedLink>& link,
                  const Outline& outline, bool launched = false);

// By the cost of each table's ids on the link by which algorithms are chosen.
TablesChoice choose_tables_for(const TrainOptions& options, int ranks, const Outline& outline);

// As choose_for(), of the slices of experts' rows.
SlicesChoice choose_slices_for(const TrainOptions& options, int ranks,
                               const std::optional<EmulatedLink>& link, const Outline& outline,
                               bool launched = false);

// As choose_for(), of the stages whose gradients are compressed, and of the columns of factors. REQUIRES: several
// stages.
StagesChoice choose_stages_for(const TrainOptions& options, int ranks,
                               const std::optional<EmulatedLink>& link, const Outline& outline,
                               bool launched = false, bool and_rank = false);

// Of the messages between stages, by the link by which algorithms are chosen.
MessagesChoice choose_messages_for(const TrainOptions& options, int ranks, const Outline& outline);

// Those that are asked for, in this order: tables, scheme, slices, stages, messages; told on stderr. Changes
// `options`.
void choose(const Asked& asked, TrainOptions& options, int ranks, const std::optional<EmulatedLink>& link,
            const Outline& outline, bool launched = false);

// What was chosen in lines for other ranks, and back. What nobody asked for is not among them: of that ranks are
// compared.
std::string lines_of(const Asked& asked, const TrainOptions& options);
void take_lines(const std::string& lines, TrainOptions& options);

// config.toml with what was chosen, so that a run that goes on does so with it.
std::string with_choice(const std::string& config, const TrainOptions& options);

}  // namespace weft::cli
