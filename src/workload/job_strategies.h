// The strategies of a job, whoever drives it: data parallelism for what is dense, for each table its way
// (embedding/ways.h), for experts their exchange (experts/), between stages a pipeline (pipeline/).
//
// Parameters count as in the shape. A table that a hybrid embedding has is none of data parallelism's. Where the
// mesh has stages, all of these are of the ranks with the same stage, "the data-parallel ranks". Experts are summed
// over the ranks that have the same ones, and divided by the number of data-parallel ranks. A parameter of several
// stages is summed over all ranks that have a copy, at once or over data-parallel ranks first (StageOptions::tied_sum),
// and divided by the same number. What gradients leave behind is in units of the gradient and so of that number, which
// its rows tell: on a mesh with another one it weighs what it weighed (data_parallel/state.h).
//
// Where the mesh has tensor-parallel ranks, the data-parallel ranks are those with the same stage and the same place
// among them, whose shares of cut parameters are the same. What all of them have (norms, biases, experts, tables that
// a hybrid embedding has) each sums over its own data-parallel ranks, with the same result, dense: what a lossy
// scheme left behind would be there several times. The first of them answers for it in norms.
//
// Experts may be dealt to another number of ranks between two steps (packing; experts/packing.h says when). A
// driver does it in this order, on all ranks, when the last step is settled:
//
//   move = job.plan_move(ranks);
//   wait for job.start_move(*move); until here nothing has changed
//   ... memory of its own parameters and moments, of their new sizes ...
//   job.lay_out(shape, ranks); strategies of experts anew; all others, and their state, stay
//   job.finish_move(*move); parameters, moments and residuals of experts
//
// Thread: one at a time, that of the driver.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "data_parallel/data_parallel.h"
#include "embedding/hybrid.h"
#include "experts/experts.h"
#include "experts/router.h"
#include "pipeline/pipeline.h"
#include "pipeline/tensor_sums.h"
#include "state/relayout.h"
#include "step/strategies.h"
#include "weft/train/expert_options.h"
#include "weft/train/tables_options.h"
#include "world/mesh.h"

namespace weft {

struct TableWay;

// Of a table, that a rank has memory for in a walk of which nobody looks at a value.
inline constexpr std::int64_t kWalkedRows = 64;

// What sums of factors travel as (SchemeOptions::wire), where the scheme leaves it to the job.
std::string wire_of(const SchemeOptions& scheme, const StageOptions& stage);

struct JobOptions {
  DataParallelOptions parallel;  // dtype, divisor and first_slot are set here
  TablesOptions tables;
  ExpertOptions experts;       // where the shape has some
  Mesh mesh;                   // of one rank: all ranks along dp; its ep is that of the experts
  BackwardOptions backward;    // of stages
  OptimizerOptions optimizer;  // of the rows of tables that a hybrid embedding has
  DType dtype = DType::float32;
  StepOptions step;
  std::int64_t tokens = 0;  // of a micro-batch, at most; 0: not known
  int micro_batches = 0;    // of a step, for what rows of stages say; 0: not known
  // For walks in virtual time, of which nobody looks at a value:
  std::int64_t table_memory_rows = 0;  // HybridOptions::memory_rows
  int byte_scale = 1;                  // every element of a gradient that is summed stands for so many
};

// Tables among the parameters that a hybrid embedding has under these options.
std::vector<bool> held_tables(const ModelShape& shape, const TablesOptions& options);

// The part of a parameter that a rank has.
Shard shard_of(const ParameterShape& parameter);

// Parameters that data parallelism has under the scheme of the run.
std::vector<ParameterInfo> under_scheme(const ModelShape& shape, const TablesOptions& options);

// Throws UsageError for a name that the model has not. (One stage of it has not all of them.)
void check_stay_dense(const ModelShape& whole, const std::vector<std::string>& names);

class JobStrategies {
 public:
  // Installed. Throws UsageError.
  JobStrategies(Engine& engine, const Comm& world, const ModelShape& shape, const JobOptions& options);
  JobStrategies(const JobStrategies&) = delete;
  JobStrategies& operator=(const JobStrategies&) = delete;

  Strategies& all() { return *all_; }
  const Strategies& all() const { return *all_; }
  // Of what is dense and under the scheme.
  DataParallel& parallel() { return *parallel_; }
  const DataParallel& parallel() const { return *parallel_; }
  // Who takes the gradients of a parameter, and which of its own it is: a hybrid embedding has its tables,
  // data parallelism the others.
  struct Place {
    DataParallel* parallel = nullptr;
    HybridTable* table = nullptr;
    int local = 0;
  };
  const Place& place(int parameter) const { return places_[static_cast<std::size_t>(parameter)]; }
  const std::vector<HybridEmbedding*>& hybrids() const { return hybrids_; }  // one for each way
  // Null where the model has none.
  Experts* experts() const { return experts_; }
  RouterSums* router() const { return router_; }
  int expert_ranks() const { return options_.experts.ranks; }  // that the experts of a layer are dealt to
  Pipeline* pipeline() const { return pipeline_; }             // null where there is one stage
  TensorSums* tensor_sums() const { return sums_; }            // null where nothing is cut
  const Mesh& mesh() const { return mesh_; }
  const Comm& data_ranks() const { return data_; }
  // Of a batch that several ranks compute on, this one's tokens and loss count: it is of the last stage, and the
  // first of its tensor-parallel ranks.
  bool counts_tokens() const { return all_->shape().has_loss() && is_first_copy(); }
  // Which ranks hold the same part of a parameter as this one.
  Peers holders(const ParameterShape& parameter) const;
  // Which ranks have it, or a part of it.
  Peers counters(const ParameterShape& parameter) const;

