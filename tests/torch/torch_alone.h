// What one process with torch alone is made of: the reference of the tests of replicas.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
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
        tensors, torch::optim::AdamWOptions(o.lr).weight_decay(o.weight_decay).eps(o.eps));
  }
  if (o.name == "adam") {
    return std::make_unique<torch::optim::Adam>(
        tensors, torch::optim::AdamOptions(o.lr).weight_decay(o.weight_decay).eps(o.eps));
  }
  return std::make_unique<torch::optim::Adagrad>(tensors, torch::optim::AdagradOptions(o.lr).eps(o.eps));
}

struct Trained {
  std::vector<torch::Tensor> parameters;
  std::vector<double> losses;
};

// The largest distance of a parameter tensor from the other one, relative to the other one's norm.
inline double distance(const Trained& a, const Trained& b) {
  EXPECT_EQ(a.parameters.size(), b.parameters.size());
  double largest = 0;
  for (std::size_t i = 0; i < a.parameters.size(); ++i) {
    EXPECT_EQ(a.parameters[i].sizes(), b.parameters[i].sizes());
    const torch::Tensor x = a.parameters[i].to(torch::kFloat64);
    const torch::Tensor y = b.parameters[i].to(torch::kFloat64);
    largest = std::max(largest, (x - y).norm().item<double>() / (y.norm().item<double>() + 1e-30));
  }
  return largest;
}

inline double loss_distance(const Trained& a, const Trained& b) {
  EXPECT_EQ(a.losses.size(), b.losses.size());
  double largest = 0;
  for (std::size_t i = 0; i < std::min(a.losses.size(), b.losses.size()); ++i)
    largest = std::max(largest, std::abs(a.losses[i] - b.losses[i]) / std::abs(b.losses[i]));
  return largest;
}

inline void expect_same_bits(const Trained& a, const Trained& b, const std::string& what = "") {
  EXPECT_EQ(a.losses, b.losses) << what;
  ASSERT_EQ(a.parameters.size(), b.parameters.size());
  for (std::size_t i = 0; i < a.parameters.size(); ++i)
    EXPECT_TRUE(torch::equal(a.parameters[i], b.parameters[i])) << what << ", parameter " << i;
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
