#include "weft_torch/models/weight_queue.h"

#include <torch/torch.h>

#include <algorithm>
#include <optional>

namespace weft {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

torch::Tensor row_of(const torch::Tensor& all, std::int64_t expert) {
  return expert < 0 || !all.defined() ? all : all.select(0, expert);
}

class LinearInHalves final : public torch::autograd::Function<LinearInHalves> {
 public:
  static torch::Tensor forward(AutogradContext* context, const torch::Tensor& x, const torch::Tensor& weight,
                               const std::optional<torch::Tensor>& bias, std::int64_t queue,
                               std::int64_t expert) {
    context->save_for_backward({x, weight, bias.value_or(torch::Tensor())});
    context->saved_data["queue"] = queue;
    context->saved_data["expert"] = expert;
    return torch::linear(x, row_of(weight, expert), row_of(bias.value_or(torch::Tensor()), expert));
  }
  static tensor_list backward(AutogradContext* context, const tensor_list& gradients) {
    const tensor_list saved = context->get_saved_variables();
    const std::int64_t expert = context->saved_data["expert"].toInt();
    auto* const queue = reinterpret_cast<WeightQueue*>(context->saved_data["queue"].toInt());
    const auto trained = [](const torch::Tensor& parameter) {
      return parameter.defined() && parameter.requires_grad() ? parameter : torch::Tensor();
    };
    const torch::Tensor weight = trained(saved[1]), bias = trained(saved[2]);
    if (weight.defined() || bias.defined()) queue->keep({weight, bias, saved[0], gradients[0], expert});
    return {gradients[0].matmul(row_of(saved[1], expert)), {}, {}, {}, {}};
  }
};

torch::Tensor rows_of(const torch::Tensor& t) { return t.reshape({-1, t.size(-1)}); }

}  // namespace

torch::Tensor linear(const torch::Tensor& x, const torch::Tensor& weight, const torch::Tensor& bias,
                     WeightQueue* queue, std::int64_t expert) {
  if (queue == nullptr) return torch::linear(x, row_of(weight, expert), row_of(bias, expert));
  const std::optional<torch::Tensor> there = bias.defined() ? std::optional(bias) : std::nullopt;
  return LinearInHalves::apply(x, weight, there, reinterpret_cast<std::int64_t>(queue), expert);
}

void WeightQueue::run(const Piece& piece, const std::function<void(const torch::Tensor& parameter)>& added) {
  const torch::NoGradGuard no_grad;
  const auto found = kept_.find(key_of(piece));
  if (found == kept_.end()) return;
  const std::vector<Product> products = std::move(found->second);
  kept_.erase(found);
  for (std::size_t i = 0; i < products.size(); ++i) {
    const Product& product = products[i];
    const torch::Tensor rows = rows_of(product.gradient), input = rows_of(product.input);
    // Of several experts each adds to its row of what starts as zeros.
    const auto add = [&](const torch::Tensor& parameter, const auto& make, const auto& grow) {
      if (!parameter.defined()) return;
      torch::Tensor& gradient = parameter.mutable_grad();
      if (!gradient.defined() && product.expert >= 0) gradient = torch::zeros_like(parameter);
      if (gradient.defined())
        grow(row_of(gradient, product.expert));
      else
        gradient = make();
      const bool comes_again = std::any_of(
          products.begin() + static_cast<std::ptrdiff_t>(i) + 1, products.end(), [&](const Product& later) {
            return later.weight.is_same(parameter) || later.bias.is_same(parameter);
          });
      if (!comes_again) added(parameter);
    };
    add(
        product.weight, [&] { return rows.t().mm(input); },
        [&](torch::Tensor gradient) { gradient.addmm_(rows.t(), input); });
    add(
        product.bias, [&] { return rows.sum(0); },
        [&](torch::Tensor gradient) { gradient.add_(rows.sum(0)); });
  }
}

}  // namespace weft
