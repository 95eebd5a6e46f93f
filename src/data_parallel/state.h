// What data-parallel training keeps between steps: the memory, laid out by bucket so that an operation works
// on it in place, and its rows in the registry of state (state/registry.h), by parameter name.
//
//   residual   sum      what compression left behind on this rank, in units of its gradient
//   velocity   sum      with momentum correction: what its gradients have gathered on this rank, in the same units
//   scale      same     what its bucket's quota follows (quotas.h)
//   factor     same     of a matrix that is compressed to low rank: where the next step begins
//   team_quota, team_figures, thresholds, threshold_steps, regions
//              restart  of each bucket: controllers of its algorithm. They go along where a bucket holds the
//                       same parameters, else they start anew
//
// Of a parameter of which its ranks hold a part (ParameterInfo::shard), residual and velocity are of that part
// of the tensor and move with it; all else goes along where the part is the same.
//
// Another plan moves every parameter's residual to its new place and never zeroes one. Gradients are summed and divided:
// the residuals' sum over that divisor is what averages still owe, and what every change of layout leaves as it is,
// velocities' likewise. Where the divisor is another (that of a job is the number of its data-parallel ranks, also of
// experts and tied tables, whose groups are smaller and larger), they are multiplied by new over old when they are
// loaded, once; where it is the same, as when experts change hands between two steps, nothing is. Quotas follow the
// ratios of scales, and of factors only directions count: both stay as they are.
//
// Thread: one at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "collectives/sparse_allreduce/call.h"
#include "compressors/low_rank.h"
#include "data_parallel/buckets.h"
#include "data_parallel/quotas.h"
#include "data_parallel/velocity.h"
#include "state/registry.h"
#include "weft/sparse.h"

namespace weft {

// What the rows of a bucket's controllers are called: by its first and last parameter, and a hash of all of
// them, their lengths and parts.
std::string bucket_name(const BucketPlan& plan, int bucket);

class ParameterState {
 public:
  struct Options {
    Peers peers;
    // Of sums, where several ranks of a group hold the same and each adds up with ranks of its own: those. The first of
    // them saves what they have in common, and all load it. None: `peers`.
    std::optional<Peers> of_copy = std::nullopt;
    bool is_first_copy = true;
    double divisor = 1;                   // of the sums of gradients (DataParallelOptions)
    bool velocities = false;              // momentum correction is on
    bool factors = false;                 // matrices are compressed to low rank
    std::string owner = "data_parallel";  // of its rows
  };

  // `registry` outlives it.
  ParameterState(const BucketPlan& plan, StateRegistry& registry, const Options& options);
  ~ParameterState();
  ParameterState(const ParameterState&) = delete;
  ParameterState& operator=(const ParameterState&) = delete;

  // REQUIRES: nothing is in flight or staged. Throws UsageError, and changes nothing, if a parameter that has
  // a residual is not in the plan, or with another count: its mass would be lost.
  void install(const BucketPlan& plan);

  // Memory stays where it is until install().
  SparseState& bucket(int b) const { return *buckets_[static_cast<std::size_t>(b)]; }
  Velocity& bucket_velocity(int b) { return velocities_[static_cast<std::size_t>(b)]; }
  WarmFactor& factor(int parameter) { return factors_[static_cast<std::size_t>(parameter)]; }
  // Committed; empty: zeros. Valid until the next commit.
  std::span<const float> residual(int parameter) const;
  std::span<const float> velocity(int parameter) const;
  double scale(int parameter) const { return scales_[static_cast<std::size_t>(parameter)]; }
  std::int64_t step() const { return registry_.step(); }  // committed ones

  // What the last result says of a bucket; joins the staged state of its operation.
  void stage_scale(int bucket, double measured);
  // What is staged of a parameter becomes what is committed of it: for one that stays out of a step.
  void keep(int parameter);

 private:
  void lay_out(const BucketPlan& plan);
  OwnedState owned();
  std::vector<LiveRow> rows();
  LiveRow part_row(const char* kind, int parameter, LargeVector<float>& all);
  LiveRow scale_row(int parameter);
  LiveRow factor_row(int parameter);
  void add_controllers(std::vector<LiveRow>& rows, int bucket);
  bool is_complete() const;
  void commit();
  void roll_back();

  StateRegistry& registry_;
  Options options_;
  BucketPlan plan_;
  std::vector<std::unique_ptr<SparseState>> buckets_;
  std::vector<double> scales_, staged_scales_;  // of each parameter
  std::vector<WarmFactor> factors_;             // of each parameter
  std::vector<Velocity> velocities_;            // of each bucket
};

}  // namespace weft
