#include "weft_torch/models/weight_queue.h"

#include <torch/torch.h>

#include <optional>

namespace weft {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

class LinearInHalves final : public torch::autograd::Function<LinearInHalves> {
 public:
  static torch::Tensor forward(AutogradContext* context, const torch::Tensor& x, const torch::Tensor& weight,
                               const std::optional<torch::Tensor>& bias, std::int64_t queue) {
    context->save_for_backward({x, weight, bias.value_or(torch::Tensor())});
    context->saved_data["queue"] = queue;
    return torch::linear(x, weight, bias.value_or(torch::Tensor()));
  }
  static tensor_list backward(AutogradContext* context, const tensor_list& gradients) {
    const tensor_list saved = context->get_saved_variables();
    auto* const queue = reinterpret_cast<WeightQueue*>(context->saved_data["queue"].toInt());
    queue->keep(saved[1], saved[2], saved[0], gradients[0]);
    return {gradients[0].matmul(saved[1]), {}, {}, {}};
  }
};

torch::Tensor rows_of(const torch::Tensor& t) { return t.reshape({-1, t.size(-1)}); }

}  // namespace

torch::Tensor linear(const torch::Tensor& x, const torch::Tensor& weight, const torch::Tensor& bias,
                     WeightQueue* queue) {
  if (queue == nullptr) return torch::linear(x, weight, bias);
  const std::optional<torch::Tensor> there = bias.defined() ? std::optional(bias) : std::nullopt;
  return LinearInHalves::apply(x, weight, there, reinterpret_cast<std::int64_t>(queue));
}

void WeightQueue::run(const Piece& piece, const std::function<void(const torch::Tensor& parameter)>& added) {
  const torch::NoGradGuard no_grad;
  const auto found = kept_.find(key_of(piece));
  if (found == kept_.end()) return;
  const auto add = [&](const torch::Tensor& parameter, const torch::Tensor& more) {
    torch::Tensor& gradient = parameter.mutable_grad();
    if (gradient.defined())
      gradient.add_(more);
    else
      gradient = more;
    added(parameter);
  };
  for (const Product& product : found->second) {
    const torch::Tensor rows = rows_of(product.gradient), input = rows_of(product.input);
    if (product.weight.grad().defined()) {
      product.weight.mutable_grad().addmm_(rows.t(), input);
      added(product.weight);
    } else {
      add(product.weight, rows.t().mm(input));
    }
    if (product.bias.defined()) add(product.bias, rows.sum(0));
  }
  kept_.erase(found);
}

}  // namespace weft
