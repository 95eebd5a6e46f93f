// Steps of a job from those of its ranks, and the figures of a run: one meaning for every driver.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "weft/train/run.h"

namespace weft {

// What one rank tells of its steps: one value for each.
struct RankSteps {
  // All of it; in that time: waited for communication, and some exchange was under way.
  std::vector<double> seconds, waited_seconds, exchange_seconds;
  // Of all three: with no forward beside them, because the run settled behind the step. Empty: nowhere.
  std::vector<double> settle_seconds, settle_waited_seconds, settle_exchange_seconds;
  std::vector<double> payload_bytes;        // of its gradients and tables
  std::vector<double> table_formula_bytes;  // of tables, by formula
};
void add(RankSteps& steps, const StepRecord& record);

// Of all ranks together: one value for each step.
struct JobSteps {
  std::vector<double> seconds;          // from the end of a step on its last rank to the next one's, without
                                        // what settling adds
  std::vector<double> settled_seconds;  // with it
  std::vector<double> waited_seconds, exchange_seconds;  // mean over the ranks, within `seconds`
  // Mean over the ranks, settling included.
  std::vector<double> rank_seconds, rank_waited_seconds, rank_exchange_seconds;
  std::vector<double> payload_bytes, table_formula_bytes;  // of the busiest rank by each
};
// REQUIRES: ranks, with as many steps each. `pauses`: as workload/job_steps.h has them.
JobSteps job_of(std::span<const RankSteps> ranks, std::span<const std::int64_t> pauses = {});

// Of so much time in which some exchange was under way, the share that nobody waited. None of no time.
std::optional<double> hidden_share(std::span<const double> waited_seconds,
                                   std::span<const double> exchange_seconds);

// The figures of a run that steps alone give; `tokens`: of all steps and ranks. What else a summary has
// stays.
void summarize(const JobSteps& job, double tokens, TrainSummary& summary);

}  // namespace weft
