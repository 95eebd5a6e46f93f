// Training steps without a model: the blocks of an outline are timers, everything else is real. The same
// strategy (data_parallel/data_parallel.h) is driven by the same events as by a model's replica
// (weft_torch/train/replica.h):
//
//   1  the ranks agree on their tokens in one short blocking message
//   2  forward, block by block: wait for the tickets of this block's parameters of the step before, take the
//      time of its update, then of its forward. With clipping the first block waits for all tickets
//   3  backward, last block to first: gradients are handed over as they become ready
//   4  step_end(); what is under way is waited for in the next step's forward
//
// Two drivers:
//   emulate_rank    wall time, one rank of a world: threads over a shaped network, processes over tcp or mpi.
//                   A timer sleeps, so eight ranks on two cores behave like eight accelerators; gradients,
//                   selection, codecs, copies and bytes are real, and compete for the real cores. Or it
//                   occupies a core (`occupies`): for ranks that compute on the cores on which their
//                   communication runs, and slow each other down.
//   simulate_ranks  virtual time, all ranks on the calling thread: the strategy, the selection and the bytes
//                   are the same, but they take the virtual time that SimulatedCosts says (none by default).
//
// Gradients: one vector of the distribution is drawn once, before the first step; the gradient of (rank,
// step, tensor) is a window of it at a place that is a hash of the three. So making gradients takes no time,
// and any two ranks' gradients are independent: for selections this is the hard
// case (the union of their entries is largest). The default is `heavy`, log-normal magnitudes: what gradients
// of networks were found to be (Chmiel et al., "Neural gradients are near-lognormal", ICLR 2021). All tensors
// have the same scale.
//
// Memory of a rank: twice to five times the parameters (buckets, results, residuals), as in training.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "data_parallel/data_parallel.h"
#include "weft/config.h"
#include "weft/world.h"
#include "workload/distributions.h"
#include "workload/outline.h"

namespace weft {

struct EmulationOptions {
  // affects results; equal on all ranks
  DataParallelOptions parallel;  // dtype, divisor and first_slot are set here
  std::int64_t steps = 15;       // that are measured
  std::int64_t warmup = 3;       // before them
  std::uint64_t seed = 1;        // of the gradients
  Distribution gradients = Distribution::heavy;
  bool clip = false;  // the first update waits for all gradients, as clipping by a norm does
  std::optional<LinkCost> planned_link;  // by which algorithms are chosen; none: the world's own figures
  // affects speed only
  bool occupies = false;  // a block's seconds are processor time of the rank's thread; else it sleeps
  // Called on the rank's thread (in virtual time: all ranks' on the calling one). Steps
  // count from 0, warm-up included.
  std::function<void(std::int64_t step)> before_step;    // its time counts for no step
  std::function<bool(std::int64_t step)> settles_after;  // wait for all of that step and update at once, as
                                                         // before a pause; that time counts for this step.
                                                         // The same on all ranks. The last step always does
};

// Of one rank; a number for each measured step, unless said otherwise.
struct EmulatedSteps {
  std::vector<double> step_seconds;       // from the end of one step's backward to that of the next
  std::vector<double> waited_seconds;     // for communication, in that time
  std::vector<double> wire_bytes;         // payload of this rank's gradients
  std::vector<double> compute_seconds;    // processor time of all buckets' operations: choosing, coding,
                                          // adding up; 0 in virtual time
  std::vector<double> hand_over_seconds;  // copying gradients into their buckets, on the rank's thread
  std::vector<double> bucket_seconds;     // a number for each bucket: median of its compute seconds
  std::int64_t formula_bytes = 0;         // of the last step; data_parallel/formula.h
};

std::vector<std::vector<double>> seconds_of(std::span<const EmulatedSteps> ranks);  // of each rank's steps

// REQUIRES: called on all ranks of the world. Throws UsageError, and what tickets throw: then everything
// under way was abandoned.
EmulatedSteps emulate_rank(World& world, const Outline& outline, const EmulationOptions& options);

// What computation on the way costs in virtual time.
struct SimulatedCosts {
  std::vector<double> bucket_seconds;  // processor time of each bucket's operation; empty: none
  double hand_over_seconds = 0;        // all gradients of a step into their buckets
  int workers = 0;                     // that share the buckets' work of all ranks; 0: each rank has its own
  bool occupies = false;               // a rank's computation stands still while its buckets are worked on
};
// As an emulated run had them: medians over its steps, mean over its ranks. `workers`: of its pool, 0 where
// every rank had a machine of its own.
SimulatedCosts costs_of(std::span<const EmulatedSteps> ranks, int workers);
// Threads of the pool that run_ranks() gives so many ranks.
int pool_workers(const Config& config, int ranks);

struct SimulationOptions {
  int ranks = 1;
  EmulatedLink link;  // 0 bytes per second: no limit
  SimulatedCosts costs;
  Config config = {};
};

// A result for each rank. Throws UsageError and what the ranks' operations throw.
std::vector<EmulatedSteps> simulate_ranks(const Outline& outline, const EmulationOptions& options,
                                          const SimulationOptions& simulation);

}  // namespace weft
