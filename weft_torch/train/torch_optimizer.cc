#include "weft_torch/train/torch_optimizer.h"

#include <torch/torch.h>

#include <map>
#include <span>
#include <utility>

namespace weft {

namespace {

namespace optim = torch::optim;

std::unique_ptr<optim::Optimizer> make(const OptimizerOptions& o, const torch::Tensor& tensor) {
  const std::vector<torch::Tensor> one{tensor};
  if (o.name == "sgd") {
    return std::make_unique<optim::SGD>(one, optim::SGDOptions(o.lr)
                                                 .momentum(o.momentum)
                                                 .dampening(o.dampening)
                                                 .weight_decay(o.weight_decay)
                                                 .nesterov(o.nesterov));
  }
  const std::tuple<double, double> betas(o.beta1, o.beta2);
  if (o.name == "adam") {
    return std::make_unique<optim::Adam>(
        one, optim::AdamOptions(o.lr).betas(betas).eps(o.eps).weight_decay(o.weight_decay));
  }
  if (o.name == "adamw") {
    return std::make_unique<optim::AdamW>(
        one, optim::AdamWOptions(o.lr).betas(betas).eps(o.eps).weight_decay(o.weight_decay));
  }
  return std::make_unique<optim::Adagrad>(one, optim::AdagradOptions(o.lr)
                                                   .lr_decay(o.lr_decay)
                                                   .weight_decay(o.weight_decay)
                                                   .initial_accumulator_value(o.initial_accumulator)
                                                   .eps(o.eps));
}

// What torch keeps for the parameter, or none.
template <class State>
State* find(optim::Optimizer& optimizer, const torch::Tensor& tensor) {
  const auto found = optimizer.state().find(tensor.unsafeGetTensorImpl());
  return found == optimizer.state().end() ? nullptr : static_cast<State*>(found->second.get());
}

template <class T>
std::vector<T> values_of(const torch::Tensor& tensor) {
  const torch::Tensor host = tensor.detach().cpu().contiguous();
  const T* const first = host.data_ptr<T>();
  return {first, first + host.numel()};
}

// `tensor` may be undefined: then all are `initial`.
OptimizerSnapshot::Vector vector_of(const char* name, const OptimizerParameter& info,
                                    const torch::Tensor& tensor, double initial) {
  const auto count = static_cast<std::size_t>(info.count);
  if (info.dtype == DType::float64)
    return {name, tensor.defined() ? values_of<double>(tensor) : std::vector<double>(count, initial)};
  return {name, tensor.defined() ? values_of<float>(tensor)
                                 : std::vector<float>(count, static_cast<float>(initial))};
}

torch::Tensor tensor_of(const OptimizerSnapshot::Vector& from, const torch::Tensor& like) {
  torch::Tensor host = torch::empty(like.sizes(), like.options().device(torch::kCPU).requires_grad(false));
  const auto copy = [&]<class T>(const std::vector<T>& values) {
    std::copy(values.begin(), values.end(), host.data_ptr<T>());
  };
  std::visit(copy, from.values);
  return host.to(like.device());
}

}  // namespace

TorchOptimizer::TorchOptimizer(const OptimizerOptions& options, const std::vector<Parameter>& parameters)
    : options_(options) {
  validate(options_);
  for (const Parameter& p : parameters) {
    const DType dtype = p.tensor.scalar_type() == torch::kFloat64 ? DType::float64 : DType::float32;
    slots_.push_back({.info = {.name = p.name, .count = p.tensor.numel(), .dtype = dtype},
                      .tensor = p.tensor,
                      .step = 0,
                      .optimizer = make(options_, p.tensor)});
  }
}

TorchOptimizer::~TorchOptimizer() = default;

void TorchOptimizer::set_lr(double lr) {
  OptimizerOptions next = options_;
  next.lr = lr;
  validate(next);
  options_ = next;
  for (const Slot& slot : slots_) slot.optimizer->param_groups().front().options().set_lr(lr);
}

void TorchOptimizer::update(int parameter) {
  Slot& slot = slots_[static_cast<std::size_t>(parameter)];
  slot.optimizer->step();
  ++slot.step;
}

std::vector<OptimizerSnapshot::Vector> TorchOptimizer::vectors_of(const Slot& slot) const {
  if (options_.name == "sgd") {
    if (options_.momentum == 0) return {};
    const auto* const state = find<optim::SGDParamState>(*slot.optimizer, slot.tensor);
    return {vector_of("momentum_buffer", slot.info, state ? state->momentum_buffer() : torch::Tensor(), 0)};
  }
  if (options_.name == "adagrad") {
    const auto* const state = find<optim::AdagradParamState>(*slot.optimizer, slot.tensor);
    return {
        vector_of("sum", slot.info, state ? state->sum() : torch::Tensor(), options_.initial_accumulator)};
  }
  torch::Tensor first, second;
  if (options_.name == "adam") {
    const auto* const state = find<optim::AdamParamState>(*slot.optimizer, slot.tensor);
    if (state != nullptr) std::tie(first, second) = std::tuple(state->exp_avg(), state->exp_avg_sq());
  } else {
    const auto* const state = find<optim::AdamWParamState>(*slot.optimizer, slot.tensor);
    if (state != nullptr) std::tie(first, second) = std::tuple(state->exp_avg(), state->exp_avg_sq());
  }
  return {vector_of("exp_avg", slot.info, first, 0), vector_of("exp_avg_sq", slot.info, second, 0)};
}

OptimizerSnapshot TorchOptimizer::save() const {
  OptimizerSnapshot out{.optimizer = options_.name, .lr = options_.lr, .parameters = {}};
  for (const Slot& slot : slots_)
    out.parameters.push_back({.name = slot.info.name, .step = slot.step, .vectors = vectors_of(slot)});
  return out;
}

void TorchOptimizer::put(Slot& slot, const OptimizerSnapshot::Parameter& from) {
  auto& states = slot.optimizer->state();
  void* const key = slot.tensor.unsafeGetTensorImpl();
  states.erase(key);
  slot.step = from.step;
  const auto tensor = [&](std::size_t i) { return tensor_of(from.vectors[i], slot.tensor); };
  const auto put_adam = [&](auto state) {
    state->step(from.step);
    state->exp_avg(tensor(0));
    state->exp_avg_sq(tensor(1));
    states[key] = std::move(state);
  };
  if (options_.name == "adagrad") {  // has its sum from the beginning
    auto state = std::make_unique<optim::AdagradParamState>();
    state->step(from.step);
    state->sum(tensor(0));
    states[key] = std::move(state);
  } else if (from.step == 0) {
    return;
  } else if (options_.name == "adam") {
    put_adam(std::make_unique<optim::AdamParamState>());
  } else if (options_.name == "adamw") {
    put_adam(std::make_unique<optim::AdamWParamState>());
  } else if (options_.momentum != 0) {
    auto state = std::make_unique<optim::SGDParamState>();
    state->momentum_buffer(tensor(0));
    states[key] = std::move(state);
  }
}

void TorchOptimizer::load(const OptimizerSnapshot& snapshot) {
  std::vector<OptimizerParameter> infos;
  for (const Slot& slot : slots_) infos.push_back(slot.info);
  Optimizer checked(options_, infos);  // one set of rules
  checked.load(snapshot);
  std::map<std::string, const OptimizerSnapshot::Parameter*> saved;
  for (const OptimizerSnapshot::Parameter& p : snapshot.parameters) saved[p.name] = &p;
  for (Slot& slot : slots_) put(slot, *saved.at(slot.info.name));
  set_lr(snapshot.lr);
}

}  // namespace weft
