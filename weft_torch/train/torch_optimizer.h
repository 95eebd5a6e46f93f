// torch's own optimizers in the place of weft's (data_parallel/optimizer.h): one for each parameter, so that
// a block is updated as soon as its gradients are there, and a parameter without a gradient not at all.
//
// Their state is saved under the same names as weft's: a checkpoint of either is read by the other.
//
// Thread: one at a time.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "data_parallel/optimizer.h"
#include "weft_torch/models/model.h"

namespace torch::optim {
class Optimizer;
}

namespace weft {

class TorchOptimizer {
 public:
  // Throws UsageError for options that validate() refuses.
  TorchOptimizer(const OptimizerOptions& options, const std::vector<Parameter>& parameters);
  ~TorchOptimizer();
  TorchOptimizer(const TorchOptimizer&) = delete;
  TorchOptimizer& operator=(const TorchOptimizer&) = delete;

  void set_lr(double lr);  // Throws UsageError if negative or not finite.
  // One step of one parameter with the gradient that it has.
  void update(int parameter);

  OptimizerSnapshot save() const;
  // As Optimizer::load().
  void load(const OptimizerSnapshot& snapshot);

 private:
  struct Slot {
    OptimizerParameter info;
    torch::Tensor tensor;
    std::int64_t step = 0;
    std::unique_ptr<torch::optim::Optimizer> optimizer;
  };
  std::vector<OptimizerSnapshot::Vector> vectors_of(const Slot& slot) const;
  void put(Slot& slot, const OptimizerSnapshot::Parameter& from);

  OptimizerOptions options_;  // with the lr that holds now
  std::vector<Slot> slots_;
};

}  // namespace weft
