// A training run beside its options: where it starts and what it leaves behind, and what its ranks tell while
// it goes on. Whoever drives steps (LibTorch, timers, virtual time) tells the same.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "weft/comm.h"

namespace weft {

class DataSource;
struct Outline;

// Where a run starts and what it leaves behind. Nothing here affects results.
struct TrainRun {
  enum class Resume : std::uint8_t {
    no,
    last,      // from the newest sound checkpoint; an error where there is none
    if_there,  // the same, or from the beginning where there is no checkpoint at all
  };
  std::string checkpoints;            // folder that all ranks see; empty: none are written or read
  std::int64_t checkpoint_every = 0;  // steps; also after the last one. 0: none are written
  int keep_last = 2;
  Resume resume = Resume::no;
  std::string config;                        // saved with checkpoints, for people
  std::shared_ptr<const DataSource> source;  // already opened (shared by ranks that are threads), or null
  // Tests: what a resumed run forgets, to show that it matters.
  bool forget_optimizer = false, forget_residuals = false;
};

// Experts are dealt to other ranks (src/experts/packing.h), or would be.
struct PackingChange {
  std::int64_t steps = 0;   // that were trained before
  int packing = 1;          // from here on
  std::uint64_t bytes = 0;  // payload that the move brought the busiest rank
  double seconds = 0;       // of the move, on this rank
  std::string why;          // a clause
};

// Seconds and bytes are of this rank.
struct StepRecord {
  std::int64_t step = 0;  // from 0
  std::int64_t epoch = 0;
  double loss = 0;  // mean over counted tokens of all ranks
  double lr = 0;
  double density = 0;
  std::int64_t tokens = 0;      // counted, of all ranks
  double seconds = 0;           // wall time
  double waited_seconds = 0;    // for communication, in that time
  double exchange_seconds = 0;  // in which some exchange was under way, in that time
  // Of all three: with no forward beside them, because the run settled behind this step.
  double settle_seconds = 0, settle_waited_seconds = 0, settle_exchange_seconds = 0;
  std::uint64_t payload_bytes = 0;        // of its gradients and tables, without frames
  std::uint64_t table_formula_bytes = 0;  // of tables, by embedding/formula.h
  double gradient_norm = 0;               // where gradients are clipped
  // Of each layer of experts: choices of its busiest expert over an even share of all, of all ranks' tokens.
  std::vector<double> expert_load;
  std::string skipped;  // it was left out: why
  int packing = 0;      // of experts; 0: there are none
};

struct TrainStart {
  std::int64_t first_step = 0;     // not 0 where a run was resumed
  std::int64_t parameters = 0;     // elements
  std::string data;                // for people
  std::vector<std::string> notes;  // that the user must be told
};

struct TrainSummary {
  std::int64_t first_step = 0, steps = 0, skipped = 0;  // done in this process
  double first_loss = 0, last_loss = 0;                 // of steps that were done here and not skipped
  double seconds = 0;                                   // all steps, without start-up and checkpoints
  double tokens_per_second = 0;
  double step_seconds_median = 0;
  std::vector<double> step_seconds;   // of the job: from the end of a step on the last rank to the next one's
  double waiting_share = 0;           // of the ranks' time, mean over them
  double payload_bytes_per_step = 0;  // median; of the busiest rank's gradients, without frames
  // Of the busiest rank: of gradients in the last step (data_parallel/formula.h) and of tables, the median
  // (embedding/formula.h).
  double formula_bytes_per_step = 0;
  // Of the ranks' time in which some exchange was under way, what nobody waited: mean over them. None where
  // nothing was exchanged.
  std::optional<double> hidden_share;
  std::vector<std::string> notes;  // what the user should know of how it went
  // All that the busiest rank sent, with frames and control; none in virtual time, where nothing is framed.
  std::optional<std::uint64_t> wire_bytes;
  // Of a run whose model computed, what it measured of itself: what its blocks took (median over the last
  // steps, mean over the ranks; none of too short a run) and the link as its ranks agreed on it.
  std::shared_ptr<const Outline> outline;
  LinkCost link;
  // What the plan predicts (measure/predicted.h); none where it cannot be told: why. Exposed, measured: of the
  // median step, what it takes longer than the plan says for a link without limits.
  std::optional<double> predicted_step_seconds, predicted_exposed_seconds, exposed_seconds;
  std::string not_predicted;
  std::int64_t checkpoint_step = -1;    // written last; -1: none
  std::vector<PackingChange> packings;  // of experts, as they changed; the first is that of the start
};

// Calls come on the rank's thread, between its steps.
class Observer {
 public:
  virtual ~Observer() = default;
  virtual void started(const TrainStart& start) { static_cast<void>(start); }
  // May wait: the time counts for no step where the run has settled behind the step before.
  virtual void before_step(std::int64_t step) { static_cast<void>(step); }
  // True: nothing is under way between this step and the next one's before_step(). Equal on all ranks; bits
  // do not depend on it.
  virtual bool settle_behind(std::int64_t step) {
    static_cast<void>(step);
    return false;
  }
  virtual void step(const StepRecord& record) { static_cast<void>(record); }
  virtual void checkpoint(std::int64_t steps_done) { static_cast<void>(steps_done); }
  virtual void packing(const PackingChange& change) { static_cast<void>(change); }
};

}  // namespace weft
