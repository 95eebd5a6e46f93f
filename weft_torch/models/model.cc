#include "weft_torch/models/model.h"

#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <utility>

#include "data/batches.h"
#include "weft/error.h"
#include "weft_torch/models/gpt.h"
#include "weft_torch/models/lm.h"

namespace weft {

Batch to_batch(const TokenBatch& batch) {
  const auto tensor = [&](const std::vector<std::int64_t>& ids) {
    torch::Tensor t = torch::empty({batch.sequences, batch.length}, torch::kInt64);
    std::copy(ids.begin(), ids.end(), t.data_ptr<std::int64_t>());
    return t;
  };
  return {.tokens = tensor(batch.tokens),
          .targets = tensor(batch.targets),
          .first_sequence = batch.first_sequence};
}

std::int64_t counted(const Batch& batch) { return batch.targets.ne(kNotCounted).sum().item<std::int64_t>(); }

std::int64_t counted(const TokenBatch& batch) {
  return std::count_if(batch.targets.begin(), batch.targets.end(),
                       [](std::int64_t target) { return target != kNotCounted; });
}

std::int64_t sequences(const Batch& batch) { return batch.tokens.size(0); }

Model::Model(ModelShape shape, const ModelOptions& options) : shape_(std::move(shape)), options_(options) {
  shape_.check();
}

torch::Tensor Model::add(Parameter parameter) {
  const std::size_t place = parameters_.size();
  if (place >= shape_.parameters.size() || shape_.parameters[place].name != parameter.name ||
      shape_.parameters[place].dims != parameter.tensor.sizes().vec()) {
    throw UsageError("model " + name() + ": '" + parameter.name + "' is not what its shape has next");
  }
  parameters_.push_back(std::move(parameter));
  return parameters_.back().tensor;
}

torch::Tensor Model::loss(const Batch& batch, const StepContext& context) const {
  check(batch);
  if (sequences(batch) == 0) {
    // Depends on every parameter, and on none of their elements.
    torch::Tensor zero = torch::zeros({}, parameters_.front().tensor.options().requires_grad(false));
    for (const Parameter& p : parameters_) zero = zero + p.tensor.slice(0, 0, 0).sum();
    return zero;
  }
  std::map<std::string, torch::Tensor> given;
  for (std::size_t b = 0; b < shape_.blocks.size(); ++b) {
    for (std::size_t p = 0; p < shape_.blocks[b].parts.size(); ++p) {
      const PartShape& part = shape_.blocks[b].parts[p];
      std::vector<torch::Tensor> taken;
      for (const std::string& activation : part.takes) taken.push_back(given.at(activation));
      const std::vector<torch::Tensor> out =
          forward(static_cast<int>(b), static_cast<int>(p), taken, batch, context);
      for (std::size_t i = 0; i < part.gives.size(); ++i) given[part.gives[i]] = out[i];
    }
  }
  return given.at(kLoss);
}

void Model::to(torch::ScalarType type) {
  if (type != torch::kFloat32 && type != torch::kFloat64) {
    throw UsageError("a model computes in float32 or float64, not in " + std::string(c10::toString(type)));
  }
  const torch::NoGradGuard guard;
  for (const Parameter& p : parameters_) torch::Tensor(p.tensor).set_data(p.tensor.to(type));
}

void Model::check(const Batch& batch) const {
  const auto refuse = [&](const std::string& why) { throw UsageError("model " + name() + ": " + why); };
  if (!batch.tokens.defined() || !batch.targets.defined() || batch.tokens.dim() != 2 ||
      batch.tokens.sizes() != batch.targets.sizes()) {
    refuse("a batch has tokens and targets of one shape [sequences, length]");
  }
  if (batch.tokens.scalar_type() != torch::kInt64 || batch.targets.scalar_type() != torch::kInt64) {
    refuse("tokens and targets are int64");
  }
  if (batch.tokens.size(1) > options_.context) {
    refuse("sequences of " + std::to_string(batch.tokens.size(1)) +
           " tokens are longer than the context of " + std::to_string(options_.context));
  }
  if (batch.first_sequence < 0) refuse("first_sequence is negative");
}

std::unique_ptr<Model> make_model(std::string_view name, const ModelOptions& options) {
  check_model(name, options);
  return name == "gpt" ? make_gpt(options) : make_lm(options);
}

}  // namespace weft
