// Between a model and the exchange of its stages: what arrives becomes what parts take, and what they give is what
// travels (src/pipeline/pipeline.h).
//
// Thread: one, that of the rank.
#pragma once

#include <span>

#include "patterns/schedule.h"
#include "step/strategy.h"
#include "weft_torch/models/model.h"
#include "weft_torch/train/cut_model.h"
#include "workload/job_strategies.h"

namespace weft {

class StageTensors final : public TensorSource {
 public:
  // All outlive it.
  StageTensors(const Model& model, JobStrategies& job, CutModel& cut);

  // A step, or an evaluation.
  void begin(std::span<const Batch> micro_batches);
  void before_forward(const Piece& piece);
  void before_backward(const Piece& piece);
  bool has(const std::string& activation) const;  // it passes between stages
  Dense tensor(const TensorName& name) override;

 private:
  torch::Tensor made_of(std::shared_ptr<std::byte[]> memory, int micro_batch) const;

  const Model& model_;
  JobStrategies& job_;
  CutModel& cut_;
  std::span<const Batch> batches_;
  torch::Tensor leaving_;  // the gradient that was asked for last: whoever asks copies it
};

}  // namespace weft
