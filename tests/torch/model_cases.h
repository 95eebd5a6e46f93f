// What tests of models have in common: small ones, batches for them, and what they compute.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "data/batches.h"
#include "weft/random.h"
#include "weft_torch/models/model.h"
#include "workload/model_shapes.h"

namespace weft {

struct Case {
  const char* model;
  std::int64_t samples = 0;
  bool sparse = false;
  bool untied = false;
};

inline BatchKind kind_of(const Case& c) { return batch_kind_of(c.model); }

inline ModelOptions tiny(const Case& c) {
  ModelOptions o = model_options(c.model, "tiny");
  o.samples = c.samples;
  o.sparse_gradients = c.sparse;
  o.untied = c.untied;
  o.dropout = 0.2;
  return o;
}

inline std::unique_ptr<Model> tiny_model(const Case& c, torch::ScalarType type = torch::kFloat64) {
  std::unique_ptr<Model> model = make_model(c.model, tiny(c));
  model->to(type);
  return model;
}

// Every fifth target or so is not counted. Of pairs, the source is three tokens longer than the target, so
// that nobody can take one for the other.
inline Batch random_batch(const ModelOptions& o, std::int64_t sequences, std::int64_t length,
                          BatchKind kind = BatchKind::tokens) {
  Random random(7);
  const auto ids = [&](std::int64_t columns, std::int64_t bound) {
    torch::Tensor out = torch::empty({sequences, columns}, torch::kInt64);
    for (std::int64_t i = 0; i < out.numel(); ++i)
      out.data_ptr<std::int64_t>()[i] = random.below(static_cast<std::uint32_t>(bound));
    return out;
  };
  const bool spans = kind == BatchKind::spans;
  Batch batch{.tokens = ids(length, o.vocabulary),
              .targets = ids(spans ? 2 : length, spans ? length : o.vocabulary)};
  for (std::int64_t i = 3; i < batch.targets.numel(); i += 5)
    batch.targets.data_ptr<std::int64_t>()[i] = kNotCounted;
  if (kind == BatchKind::pairs) batch.source = ids(std::min(length + 3, o.context), o.vocabulary);
  return batch;
}

struct Computed {
  double loss = 0;
  std::vector<torch::Tensor> gradients;
};

inline void add_to(Computed& sum, const Model& model, const Batch& batch, const StepContext& context) {
  const std::vector<Parameter> parameters = model.parameters();
  for (const Parameter& p : parameters) torch::Tensor(p.tensor).mutable_grad() = torch::Tensor();
  const torch::Tensor loss = model.loss(batch, context);
  loss.backward();
  sum.loss += loss.item<double>();
  sum.gradients.resize(parameters.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    torch::Tensor g = parameters[i].tensor.grad();
    ASSERT_TRUE(g.defined()) << parameters[i].name;
    g = g.to_dense().clone();
    sum.gradients[i] = sum.gradients[i].defined() ? sum.gradients[i] + g : g;
  }
}

// Largest difference of the loss or any gradient, relative to the largest of its elements; to a thousandth of
// the largest of all where that is more (a bias in front of a softmax over places, as of bert's last norm,
// changes nothing: its gradient is rounding).
inline double distance(const Computed& a, const Computed& b) {
  double worst = std::abs(a.loss - b.loss) / std::abs(a.loss), largest = 0;
  const auto size_of = [](const torch::Tensor& t) { return t.abs().max().item<double>(); };
  for (const torch::Tensor& gradient : a.gradients) largest = std::max(largest, size_of(gradient));
  for (std::size_t i = 0; i < a.gradients.size(); ++i) {
    const double scale = std::max(size_of(a.gradients[i]), 1e-3 * largest);
    worst = std::max(worst, size_of(a.gradients[i] - b.gradients[i]) / (scale + 1e-300));
  }
  return worst;
}

}  // namespace weft
