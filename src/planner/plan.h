// The plan of a training step, and what it predicts: rows, tables, seconds and bytes, without training.
//
// The prediction is a walk of the very tables that are trained with, in virtual time (workload/simulate.cc):
// blocks take the seconds of the outline (measured, or from FLOPs), messages those of the link, selection and
// coding those of the kernels. Some steps are walked, because quotas and thresholds settle in the first ones.
//
// A step is its parts, for every stage and on the mean of all:
//
//   step = computation + work + bubble + exposed + behind
//
//   Step 1  walk it on a link without limits. What a rank does not compute there, it waits for others that have not come
//           so far (the bubble), or it is work on gradients and messages that nothing hides: selection, factors, adding up,
//           copies. Ranks that all compute the same have no bubble: who is late there is late with that work, or is exposed
//   Step 2  walk it on this one. What it takes longer is exposed, as far as the rank waits so much longer for exchanges
//           that are under way; the rest it is behind others that are exposed
//
// All ranks of a job end their steps equally often, so exposed and behind have the same sum everywhere: a stage's
// share of it says whether its own exchanges are what the step waits for.
#pragma once

#include <string>
#include <vector>

#include "step/move.h"
#include "step/plan.h"
#include "weft/function_ref.h"
#include "weft/train/shape.h"
#include "workload/emulate.h"

namespace weft {

class JobStrategies;

// Of a stage, in a step: the mean over its ranks.
struct StagePrediction {
  double compute_seconds = 0;
  double work_seconds = 0;
  double bubble_seconds = 0;
  double exposed_seconds = 0;
  double behind_seconds = 0;
  // On this link, what is waited for; bubble, exposed, behind and most of the work are among it.
  struct Waited {
    std::string strategy;   // whose exchanges (Strategies::strategy_of)
    double seconds = 0;     // in all
    double for_others = 0;  // of them, until the last rank of the exchange had started it
  };
  std::vector<Waited> waited;
};

struct Prediction {
  double step_seconds = 0;  // of the job: median. The sum of the four below
  // Mean over the stages; `exposed` with what is behind others.
  double compute_seconds = 0, work_seconds = 0, bubble_seconds = 0;
  double exposed_seconds = 0;      // that the same step takes less on a link without limits
  double busiest_port_bytes = 0;   // of a step's gradients, that leave the busiest node: each rank, or those
                                   // that share a port
  int distinct_tables = 0;         // of all ranks; they hold together (step/verify.h)
  std::vector<std::string> notes;  // of tables, as they went
  std::vector<StagePrediction> stages;
};

struct Plan {
  std::vector<PlanRow> rows;  // of rank 0, and of a rank of each further stage
  std::uint64_t world = 0;    // the group of all ranks
  struct Stage {
    ModelShape shape;
    Tables tables;
    std::size_t rows = 0;  // of `rows`, one stage's behind the other's
  };
  std::vector<Stage> stages;  // of rank 0, and of a rank of each further stage
  std::string why_updates_wait;
  Prediction prediction;
};

// How many elements of gradients one of a walk has to stand for (SimulationOptions::byte_scale), so that a
// plan of a large job is made in seconds: 1 up to `exact` of them on all ranks together, above that as many
// as leave `walked`. Tables whose rows travel count for nothing. 1 where a byte scale cannot be: low rank,
// tokens that travel to experts.
struct WalkSize {
  double exact = 1 << 28, walked = 1 << 26;
};
int walk_scale(const Outline& outline, const EmulationOptions& emulation, int ranks, WalkSize size = {});

// The strategies of a rank of each stage, as they are planned: nothing of them runs.
void for_each_stage(const Outline& outline, const EmulationOptions& emulation, int ranks,
                    FunctionRef<void(int stage, JobStrategies& job)> f);

// Throws UsageError for what cannot be planned, and where the tables of the ranks do not hold together. `emulation`: scheme, buckets, clipping and the link by which
// algorithms are chosen; its steps are not used. Walked at the byte scale of `simulation`.
Plan make_plan(const Outline& outline, const EmulationOptions& emulation,
               const SimulationOptions& simulation);
// The same without a prediction, of so many ranks.
Plan make_tables(const Outline& outline, const EmulationOptions& emulation, int ranks);
// The prediction alone.
Prediction predict(const Outline& outline, const EmulationOptions& emulation,
                   const SimulationOptions& simulation);
// Its step_seconds: one walk instead of two.
double predict_step(const Outline& outline, const EmulationOptions& emulation,
                    const SimulationOptions& simulation);

// Whose ranks exchange it: "world", or the id of a smaller group.
std::string group_text(const Plan& plan, const PlanRow& row);

// "wait     gradients of bucket 3 from ...     step n-1   gradient", a line a move.
std::string text_of(const Plan::Stage& stage, Phase phase);
// "stage 0  F0 F1 F2 B0 F3 B1 ...", a line a stage: what it computes of which micro-batch (B: backward, or gradients
// of inputs where W stands for those of weights; with several chunks "F2.1").
std::string schedule_text(const StageOptions& stage, int micro_batches);
// Every rank a row, time to the right: what the second step of a walk computes.
std::string schedule_svg(const Outline& outline, const EmulationOptions& emulation,
                         const SimulationOptions& simulation);

}  // namespace weft
