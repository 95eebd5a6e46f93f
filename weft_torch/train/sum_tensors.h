// Between a model and the sums of its tensor-parallel ranks: what a part gives, and the gradient of what it took, is
// added up in place (src/pipeline/tensor_sums.h), and the sum is what goes on.
//
// Thread: one, that of the rank.
#pragma once

#include <span>
#include <string>

#include "patterns/schedule.h"
#include "step/strategy.h"
#include "weft_torch/models/model.h"
#include "weft_torch/train/cut_model.h"
#include "workload/job_strategies.h"

namespace weft {

class SumTensors final : public TensorSource {
 public:
  // All outlive it.
  SumTensors(JobStrategies& job, CutModel& cut);

  // A step, or an evaluation.
  void begin(std::span<const Batch> micro_batches);
  void before_forward(const Piece& piece);
  void before_backward(const Piece& piece);
  bool has(const std::string& activation) const;
  Dense tensor(const TensorName& name) override;

 private:
  JobStrategies& job_;
  CutModel& cut_;
};

}  // namespace weft