  // ---- another layout of the experts ----
  // Throws UsageError for a number of ranks to which they cannot be dealt. REQUIRES: settled.
  std::unique_ptr<Relayout> plan_move(int ranks);
  Ticket start_move(Relayout& move);  // which outlives the ticket
  void lay_out(const ModelShape& shape, int ranks);
  void finish_move(const Relayout& move);
  // Seconds on the wire of a step's sums of experts' gradients where they are dealt to so many ranks, by such
  // figures.
  double predicted_expert_sums(int ranks, const LinkCost& link) const;
  // Values of this rank's experts where they are dealt to so many ranks.
  std::int64_t expert_elements(int ranks) const;

  // What state of a source this job has no use for, in one line that a user should see; "": none.
  std::string left_out(const StateSource& source) const { return Pipeline::left_out(source, pipeline_); }
  // Owners of state in the registry, beside the model and its optimizer.
  std::vector<std::string> owners() const;
  // Those that have residuals. With which of them a parameter is depends on the mesh: they are kin to one another
  // (LoadOptions).
  static bool has_residuals(std::string_view owner);
  // For gradients that come from now on. The density is of all gradients under the scheme, those of experts
  // among them, whatever their layout is then. REQUIRES, of it: between two steps.
  void set_lr(double lr);
  void set_density(double density);
  // Rows of an optimizer of all parameters: those of the tables are added to the others', with one row for
  // the learning rate of both.
  void add_optimizer_rows(std::vector<LiveRow>& rows, const Peers& peers);

  // Payload of this rank in the step that was committed or rolled back last: of all but tables, whose delayed
  // rows may be under way; and of tables. REQUIRES, of those: the moves of the step behind it have all been
  // walked, or it is settled.
  std::uint64_t sent_bytes() const;
  std::uint64_t table_bytes() const;
  // Payload of the busiest rank in a step by the formulas, of tables: of this rank in the step of
  // table_bytes().
  std::int64_t formula_bytes(const LinkCost& link, std::size_t micro_op_bytes) const;
  // Of tables alone, whose batches differ from step to step.
  std::int64_t table_formula_bytes(const LinkCost& link) const;
  // What a user should know of how tables go: "table 'embed': ...".
  std::vector<std::string> notes() const;
  // Processor time of the operations of all buckets, in that step.
  double computed_seconds() const;

 private:
  DataParallel& add_parallel(Engine& engine, const Comm& group, const std::vector<int>& parameters,
                             DataParallelOptions options);
  void add_expert_strategies(const std::vector<int>& parameters);
  void add_tied(const std::vector<int>& parameters);
  void choose_tied_sum(const Comm& group, std::span<const int> stages, std::int64_t count,
                       DataParallelOptions& options) const;
  void add_copies(const std::vector<int>& parameters);
  // Of what is summed dense under every scheme: the run's own, where that is dense.
  const Scheme& dense_sums() const;
  // Of gradients of this rank's stage, experts' too.
  std::string_view scheme_of_stage() const;
  void add_stages();
  // Ranks whose coordinates differ from this one's along these axes alone.
  Comm ranks_along(std::span<const Axis> axes, std::span<const int> stages, std::uint32_t label) const;
  bool is_first_copy() const;  // of what tensor-parallel ranks have all of
  void check_experts(int ranks) const;
  Mesh mesh_with(int expert_ranks) const;
  DataParallelOptions expert_sums(int replicas) const;
  bool is_of_experts(const StateRow& row) const;
  void add_hybrid(Engine& engine, const TableWay& way, const std::vector<int>& parameters,
                  const JobOptions& options);

  JobOptions options_;
  Mesh mesh_;
  Comm data_;   // this rank's data-parallel ranks
  Comm stage_;  // those of all tensor-parallel places: with the same blocks
  std::unique_ptr<Strategies> all_;
  DataParallel* parallel_ = nullptr;
  std::vector<DataParallel*> dense_tables_;  // one for each way
  std::vector<HybridEmbedding*> hybrids_;
  Experts* experts_ = nullptr;
  RouterSums* router_ = nullptr;
  DataParallel* expert_parallel_ = nullptr;
  DataParallel* tied_ = nullptr;    // of parameters that several stages have
  DataParallel* copies_ = nullptr;  // of those that all tensor-parallel ranks have
  Pipeline* pipeline_ = nullptr;
  TensorSums* sums_ = nullptr;
  std::vector<Place> places_;     // of each parameter
  std::uint32_t layouts_ = 0;     // of experts, before this one
  std::uint32_t first_step_ = 0;  // of their sums
  const int byte_scale_;
};

}  // namespace weft
