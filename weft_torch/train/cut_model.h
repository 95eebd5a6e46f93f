// Forward and backward of a model, part by part. Autograd works inside a part only: what a part gives is cut
// off its graph, and whoever takes it takes a leaf. The order is the caller's (step/move.h).
//
// A tensor with several readers has one leaf a micro-batch. Its readers' gradients are added to the leaf's in
// the order in which they go backward, which the table fixes; its producer goes backward after all of them
// and then lets go of it.
//
// An activation may go elsewhere and something else come in its place: what its part gave and the gradient of
// what its readers took leave, what arrives in their place has a length of its own.
//
// With `recompute` a part's forward leaves no graph behind: its backward computes it again from what the part took,
// which is kept. What travelled is not sent again, and dropout is the same (it is keyed by token): the same bits.
//
// Thread: one, that of the rank.
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "patterns/schedule.h"
#include "weft_torch/models/model.h"

namespace weft {

class CutModel {
 public:
  explicit CutModel(const Model& model, bool recompute = false);

  // A step of these micro-batches, which may be empty and live until the step's last backward. Throws
  // UsageError for one that does not fit the model.
  void begin(std::span<const Batch> micro_batches, const StepContext& context);
  // REQUIRES: pieces come in an order that step/verify.h lets pass.
  void forward(const Piece& piece);
  // The loss counts `scale` times.
  void backward(const Piece& piece, double scale);
  double loss_sum() const { return loss_sum_; }  // of the micro-batches whose forward has ended

  // In host memory, contiguous, until the giver's backward has ended; undefined: there is none, since the
  // micro-batch is empty.
  torch::Tensor to_send(const std::string& activation, int micro_batch);
  torch::Tensor gradient_to_send(const std::string& activation, int micro_batch);
  // For its readers, in place of what was given; for its giver, in place of its readers' gradients.
  void arrived(const std::string& activation, int micro_batch, const torch::Tensor& tensor);
  void gradient_arrived(const std::string& activation, int micro_batch, const torch::Tensor& gradient);
  // Nobody reads an activation that arrived any more.
  void let_go(const std::string& activation, int micro_batch) {
    this->activation(activation, micro_batch) = {};
  }
  // The same with what was to be sent, whose memory others have added to.
  void take_sum(const std::string& activation, int micro_batch);
  void take_gradient_sum(const std::string& activation, int micro_batch);

 private:
  struct Ports {  // of a part: places among the activations
    std::vector<std::size_t> takes, gives;
  };
  struct Activation {
    torch::Tensor given;                // with the graph of its part
    torch::Tensor leaf;                 // what its readers take
    torch::Tensor gradient;             // that has come for it
    torch::Tensor sent, sent_gradient;  // what leaves
  };
  const Ports& ports(const Piece& piece) const {
    return ports_[static_cast<std::size_t>(piece.block)][static_cast<std::size_t>(piece.part)];
  }

  Activation& activation(const std::string& name, int micro_batch) {
    return activations_[static_cast<std::size_t>(micro_batch)][places_.at(name)];
  }
  const PartShape& part(const Piece& piece) const;

  std::vector<torch::Tensor> computed(const Piece& piece) const;

  const Model& model_;
  bool recompute_;
  std::map<std::string, std::size_t> places_;        // of activations
  std::vector<std::vector<Ports>> ports_;            // of each block and part
  std::size_t loss_ = static_cast<std::size_t>(-1);  // there is none but in the last stage
  std::span<const Batch> batches_;
  StepContext context_;
  std::vector<std::vector<Activation>> activations_;  // of each micro-batch
  double loss_sum_ = 0;
};

}  // namespace weft
