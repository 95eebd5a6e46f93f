// Training steps without a model: the blocks of an outline are timers, everything else is real. The same
// table of moves is walked (step/run_step.h) with the same strategies as by a model's replica
// (weft_torch/train/replica.h); only the driver differs:
//
//   emulate_rank    wall time, one rank of a world: threads over a shaped network, processes over tcp or mpi.
//                   A timer sleeps, so eight ranks on two cores behave like eight accelerators; gradients,
//                   selection, codecs, copies and bytes are real, and compete for the real cores. Or it
//                   occupies a core (`occupies`): for ranks that compute on the cores on which their
//                   communication runs, and slow each other down.
//   simulate_ranks  virtual time, all ranks on the calling thread: strategies, selection and bytes are the
//                   same; what they compute takes the virtual time that KernelCosts say (none by default).
//
// Gradients: one vector of the distribution is drawn once, before the first step; the gradient of (rank,
// step, tensor) is a window of it at a place that is a hash of the three. So making gradients takes no time,
// and any two ranks' gradients are independent: for selections this is the hard
// case (the union of their entries is largest). The default is `heavy`, log-normal magnitudes: what gradients
// of networks were found to be (Chmiel et al., "Neural gradients are near-lognormal", ICLR 2021). All tensors
// have the same scale.
//
// Experts: rows travel as they do in training (workload/drawn_experts.h), and a slice takes as long as its
// rows. Where they are packed on the way (workload/expert_packing.h) as many bytes move as parameters and
// moments have.
//
// Tables: the ids of (rank, step) are drawn as the outline says (workload/table_draws.h); rows, their
// gradients and their updates are real. In virtual time nobody looks at a value: all rows of a table share
// the memory of a few, and what travels is the same.
//
// Memory of a rank: twice to five times the parameters (buckets, results, residuals), as in training; the
// drawn vector is there once a process.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "data_parallel/data_parallel.h"
#include "experts/packing.h"
#include "weft/config.h"
#include "weft/kernel_costs.h"
#include "weft/train/expert_options.h"
#include "weft/train/optimizer_options.h"
#include "weft/train/run.h"
#include "weft/train/stage_options.h"
#include "weft/train/tables_options.h"
#include "weft/world.h"
#include "workload/distributions.h"
#include "workload/outline.h"
#include "world/mesh.h"

