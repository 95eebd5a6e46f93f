// What one process with torch alone is made of: the reference of the tests of replicas.
#pragma once

#include <torch/torch.h>

#include <memory>
#include <vector>

#include "state/optimizer.h"
#include "weft_torch/models/model.h"

namespace weft::torch_test {

inline std::unique_ptr<torch::optim::Optimizer> torchs(const OptimizerOptions& o, const Model& model) {
  std::vector<torch::Tensor> tensors;
  for (const Parameter& p : model.parameters()) tensors.push_back(p.tensor);
  if (o.name == "sgd") {
    return std::make_unique<torch::optim::SGD>(tensors, torch::optim::SGDOptions(o.lr)
                                                            .momentum(o.momentum)
                                                            .weight_decay(o.weight_decay)
                                                            .nesterov(o.nesterov));
  }
  if (o.name == "adamw") {
    return std::make_unique<torch::optim::AdamW>(
        tensors, torch::optim::AdamWOptions(o.lr).weight_decay(o.weight_decay));
  }
  if (o.name == "adam") {
    return std::make_unique<torch::optim::Adam>(tensors,
                                                torch::optim::AdamOptions(o.lr).weight_decay(o.weight_decay));
  }
  return std::make_unique<torch::optim::Adagrad>(tensors, torch::optim::AdagradOptions(o.lr));
}

// Every gradient is off by that share of its tensor's root mean square, at random.
inline void disturb(const Model& model, double share, int step) {
  at::Generator generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(step));
  const torch::NoGradGuard no_grad;
  for (const Parameter& p : model.parameters()) {
    const torch::Tensor gradient = p.tensor.grad();
    if (!gradient.defined()) continue;
    const torch::Tensor noise = at::randn(gradient.sizes(), generator, gradient.options());
    // (What nothing was added to, such as the rows of words that are not there, does not round.)
    gradient.add_(noise * (gradient != 0) * gradient.square().mean().sqrt(), share);
  }
}

}  // namespace weft::torch_test
