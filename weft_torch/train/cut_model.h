// Forward and backward of a model, part by part. Autograd works inside a part only: what a part gives is cut
// off its graph, and whoever takes it takes a leaf. The order is the caller's (step/move.h).
//
// A tensor with several readers has one leaf a micro-batch. Its readers' gradients are added to the leaf's in
// the order in which they go backward, which the table fixes; its producer goes backward after all of them
// and then lets go of it.
//
// Thread: one, that of the rank.
#pragma once

#include <span>
#include <vector>

#include "patterns/schedule.h"
#include "weft_torch/models/model.h"

namespace weft {

class CutModel {
 public:
  explicit CutModel(const Model& model);

  // A step of these micro-batches, which may be empty and live until the step's last backward. Throws
  // UsageError for one that does not fit the model.
  void begin(std::span<const Batch> micro_batches, const StepContext& context);
  // REQUIRES: pieces come in an order that step/verify.h lets pass.
  void forward(const Piece& piece);
  // The loss counts `scale` times.
  void backward(const Piece& piece, double scale);
  double loss_sum() const { return loss_sum_; }  // of the micro-batches whose forward has ended

 private:
  struct Ports {  // of a part: places among the activations
    std::vector<std::size_t> takes, gives;
  };
  struct Activation {
    torch::Tensor given;  // with the graph of its part
    torch::Tensor leaf;   // what its readers take
  };
  const Ports& ports(const Piece& piece) const {
    return ports_[static_cast<std::size_t>(piece.block)][static_cast<std::size_t>(piece.part)];
  }

  const Model& model_;
  std::vector<std::vector<Ports>> ports_;  // of each block and part
  std::size_t num_activations_ = 0, loss_ = 0;
  std::span<const Batch> batches_;
  StepContext context_;
  std::vector<std::vector<Activation>> activations_;  // of each micro-batch
  double loss_sum_ = 0;
};

}  // namespace weft
