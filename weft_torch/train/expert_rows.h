// Layers of experts as a model that is trained meets them: what its gates give travels (src/experts/), and what
// arrives is what its experts take; backward the same way.
//
// Rows are in host memory while they travel; a model on a GPU gets copies.
//
// Thread: one, that of the rank.
#pragma once

#include <span>
#include <vector>

#include "step/strategy.h"
#include "weft_torch/models/model.h"
#include "weft_torch/train/cut_model.h"
#include "workload/job_strategies.h"

namespace weft {

class ExpertRows final : public TensorSource {
 public:
  // Both outlive it.
  ExpertRows(const Model& model, JobStrategies& job, CutModel& cut);

  void begin(std::span<const Batch> micro_batches);  // a step, or an evaluation of one batch
  // What was awaited before a piece is what it takes.
  void before_forward(const Piece& piece);
  void before_backward(const Piece& piece);
  Dense tensor(const TensorName& name) override;

 private:
  const ExpertShape* layer_of(const Piece& piece, int& layer) const;
  torch::Tensor rows_of(int layer, RowExchange kind, int slice, int micro_batch) const;

  const Model& model_;
  JobStrategies& job_;
  CutModel& cut_;
};

}  // namespace weft
