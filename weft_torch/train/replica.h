// One rank's model in data-parallel training with LibTorch: hooks hand gradients over while backward runs,
// and the next forward of a block waits for that block's gradients only, then updates its parameters.
//
//   Replica replica(engine, comm, model, options);
//   for (std::int64_t step = 0; ...; ++step) {
//     const StepOutcome outcome = replica.step(micro_batches, {.seed = seed, .step = step});
//   }
//   replica.settle();  // the last step's updates; before parameters are looked at
//
// The order of a step, what the ranks agree on, and the norm are those of every driver (docs/architecture.md,
// "A training step").
//
// The loss of a step is the sum over the counted tokens of all ranks, divided by their number: gradients are
// scaled by size / (counted tokens of all ranks) and averaged over the ranks once. A loss that is not finite
// is an Error on all ranks that names step and rank, unless such steps are skipped.
//
// With parallel.find_unused a parameter that no rank used is not updated at all: neither its value nor its
// optimizer's state moves, as where torch's gradient is undefined. Without it such a one has a gradient of
// zeros.
//
// A sparse gradient (of an embedding) is added into the parameter's dense one as it comes. Parameters on a
// GPU are staged through pinned memory and updated by torch's optimizers, on the GPU.
//
// Tables that a hybrid embedding has (options.tables) are not the model's any more: each rank holds its
// columns, in host memory, and a step reads the rows that it needs. What the model held of them is taken over
// and given free.
//
// Thread: one, that of the rank (where there is a GPU, torch calls back on a thread of its own while backward
// waits for it). The engine's thread never touches a tensor's own memory but to read
// gradients.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "weft/engine.h"
#include "weft/train/optimizer_options.h"
#include "weft/train/scheme_options.h"
#include "weft/train/tables_options.h"
#include "weft_torch/models/model.h"

namespace weft {

class DataParallel;
class JobStrategies;
class Strategies;
class StateRegistry;
struct TrainOptions;

struct ReplicaOptions {
  // affects results; equal on all ranks
  DataParallelOptions parallel;  // dtype, divisor and first_slot are set here
  TablesOptions tables;
  BackwardOptions backward;  // where the model is a stage of one (ModelOptions::stage)
  OptimizerOptions optimizer = default_options("adamw");  // of rows of tables too: validate_rows()
  std::string optimizer_from = "weft";                    // or "torch": its own, with the same options
  double clip_norm = 0;          // of the averaged gradient of all parameters; 0: none
  bool skip_not_finite = false;  // leave such a step out on all ranks, with its residuals; else an Error
  std::uint64_t compared = 0;    // of whatever else the caller's results depend on
  // Of this rank's micro-batches, at most; 0: not known. What messages of stages of more tokens had left behind, in a
  // checkpoint, is dropped: nothing would take all of it along.
  std::int64_t tokens = 0;
  // affects speed only
  // Parts compute their forward again in backward: less memory, a third more to compute.
  bool recompute = false;
  bool lookahead = false;  // step() is told of the batch that comes next: nobody waits for its tokens
};

// Of a training run (weft/train/options.h).
ReplicaOptions replica_options(const TrainOptions& options);

struct StepOutcome {
  std::int64_t tokens = 0;          // counted, of all ranks
  std::optional<double> last_loss;  // mean over the tokens of the step before; none at the first
  double waited_seconds = 0;        // for communication, on the thread of this rank
  // Of the step before:
  std::string skipped;           // it was left out: why
  double gradient_norm = 0;      // where it is clipped; locally: of this rank's share, before that
  std::uint64_t sent_bytes = 0;  // payload of this rank's gradients and tables
};

// A batch in `count` parts, for as many micro-batches.
std::vector<Batch> micro_batches_of(const Batch& whole, int count);

class Replica {
 public:
  // The averaged gradient of a parameter, just before it is updated; may be changed. None of a table that is
  // held elsewhere.
  using Watch = std::function<void(const Parameter& parameter, torch::Tensor& gradient)>;

  // Throws UsageError. `model` outlives it and gets gradients that stay in place; frozen parameters (without
  // requires_grad) are left alone.
  Replica(Engine& engine, const Comm& comm, Model& model, const ReplicaOptions& options);
  ~Replica();
  Replica(const Replica&) = delete;
  Replica& operator=(const Replica&) = delete;

  // Forward and backward of all micro-batches (at least one, which may be empty); gradients of the last one's
  // backward go out as they come. `next`: with lookahead, this rank's batch of the next step, which has the
  // number behind this one's; null where there is none. What tables hold is asked for in forward.
  StepOutcome step(std::span<const Batch> micro_batches, const StepContext& context,
                   const Batch* next = nullptr);
  // The mean loss over the counted tokens of all ranks' batches, from which nothing is learned: no dropout, a
  // softmax over all words. Settles first. All ranks call it, each with as many batches as it has.
  double evaluate(std::span<const Batch> batches);
  // Waits for what is under way and updates every parameter. Of its outcome, what is said of the step before.
  StepOutcome settle();
  // Deals the experts of a layer to so many ranks from the next step on, and settles first: parameters,
  // moments and residuals come to whoever holds them there. All ranks call it. Throws UsageError, and
  // changes nothing, for a number to which they cannot be dealt. After another error the replica is of no
  // use any more.
  struct Moved {
    std::uint64_t sent_bytes = 0, planned_bytes = 0;  // payload of this rank
    std::int64_t most_bytes = 0;                      // that came to the rank that got most
  };
  Moved lay_out_experts(int ranks);
  // Ends what is under way because of `cause`, here and on the peers, and waits until nothing uses the
  // model's memory: before it goes away after an error.
  void abandon(std::exception_ptr cause) noexcept;
  // Of the next step and those behind it.
  void set_density(double density);

  // Of the gradients of the next step and those behind it.
  void set_lr(double lr);
  void watch(Watch watch);

  // Copies of all parameters of this rank's model, in its order, tables included. All ranks call it, when settled.
  std::vector<torch::Tensor> values();

  // What lives between steps: of the model, of the strategies and of the optimizer. To be saved or loaded when
  // settled.
  StateRegistry& registry();
  JobStrategies& job();
  DataParallel& parallel();
  Strategies& strategies();
  std::int64_t skipped_steps() const;

 private:
  class Core;
  std::unique_ptr<Core> core_;
};

}  // namespace weft
