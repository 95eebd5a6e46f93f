// One rank's model in data-parallel training with LibTorch: hooks hand gradients over while backward runs,
// and the next forward of a block waits for that block's gradients only, then updates its parameters.
//
//   Replica replica(engine, comm, model, options);
//   for (std::int64_t step = 0; ...; ++step) {
//     const StepOutcome outcome = replica.step(micro_batches, {.seed = seed, .step = step});
//   }
//   replica.settle();  // the last step's updates; before parameters are looked at
//
// It is the LibTorch driver of step/run_step.h: it computes pieces and waits for tickets, on a thread that
// blocks. The order of a step, the agreement on tokens, the verdict and the norm are the table's and the
// strategies'.
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
// GPU are staged through pinned memory (staging.h) and updated by torch's optimizers, on the GPU.
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

#include "data_parallel/data_parallel.h"
#include "state/optimizer.h"
#include "state/registry.h"
#include "step/run_step.h"
#include "weft/engine.h"
#include "weft_torch/models/model.h"
#include "weft_torch/train/cut_model.h"
#include "weft_torch/train/staging.h"
#include "weft_torch/train/torch_optimizer.h"

namespace weft {

struct ReplicaOptions {
  // affects results; equal on all ranks
  DataParallelOptions parallel;  // dtype, divisor and first_slot are set here
  OptimizerOptions optimizer = default_options("adamw");
  std::string optimizer_from = "weft";  // or "torch": its own, with the same options
  double clip_norm = 0;                 // of the averaged gradient of all parameters; 0: none
  bool skip_not_finite = false;  // leave such a step out on all ranks, with its residuals; else an Error
  // affects speed only
  bool lookahead = false;  // step() is told of the batch that comes next: nobody waits for its tokens
};

struct TrainOptions;
// Of a training run (options.h).
ReplicaOptions replica_options(const TrainOptions& options);

struct StepOutcome {
  std::int64_t tokens = 0;          // counted, of all ranks
  std::optional<double> last_loss;  // mean over the tokens of the step before; none at the first
  double waited_seconds = 0;        // for communication, on the thread of this rank
  // Of the step before:
  std::string skipped;           // it was left out: why
  double gradient_norm = 0;      // where it is clipped; locally: of this rank's share, before that
  std::uint64_t sent_bytes = 0;  // payload of this rank's gradients
};

// A batch in `count` parts, for as many micro-batches.
std::vector<Batch> micro_batches_of(const Batch& whole, int count);

class Replica final : private Driver {
 public:
  // The averaged gradient of a parameter, just before it is updated; may be changed.
  using Watch = std::function<void(const Parameter& parameter, torch::Tensor& gradient)>;

  // Throws UsageError. `model` outlives it and gets gradients that stay in place; frozen parameters (without
  // requires_grad) are left alone.
  Replica(Engine& engine, const Comm& comm, Model& model, const ReplicaOptions& options);
  ~Replica() override;
  Replica(const Replica&) = delete;
  Replica& operator=(const Replica&) = delete;

  // Forward and backward of all micro-batches (at least one, which may be empty); gradients of the last one's
  // backward go out as they come. `next`: with lookahead, the counted tokens of this rank in the next step, 0
  // where there is none.
  StepOutcome step(std::span<const Batch> micro_batches, const StepContext& context, std::int64_t next = 0);
  // Waits for what is under way and updates every parameter. Of its outcome, what is said of the step before.
  StepOutcome settle();
  // Ends what is under way because of `cause`, here and on the peers, and waits until nothing uses the
  // model's memory: before it goes away after an error.
  void abandon(std::exception_ptr cause) noexcept;
  // Of the next step and those behind it.
  void set_density(double density);

  // Of the next update and those behind it.
  void set_lr(double lr);
  void watch(Watch watch) { watch_ = std::move(watch); }

  // What lives between steps, of data parallelism and of the optimizer. To be saved or loaded when settled.
  StateRegistry& registry() { return strategies_->state(); }
  DataParallel& parallel() { return *parallel_; }
  Strategies& strategies() { return *strategies_; }
  std::int64_t skipped_steps() const { return skipped_steps_; }

 private:
  class Hook;
  struct Mine {  // a parameter that is trained
    Parameter parameter;
    int block = 0;
    Piece ready;             // behind which its gradient is complete, in a step of one micro-batch
    torch::Tensor gradient;  // dense, its place never changes
    torch::Tensor host;      // where the engine reads and writes: the gradient, or pinned memory
    bool seen = false;       // in some micro-batch of this step
    bool handed = false;     // to the engine, in this step
  };

  Task<void> compute(Piece piece) override;
  Task<void> wait(Ticket ticket) override;

  ModelShape add_parameters();
  void add_strategies(Engine& engine, const Comm& comm, ModelShape trained);
  void make_optimizer();
  void forward(const Piece& piece);
  void backward(const Piece& piece);
  bool is_ready_behind(const Mine& mine, const Piece& piece) const;
  void gradient_ready(int index);
  void send(int index);
  void hand_over(int index);
  void fetch(int index);
  void update_block(int block);
  void update(int index);
  void take_result();

  Model& model_;
  ReplicaOptions options_;
  CutModel cut_;
  std::vector<Mine> parameters_;
  std::unique_ptr<Strategies> strategies_;
  DataParallel* parallel_ = nullptr;  // one of them
  std::unique_ptr<Walker> walker_;
  std::unique_ptr<Optimizer> optimizer_;             // of weft, or
  std::unique_ptr<TorchOptimizer> torch_optimizer_;  // of torch
  Staging staging_;
  Watch watch_;
  bool wide_ = false;  // float64
  int micro_batches_ = 0;
  Piece piece_;                    // that is computed
  std::int64_t next_tokens_ = 0;   // of the batch that comes next
  std::optional<double> density_;  // to be set when no step is under way
  StepOutcome outcome_;
  std::int64_t skipped_steps_ = 0;
};

}  // namespace weft
