// torch's own optimizers in the place of weft's (state/optimizer.h): one for each parameter, so that
// a block is updated as soon as its gradients are there, and a parameter without a gradient not at all.
//
// Their state is the same rows as weft's: a checkpoint of either is read by the other.
//
// Thread: one at a time.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "state/optimizer.h"
#include "weft_torch/models/model.h"

namespace torch::optim {
class Optimizer;
}

namespace weft {

class TorchOptimizer {
 public:
  // Throws UsageError for options that validate() refuses.
  // `infos`: of each parameter, in the same order.
  TorchOptimizer(const OptimizerOptions& options, const std::vector<Parameter>& parameters,
                 const std::vector<OptimizerParameter>& infos);
  ~TorchOptimizer();
  TorchOptimizer(const TorchOptimizer&) = delete;
  TorchOptimizer& operator=(const TorchOptimizer&) = delete;

  void set_lr(double lr);  // Throws UsageError if negative or not finite.
  // One step of one parameter with the gradient that it has.
  void update(int parameter);

  // The parameter, whose tensor has changed, is another part from now on; its steps stay. Rows of its
  // moments are loaded next, then parts_loaded().
  void set_part(int parameter, const OptimizerParameter& part) {
    slots_[static_cast<std::size_t>(parameter)].info = part;
  }
  void parts_loaded();

  // As Optimizer::rows().
  std::vector<LiveRow> rows(const Peers& peers = {});

 private:
  struct Slot {
    OptimizerParameter info;
    torch::Tensor tensor;
    std::int64_t step = 0;
    std::unique_ptr<torch::optim::Optimizer> optimizer;
  };
  torch::Tensor moment(const Slot& slot, std::size_t i) const;
  void set_moment(Slot& slot, std::size_t i, const torch::Tensor& values);
  void set_step(Slot& slot);
  template <class State>
  State& state_of(Slot& slot);

  OptimizerOptions options_;  // with the lr that holds now
  std::vector<Slot> slots_;
};

}  // namespace weft
