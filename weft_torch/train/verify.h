// A scheme beside a dense shadow: the same model, data and seed twice in one process, step by step, and how
// far apart they are. What `weft verify` runs on every rank; no torch is reachable from here.
//
// Of a parameter, and of a block over all its parameters, with a the scheme's and d the shadow's:
//   gradient   |a - d| / |d| of what the optimizer is given, root mean square over the steps. Most of a
//              sparse gradient comes later: this is large where the scheme works well too
//   parameter  |a - d| / |d| of the values behind the last step
//   drift      |a - d| / |d - start|: how much of the way that the shadow went is another. What hurts most is
//              what drifts most
// All are exactly 0 for a scheme that has the shadow's bits. Where a divisor is 0 they are 0 or, if the
// numerator is not, 1.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "data/source.h"
#include "weft/world.h"
#include "workload/train_options.h"

namespace weft {

struct VerifyRun {
  std::shared_ptr<const DataSource> source;  // already opened, or null
  std::string spoil;  // tests: a parameter whose averaged gradient is doubled under the scheme; empty: none
};

struct Distance {
  std::string block, name;  // of the parameter, empty for a whole block
  std::int64_t elements = 0;
  double gradient = 0, parameter = 0, drift = 0;
};

// Of rank 0; the others' has no distances.
struct VerifyReport {
  std::int64_t steps = 0;
  double loss = 0, shadow_loss = 0;  // of the last step
  std::vector<Distance> parameters;  // in order of use
  std::vector<Distance> blocks;
};
// What drifts most; null: nothing does.
const Distance* most_hurt(const std::vector<Distance>& distances);

// All ranks call it with equal arguments. Runs options.steps steps. Throws UsageError, or Error for a loss or
// a gradient that is not finite; after an error the world cannot be used any more.
VerifyReport verify_rank(World& world, const TrainOptions& options, const VerifyRun& run);

}  // namespace weft
