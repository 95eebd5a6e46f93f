#include "weft_torch/models/ops.h"

#include <torch/torch.h>

#include <utility>

#include "weft_torch/models/dropout_mask.h"
#include "weft_torch/models/weights.h"

namespace weft {

namespace {

std::span<float> values_of(const torch::Tensor& t) {
  return {t.data_ptr<float>(), static_cast<std::size_t>(t.numel())};
}

}  // namespace

Parameter normal_parameter(std::uint64_t seed, std::string name, torch::IntArrayRef shape, double deviation) {
  torch::Tensor t = torch::empty(shape, torch::kFloat32);
  fill_normal(seed, name, static_cast<float>(deviation), values_of(t));
  return {.name = std::move(name), .tensor = t.set_requires_grad(true)};
}

Parameter uniform_parameter(std::uint64_t seed, std::string name, torch::IntArrayRef shape, double bound) {
  torch::Tensor t = torch::empty(shape, torch::kFloat32);
  fill_uniform(seed, name, static_cast<float>(bound), values_of(t));
  return {.name = std::move(name), .tensor = t.set_requires_grad(true)};
}

Parameter constant_parameter(std::string name, torch::IntArrayRef shape, double value) {
  return {.name = std::move(name),
          .tensor = torch::full(shape, value, torch::kFloat32).set_requires_grad(true)};
}

torch::Tensor keyed_dropout(const torch::Tensor& x, const DropoutSite& where, const StepContext& context) {
  if (!context.training || where.probability <= 0) return x;
  const std::int64_t length = x.size(1);
  const DropoutKey key{.seed = context.seed, .step = context.step, .site = where.site};
  torch::Tensor mask = torch::empty(x.sizes(), torch::kFloat32);
  write_dropout_mask(key, where.probability,
                     {.first_token = where.first_sequence * length, .features = x.size(2)}, values_of(mask));
  return x * mask.to(x.options());
}

torch::Tensor cross_entropy_sum(const torch::Tensor& logits, const torch::Tensor& targets) {
  return at::cross_entropy_loss(logits, targets, {}, at::Reduction::Sum, kNotCounted);
}

}  // namespace weft
