// Packing of experts in a job that runs, whoever drives it: what its steps take is gathered, agreed on and
// decided by (experts/packing.h). Changing the layout is the driver's (job_strategies.h).
//
//   ExpertPacking packing(job, options, setting);
//   for each step: ...walk...; packing.step_ended();
//     if (packing.due(steps)) { wait for packing.agree(); packing.decide(steps); }
//     if (const auto ranks = packing.wanted()) { settle; deal experts to *ranks; packing.changed(...); }
//
// Thread: one at a time, that of the driver.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "experts/packing.h"
#include "weft/train/expert_options.h"
#include "weft/train/run.h"
#include "weft/world.h"
#include "workload/job_strategies.h"

namespace weft {

struct PackingSetting {
  int micro_batches = 1;    // of a step
  std::int64_t tokens = 0;  // of a rank's micro-batch
  int moments = 0;          // vectors that the optimizer keeps for each parameter
  PackingNetwork network;
  PackingOptions options = {};  // its memory is that of the experts' options
};

// Of ranks whose link is emulated or simulated, or that have these figures alone.
PackingNetwork packing_network(const LinkCost& figures, const std::optional<EmulatedLink>& link, int ranks);

class ExpertPacking {
 public:
  // `options.ranks`: of packing 1 where it is "auto"; the job may have another by now. Throws UsageError
  // where the memory is too small. REQUIRES: the job has experts and outlives it.
  ExpertPacking(JobStrategies& job, const ExpertOptions& options, const PackingSetting& setting);

  void step_ended();                   // of the step that was walked last
  bool due(std::int64_t steps) const;  // so many were walked; the same on all ranks
  Ticket agree();                      // all ranks
  void decide(std::int64_t steps);     // REQUIRES: agree() was awaited
  std::optional<int> wanted() const;   // ranks to deal experts to; none: those of now
  // What decide() has to say that was not said yet.
  std::optional<PackingChange> take_line();
  // The experts were dealt to wanted() ranks: what the move brought the rank that got most, and how long it
  // took here.
  void changed(std::int64_t bytes, double seconds);

  int packing() const { return ranks_ / job_.expert_ranks(); }
  const std::vector<PackingChange>& changes() const { return changes_; }
  const PackingController& controller() const { return controller_; }

 private:
  JobStrategies& job_;
  int ranks_;  // of packing 1
  bool auto_;
  PackingController controller_;
  std::vector<double> sums_{0, 0};  // of the steps of the window: experts, all-to-all
  std::int64_t steps_ = 0;          // of it
  std::vector<double> values_;      // that are agreed on
  std::uint32_t agreements_ = 0;
  std::optional<PackingChange> next_;  // decided, and not yet so; or to be said
  std::vector<PackingChange> changes_;
};

}  // namespace weft
