// What the two drivers of workload/emulate.h share: the gradients, the order of a step's events, the account
// of steps.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "step/run_step.h"
#include "workload/drawn_experts.h"
#include "workload/emulate.h"
#include "workload/expert_packing.h"
#include "workload/job_strategies.h"
#include "workload/table_draws.h"

namespace weft {

// Windows of one vector of the distribution, and ids of tables. Threads: any, once it is made.
class GradientWindows {
 public:
  GradientWindows(const Outline& outline, const EmulationOptions& options);
  std::span<const float> of(int rank, std::int64_t step, int tensor) const;
  // What the rank has of a tensor that somebody takes: of experts, its own.
  std::span<const float> of(int rank, std::int64_t step, int tensor, const JobStrategies::Place& place) const;
  // Of a table that somebody holds: of so many rows.
  std::span<const float> of(int rank, std::int64_t step, int tensor, std::int64_t rows) const {
    const auto i = static_cast<std::size_t>(tensor);
    return of(rank, step, tensor).first(static_cast<std::size_t>(rows) * widths_[i]);
  }
  // What a rank's step looks up in all tables that somebody holds.
  struct Asked {
    std::vector<std::vector<std::int64_t>> ids;
    std::vector<BatchInfo::Lookup> lookups;  // of them
  };
  Asked asked(int rank, std::int64_t step) const;

 private:
  struct Drawn {
    std::string name;
    TableDraws draws;
  };
  std::uint64_t seed_;
  std::vector<std::size_t> lengths_;  // of the tensors, or of the longest gradient of a table's rows
  std::vector<std::size_t> widths_;   // of a table's rows
  std::vector<Drawn> tables_;
  std::vector<float> values_;
};

// The gradients of one part in the order in which its backward makes them.
struct ReadyGradient {
  int tensor = 0;
  double seconds = 0;  // since the gradient before it, or since the part's backward began
};
// What a part takes.
struct PartTimes {
  double forward_seconds = 0, backward_seconds = 0;  // half of it for gradients of inputs, half for weights'

  double row_forward_seconds = 0,
         row_backward_seconds = 0;  // of a slice of experts, beside them: of each row
  std::vector<ReadyGradient> gradients;
  double rest_seconds = 0;  // of backward, from the last gradient to the end

  bool has_rows() const { return row_forward_seconds > 0 || row_backward_seconds > 0; }
  // Of its backward, that this work is.
  static double share_of(Work work) { return work == Work::backward ? 1 : 0.5; }
};
// Of each block and part of a shape.
using Timetable = std::vector<std::vector<PartTimes>>;
// Of shape_of(outline), or a stage of it.
struct Ranks {
  int experts = 1;  // that those of a layer are dealt to
  int tensor = 1;   // that cut its products
};
Timetable timetable_of(const Outline& outline, const ModelShape& shape, const Ranks& ranks = {});

// What a rank has of the outline's model: all of it, or its stage.
struct RankModel {
  ModelShape shape;
  Timetable times;
  std::vector<int> tensors;  // of each parameter: its place among the outline's
};
RankModel rank_model(const Outline& outline, const EmulationOptions& options, const ExpertLayout& layout,
                     int rank);

// The share of a tensor-parallel rank.
TensorOptions tensor_of(const EmulationOptions& options, int rank);

// Activations and gradients that pass between stages, drawn once (a codec takes longer for some values than for others:
// of a matrix of one column it makes all other columns anew), and shares of them that tensor-parallel ranks add up, as
// zeros. Thread: one at a time.
class PassedValues final : public TensorSource {
 public:
  PassedValues(const Outline& outline, const EmulationOptions& options, JobStrategies& job);
  void begin();  // a step
  bool has(const std::string& activation) const;
  Dense tensor(const TensorName& name) override;

 private:
  const SumShape* sum_of(const std::string& activation) const;  // null: it is none

  JobStrategies& job_;
  std::vector<std::int64_t> tokens_;  // of each micro-batch
  std::vector<float> values_;         // that pass on, another window of them in every micro-batch
  std::vector<float> shares_;         // that are added up, one sum at a time
};

// The outline with the forward and backward seconds of one micro-batch of so many, and updates of a rank's share.
Outline of_one_micro_batch(Outline outline, const EmulationOptions& options);

// With what tables take in addition that every rank has all of.
Outline with_dense_tables(Outline outline, const TablesOptions& tables);

// The strategies of an emulated or simulated rank.
JobOptions job_options(const EmulationOptions& options, const Outline& outline, int rank);
void check(const EmulationOptions& options);

// What a model and its optimizer would hold of experts, as rows of state that move with them: zeros, of
// which there are as many bytes. Thread: one at a time.
class ExpertValues {
 public:
  ExpertValues(JobStrategies& job,
               const OptimizerOptions& optimizer);  // it outlives the job's registry's use
  ExpertValues(const ExpertValues&) = delete;
  ExpertValues& operator=(const ExpertValues&) = delete;

 private:
  std::vector<LiveRow> rows();

  JobStrategies& job_;
  std::vector<std::string> kinds_;
  std::vector<std::byte> zeros_;
};

// Packing of a rank's experts; null where it stays as it is and has no limit.
std::unique_ptr<ExpertPacking> packing_of(JobStrategies& job, const Outline& outline,
                                          const EmulationOptions& options);

// Numbers of steps as they become known. A step's times are known at its end, its bytes when its tickets are
// done, which is inside the next step or when it is settled.
class StepAccount {
 public:
  struct Step {
    double seconds = 0, waited = 0, exchanged = 0, handed_over = 0;
  };

  void ended(const Step& step, const StepTimes& times);  // REQUIRES: the one before is complete
  void settled(const Step& more);                        // in addition, of the step that has ended last
  // Its tickets are done, its result is there. `link`: by which all-reduces are chosen.
  void complete(const JobStrategies& job, const LinkCost& link);
  // Without the first `warmup` steps. REQUIRES: all are complete. formula_bytes is for the caller to set.
  EmulatedSteps take(std::int64_t warmup, const JobStrategies& job);

 private:
  EmulatedSteps all_;
};

}  // namespace weft
