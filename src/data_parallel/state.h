// What data-parallel training keeps between steps, by parameter name.
//
//   residual     of each parameter: what compression left behind on this rank, in units of the gradient
//   scale        of each parameter: what its bucket's quota follows (quotas.h); the same on all ranks
//   velocity     of each parameter, with momentum correction: what its gradients have gathered on this rank
//   factor       of each matrix that is compressed to low rank: where the next step begins; the same on all
//                ranks
//   controllers  of each bucket: thresholds and team quotas of its algorithm
//
// An operation writes into staging only; commit() makes all of it so at once, roll_back() forgets it. Memory
// is laid out by bucket, so that an operation works on it in place; a name finds its part. Another plan moves
// every parameter's residual to its new place and never zeroes one; controllers go along where a bucket holds
// the same parameters, else they start anew.
//
// Another number of ranks: reshard() gives the residual of old rank r to new rank r mod M. Where several meet
// they are added in float32 in the order of their ranks: the sum over ranks is conserved up to one rounding
// for each rank that was merged, and exactly where the values sum exactly; with M >= N nothing is added and
// nothing rounds. Velocities are dealt the same way: what the next step puts in is momentum times their sum.
//
// Thread: one at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "collectives/sparse_allreduce/call.h"
#include "compressors/low_rank.h"
#include "data_parallel/buckets.h"
#include "data_parallel/quotas.h"
#include "data_parallel/velocity.h"
#include "weft/sparse.h"

namespace weft {

// The committed state of one rank as plain data: what a checkpoint holds.
struct StateSnapshot {
  struct Parameter {
    std::string name;
    std::int64_t count = 0;
    std::vector<float> residual;  // empty: zeros
    double scale = kUnmeasured;
    std::vector<float> factor;  // factor_rank columns, one after the other; empty: none
    int factor_rank = 0;
    std::vector<float> velocity;  // empty: zeros
  };
  struct Controllers {
    std::vector<std::string> parameters;  // of the bucket, in its order
    TeamQuota team_quota;
    Thresholds thresholds;
  };
  std::int64_t step = 0;  // committed ones
  int rank = 0;
  int size = 1;
  std::vector<Parameter> parameters;
  std::vector<Controllers> controllers;  // hold for this size only
};

// The snapshots of all ranks of a job, for `size` ranks. Controllers are kept only where the size stays.
// Throws UsageError unless they are one snapshot of each rank, of one step, with the same parameters and
// factors.
std::vector<StateSnapshot> reshard(std::span<const StateSnapshot> snapshots, int size);

class ParameterState {
 public:
  explicit ParameterState(const BucketPlan& plan);

  // REQUIRES: nothing is in flight or staged. Throws UsageError, and changes nothing, if a parameter that has
  // a residual is not in the plan, or with another count: its mass would be lost.
  void install(const BucketPlan& plan);

  SparseState& bucket(int b) const { return *buckets_[static_cast<std::size_t>(b)]; }
  // Committed; empty: zeros. Valid until the next commit.
  std::span<const float> residual(int parameter) const;
  // Committed; empty: zeros. Valid until the next commit.
  std::span<const float> velocity(int parameter) const;
  // Of a bucket. Stays where it is until install() or load().
  Velocity& bucket_velocity(int b) { return velocities_[static_cast<std::size_t>(b)]; }
  double scale(int parameter) const { return scales_[static_cast<std::size_t>(parameter)]; }
  // Stays where it is until install() or load().
  WarmFactor& factor(int parameter) { return factors_[static_cast<std::size_t>(parameter)]; }
  std::int64_t step() const { return step_; }  // committed ones

  // What the last result says of a bucket; joins the staged state of its operation.
  void stage_scale(int bucket, double measured);
  // Throws UsageError, and commits nothing, if a bucket has nothing staged.
  void commit();
  void roll_back();

  StateSnapshot save(int rank, int size) const;
  // Replaces everything. Names that the snapshot lacks start with zeros, and so does a factor of a matrix
  // that has another shape here: it holds no mass. A bucket takes its controllers only where all its
  // parameters come with the snapshot. Throws UsageError, and changes nothing, for a snapshot of another rank
  // or size (reshard first), with values that are not finite, with a parameter that has another length here,
  // with a residual that has no place here, or with regions that do not fit their bucket.
  void load(const StateSnapshot& snapshot, int rank, int size);

 private:
  void add_residual(int parameter, std::span<const float> residual);
  void add_velocity(int parameter, std::span<const float> velocity);
  void take(const StateSnapshot::Parameter& from);
  void take_controllers(const StateSnapshot& snapshot);

  BucketPlan plan_;
  std::vector<std::unique_ptr<SparseState>> buckets_;
  std::vector<double> scales_, staged_scales_;  // of each parameter
  std::vector<WarmFactor> factors_;             // of each parameter
  std::vector<Velocity> velocities_;            // of each bucket
  std::int64_t step_ = 0;
};

}  // namespace weft
