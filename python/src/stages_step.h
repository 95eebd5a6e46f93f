// The step of a rank that has a stage of a list of modules (pipeline/pipeline.h), as Python computes it: one
// block for each module, of one part. The tables of moves are those of every driver, and are walked from
// piece to piece:
//
//   begin     up to the first piece: a module of this stage and a micro-batch, forward, backward or the other half of it
//   go_on     the piece was computed; up to the next one, or to the end
//   finish    gradients are summed, the verdict is known
//
// Between two of them whoever computes takes what came from another stage (arrived), gives what goes to one
// (give), and hands over gradients of parameters behind the piece that completes them (Stop::ready).
//
// What passes between stages is known when a module has computed: its width is told by install().
//
// Before a step ranks agree that each of them has what it needs (agree): what fails on one of them is refused on all,
// and nothing has happened. What fails behind it has peers that wait: who computes abandons the job.
//
// Thread: one at a time, with the interpreter's lock.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "agreed.h"
#include "step/run_step.h"
#include "weft/world.h"
#include "workload/job_strategies.h"

namespace weft::python {

struct StagesSpec {
  // Of all modules, those that are trained, in the order of their first use; one that several modules have is
  // there once.
  std::vector<ParameterShape> parameters;
  std::vector<std::vector<int>> modules;  // parameters of each
  StageOptions stage;                     // which one of them this rank has follows from its rank
  int micro_batches = 1;
  BackwardOptions backward;
  DataParallelOptions parallel;
};

class StagesStep final : public Driver {
 public:
  // `spec`: the same on all ranks, which have compared it. Throws UsageError, then the same one on all of them.
  // Takes two slots, from `slot` on.
  StagesStep(World& world, StagesSpec spec, std::uint32_t slot);

  const StagesSpec& spec() const { return spec_; }
  const ModelShape& shape() const { return shape_; }  // of this stage
  const Mesh& mesh() const { return mesh_; }
  Coordinates place() const { return mesh_.coordinates(world_.rank()); }
  int stage_of(int module) const { return stage_of_module_.at(static_cast<std::size_t>(module)); }
  // Place of one of this stage's parameters among those of all modules; ranks that have it.
  int origin_of_parameter(int parameter) const;
  int holders_of(int parameter) const;

  // Before a step or an evaluation, on all ranks: throws UsageError, the same on all of them, where one has failed
  // or has other lines (agreed.h). Parts are pipelines.
  void agree(const std::vector<AgreedLine>& lines);

  // A step was left on the way: no other one begins.
  void interrupt() { interrupted_ = true; }

  // What the rank of the first stage says of what it passes on; each rank of the pipeline calls it.
  using Passed = std::array<std::int64_t, 12>;
  Passed tell(Passed mine);
  // Values of a token that pass between stages. Once, on all ranks; takes num_slots() in every group.
  void install(std::int64_t width, std::uint32_t first_slot);
  std::uint32_t num_slots() const;
  bool is_installed() const { return job_ != nullptr; }
  JobStrategies& job() { return *job_; }

  // Where a walk has stopped.
  struct Stop {
    // Of zb-h1 `backward` is its first half, `weights` the other one.
    enum class At : std::uint8_t { forward, backward, weights, end } at = At::end;
    int module = 0;  // of all
    int micro_batch = 0;
    std::vector<int> ready;  // parameters of this stage whose gradients are complete behind it
  };
  // `tokens`: of each micro-batch, that pass between stages, the same on all ranks of the pipeline.
  // `counted`: over which the loss of this rank's batch is a mean.
  Stop begin(std::span<const std::int64_t> tokens, std::int64_t counted);
  // A micro-batch of which nothing is learned.
  Stop begin_forward(std::int64_t tokens);
  Stop go_on();
  // By what a sum of losses is multiplied before backward.
  double scale() const;
  // `loss`: the sum of this rank's. Gives the verdict; where it is committed result_of() has the means of
  // gradients.
  StepResult finish(double loss);
  // Of the step that was finished last, the mean over what counts on all ranks; none: nothing counted.
  std::optional<double> loss() const { return job_->all().last_loss(); }

  // Of a chunk of this stage and a micro-batch: what it gives to the stage behind it, or (back) the gradient
  // of what it took from the stage before it. Read until the chunk's backward begins, or the walk has ended.
  void give(int chunk, bool back, int micro_batch, Dense values);
  // What came in its place, and its memory.
  std::shared_ptr<std::byte[]> arrived(int chunk, bool back, int micro_batch) const;
  // Of a parameter of this stage; read until finish() has returned.
  void gradient_ready(int parameter, Dense gradient);
  void result_of(int parameter, Dense out) const;

  StateSnapshot save();
  void load(std::span<const StateSnapshot> snapshots);
  std::vector<Ticket> tickets() const;

  Task<void> compute(Piece piece) override;
  Task<void> wait(Ticket ticket) override;
  Dense tensor(const TensorName& name) override;

 private:
  void require_whole() const;  // no walk was left
  void require_between_steps();
  template <class F>
  auto uninterrupted(F work);
  void begin_walk();
  Stop walk(const std::function<void()>& go);
  void await(const Ticket& ticket);
  const ChunkShape& chunk_at(int chunk) const;

  World& world_;
  StagesSpec spec_;
  const std::uint32_t slot_;
  std::uint32_t told_ = 0, agreed_ = 0;
  Mesh mesh_;
  ModelShape whole_, shape_;
  std::vector<int> stage_of_module_;
  std::unique_ptr<JobStrategies> job_;
  std::unique_ptr<Walker> walker_;
  Stop stop_;
  bool scaled_ = false;  // in this step
  // By activation, whether it is its gradient, micro-batch.
  std::map<std::tuple<std::string, bool, int>, Dense> given_;
  bool interrupted_ = false;
};

}  // namespace weft::python
