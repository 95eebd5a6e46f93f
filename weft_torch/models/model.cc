#include "weft_torch/models/model.h"

#include <torch/torch.h>

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

std::int64_t sequences(const Batch& batch) { return batch.tokens.size(0); }

Model::Model(std::string name, const ModelOptions& options) : name_(std::move(name)), options_(options) {}

std::vector<Parameter> Model::parameters() const {
  std::vector<Parameter> all;
  for (const Block& block : blocks_) all.insert(all.end(), block.parameters.begin(), block.parameters.end());
  return all;
}

std::int64_t Model::num_elements() const {
  std::int64_t sum = 0;
  for (const Parameter& p : parameters()) sum += p.tensor.numel();
  return sum;
}

double Model::flops_per_token() const {
  double sum = 0;
  for (const Block& block : blocks_) sum += block.flops_per_token;
  return sum;
}

torch::Tensor Model::loss(const Batch& batch, const StepContext& context,
                          const BeforeBlock& before_block) const {
  check(batch);
  const bool empty = sequences(batch) == 0;
  torch::Tensor x;
  for (int b = 0; b < static_cast<int>(blocks_.size()); ++b) {
    if (before_block) before_block(b);
    if (!empty) x = forward(b, x, batch, context);
  }
  if (!empty) return x;
  // Depends on every parameter, and on none of their elements.
  x = torch::zeros({}, blocks_.front().parameters.front().tensor.options().requires_grad(false));
  for (const Parameter& p : parameters()) x = x + p.tensor.slice(0, 0, 0).sum();
  return x;
}

void Model::to(torch::ScalarType type) {
  if (type != torch::kFloat32 && type != torch::kFloat64) {
    throw UsageError("a model computes in float32 or float64, not in " + std::string(c10::toString(type)));
  }
  const torch::NoGradGuard guard;
  for (const Block& block : blocks_) {
    for (const Parameter& p : block.parameters) torch::Tensor(p.tensor).set_data(p.tensor.to(type));
  }
}

torch::Tensor Model::add(Parameter parameter) {
  blocks_.back().parameters.push_back(std::move(parameter));
  return blocks_.back().parameters.back().tensor;
}

void Model::begin_block(std::string block_name, double flops_per_token) {
  blocks_.push_back({.name = std::move(block_name), .flops_per_token = flops_per_token});
}

void Model::check(const Batch& batch) const {
  const auto refuse = [&](const std::string& why) { throw UsageError("model " + name_ + ": " + why); };
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
