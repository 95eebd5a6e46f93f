// Backward in halves: a linear layer's backward gives the gradient of its input at once, and keeps what the gradient
// of its weight is made of; those products are computed when they are asked for, piece by piece. A stage behind
// which others wait sends the former on before it turns to the latter (schedule zb-h1, patterns/pipeline.h).
//
// Everything else of a part (norms, attention, embeddings, gates) has its gradients in the first half.
//
// Thread: one, that of the rank.
#pragma once

#include <torch/types.h>

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "patterns/schedule.h"

namespace weft {

class WeightQueue {
 public:
  // What is kept from here on is of that piece.
  void begin(const Piece& piece) { at_ = key_of(piece); }
  // Undefined: there is no such parameter, or it is not trained. `expert`: as linear() has it.
  struct Product {
    torch::Tensor weight, bias, input, gradient;
    std::int64_t expert = -1;
  };
  void keep(Product product) { kept_[at_].push_back(std::move(product)); }
  // Adds the products of that piece to the gradients of weights and biases, and says which have all of theirs now.
  void run(const Piece& piece, const std::function<void(const torch::Tensor& parameter)>& added);
  void clear() { kept_.clear(); }

 private:
  using Key = std::array<int, 3>;  // block, part, micro-batch
  static Key key_of(const Piece& piece) { return {piece.block, piece.part, piece.micro_batch}; }

  Key at_{};
  std::map<Key, std::vector<Product>> kept_;
};

// x weight^T + bias (undefined: none); with a queue its backward is in halves. `expert`: weight and bias have a row for
// each of several, and that one is meant.
torch::Tensor linear(const torch::Tensor& x, const torch::Tensor& weight, const torch::Tensor& bias,
                     WeightQueue* queue, std::int64_t expert = -1);

}  // namespace weft