namespace weft {

class GradientWindows;
struct StepWaits;  // workload/step_waits.h

struct EmulationOptions {
  // affects results; equal on all ranks
  DataParallelOptions parallel;  // dtype, divisor and first_slot are set here
  TablesOptions tables;
  Mesh mesh;           // of the ranks; of one rank: all of them along dp
  StageOptions stage;  // how stages are computed, where the mesh has several
  BackwardOptions backward;
  bool tensor_bf16 = false;  // TensorOptions::bf16, where the mesh has tensor-parallel ranks
  ExpertOptions experts;     // layout: slices, ranks; the rest is the outline's
  OptimizerOptions optimizer = default_options("adamw");  // of the rows of tables
  std::int64_t steps = 15;                                // that are measured
  std::int64_t warmup = 3;                                // before them
  std::uint64_t seed = 1;                                 // of the gradients
  int micro_batches = 1;       // that a step's forward and backward are cut into (workload/token_cuts.h)
  std::int64_t sequences = 0;  // of a rank's tokens in a step; 0: not known
  Distribution gradients = Distribution::heavy;
  // Why the first update waits for all gradients (clipping, say); empty: it does not.
  std::string updates_wait;
  std::optional<LinkCost> planned_link;      // by which algorithms are chosen; none: the world's own figures
  std::optional<EmulatedLink> packing_link;  // by which packing of experts is; none: those figures
  PackingOptions packing;                    // when it is decided; its memory is that of `experts`
  // affects speed only
  std::shared_ptr<const GradientWindows> windows;  // of outline, gradients and seed (windows_of); null: own
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
  std::vector<double> exchange_seconds;   // in which some exchange was under way, in that time
  std::vector<double> payload_bytes;      // payload of this rank's gradients and tables
  std::vector<double> compute_seconds;    // processor time of all buckets' operations: choosing, coding,
                                          // adding up; 0 in virtual time
  std::vector<double> hand_over_seconds;  // copying gradients into their buckets, on the rank's thread
  std::vector<StepTimes> times;           // of its pieces
  // Of its gradients' payload, what leaves its node: what counts at the node's port. Empty in wall time.
  std::vector<double> scale_out_bytes;
  std::int64_t formula_bytes = 0;           // of the last step: data_parallel/formula.h, embedding/formula.h
  std::vector<PackingChange> packings;      // of experts, warm-up included
  std::vector<double> table_formula_bytes;  // of them, of tables
  std::vector<std::string> notes;           // of tables (JobStrategies::notes)
  // Of messages between stages, the most at a time in the last step: of what arrives, and of what was on its way
  // (Pipeline::kept(), Pipeline::on_the_way()); pieces of memory that all steps took from the system for them.
  std::size_t kept_bytes = 0, on_the_way_bytes = 0;
  std::uint64_t fresh_pieces = 0;
};

// The stage of a rank.
StageOptions stage_of(const EmulationOptions& options, int rank);

std::vector<std::vector<double>> seconds_of(std::span<const EmulatedSteps> ranks);  // of each rank's steps

// As a policy of experts has messages cut (experts/policies.h); whether its engines have priorities, it says
// itself.
Config with_policy(Config config, const ExpertOptions& experts);

// For the ranks of a process together.
std::shared_ptr<const GradientWindows> windows_of(const Outline& outline, const EmulationOptions& options);

// REQUIRES: called on all ranks of the world. Throws UsageError, and what tickets throw: then everything
// under way was abandoned.
EmulatedSteps emulate_rank(World& world, const Outline& outline, const EmulationOptions& options);

// What computation costs in virtual time: where it happens, by the size that it has there.
struct SimulatedCosts {
  KernelCosts kernels;    // workload/measure_kernels.h; none by default
  int workers = 0;        // that share the work on gradients of all ranks; 0: each rank has its own
  bool occupies = false;  // a rank's computation stands still while its gradients are worked on
};
// Threads of the pool that run_ranks() gives so many ranks.
int pool_workers(const Config& config, int ranks);

struct SimulationOptions {
  int ranks = 1;
  // Every element stands for so many, so that a thousand ranks fit into memory: tensors, buckets and what
  // stays dense shrink by it, bytes and computation count that much more. Tables whose rows travel stay as
  // they are, and so do their bytes, and those of what passes between stages and between parts. Not for low rank, whose bytes do not follow the number of elements.
  int byte_scale = 1;
  EmulatedLink link;  // 0 bytes per second: no limit
  SimulatedCosts costs;
  Config config = {};
  // Disorder: seconds that a piece takes a rank longer; each message is late by a random time, drawn from the
  // seed; longer ones wait for their receive.
  std::function<double(int rank, std::int64_t step, const Piece& piece)> late;
  double jitter_seconds = 0;
  std::size_t eager_limit = std::numeric_limits<std::size_t>::max();
  std::uint64_t seed = 0;
  std::vector<Trace>* traces = nullptr;                  // one per rank, filled while they run
  int* distinct_tables = nullptr;                        // how many the ranks have, once they were verified
  std::vector<std::vector<StepWaits>>* waits = nullptr;  // of each rank, of each of its measured steps
};

// A result for each rank. The tables of all of them are verified together before they are walked. Throws
// UsageError and what the ranks' operations throw.
std::vector<EmulatedSteps> simulate_ranks(const Outline& outline, const EmulationOptions& options,
                                          const SimulationOptions& simulation);

}  // namespace weft
