#include "weft_torch/train/torch_optimizer.h"

#include <torch/torch.h>

#include <cstring>
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

torch::Tensor tensor_of(std::span<const std::byte> values, const torch::Tensor& like) {
  torch::Tensor host = torch::empty(like.sizes(), like.options().device(torch::kCPU).requires_grad(false));
  if (!values.empty()) std::memcpy(host.data_ptr(), values.data(), values.size());
  return host.to(like.device());
}

}  // namespace

TorchOptimizer::TorchOptimizer(const OptimizerOptions& options, const std::vector<Parameter>& parameters,
                               const std::vector<OptimizerParameter>& infos)
    : options_(options) {
  validate(options_);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    slots_.push_back({.info = infos[i],
                      .tensor = parameters[i].tensor,
                      .step = 0,
                      .optimizer = make(options_, parameters[i].tensor)});
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

// What torch keeps for the i-th of moments_of(); undefined before the first step.
torch::Tensor TorchOptimizer::moment(const Slot& slot, std::size_t i) const {
  if (options_.name == "sgd") {
    const auto* const state = find<optim::SGDParamState>(*slot.optimizer, slot.tensor);
    return state ? state->momentum_buffer() : torch::Tensor();
  }
  if (options_.name == "adagrad") {
    const auto* const state = find<optim::AdagradParamState>(*slot.optimizer, slot.tensor);
    return state ? state->sum() : torch::Tensor();
  }
  const auto of = [i](const auto* state) {
    if (state == nullptr) return torch::Tensor();
    return i == 0 ? state->exp_avg() : state->exp_avg_sq();
  };
  if (options_.name == "adam") return of(find<optim::AdamParamState>(*slot.optimizer, slot.tensor));
  return of(find<optim::AdamWParamState>(*slot.optimizer, slot.tensor));
}

// Made, if torch has none yet.
template <class State>
State& TorchOptimizer::state_of(Slot& slot) {
  if (State* const known = find<State>(*slot.optimizer, slot.tensor)) return *known;
  auto made = std::make_unique<State>();
  State& out = *made;
  slot.optimizer->state()[slot.tensor.unsafeGetTensorImpl()] = std::move(made);
  return out;
}

void TorchOptimizer::set_moment(Slot& slot, std::size_t i, const torch::Tensor& values) {
  const auto set = [&](auto& state) { i == 0 ? state.exp_avg(values) : state.exp_avg_sq(values); };
  if (options_.name == "sgd")
    state_of<optim::SGDParamState>(slot).momentum_buffer(values);
  else if (options_.name == "adagrad")
    state_of<optim::AdagradParamState>(slot).sum(values);
  else if (options_.name == "adam")
    set(state_of<optim::AdamParamState>(slot));
  else
    set(state_of<optim::AdamWParamState>(slot));
}

// Comes behind the moments: without a step torch has none, but for adagrad's sums.
void TorchOptimizer::set_step(Slot& slot) {
  if (options_.name == "adagrad") {
    state_of<optim::AdagradParamState>(slot).step(slot.step);
  } else if (slot.step == 0) {
    slot.optimizer->state().erase(slot.tensor.unsafeGetTensorImpl());
  } else if (options_.name == "adam") {
    state_of<optim::AdamParamState>(slot).step(slot.step);
  } else if (options_.name == "adamw") {
    state_of<optim::AdamWParamState>(slot).step(slot.step);
  }
}

void TorchOptimizer::parts_loaded() {
  for (Slot& slot : slots_) set_step(slot);
}

std::vector<LiveRow> TorchOptimizer::rows(const Peers& peers) {
  const std::vector<Moment> moments = moments_of(options_);
  std::vector<LiveRow> out{lr_row(options_, [this](double lr) { set_lr(lr); }, peers)};
  for (Slot& slot : slots_) {
    for (std::size_t i = 0; i < moments.size(); ++i) {
      LiveRow row = moment_row(slot.info, moments[i], peers);
      const double initial = moments[i].initial;
      row.read = [this, &slot, i, initial](std::vector<std::byte>& scratch) -> std::span<const std::byte> {
        torch::Tensor values = moment(slot, i);
        if (!values.defined()) values = torch::full_like(slot.tensor, initial);
        values = values.detach().cpu().contiguous();
        scratch.resize(values.nbytes());
        if (!scratch.empty()) std::memcpy(scratch.data(), values.data_ptr(), scratch.size());
        return scratch;
      };
      row.write = [this, &slot, i, initial](std::span<const std::byte> values) {
        set_moment(slot, i,
                   values.empty() ? torch::full_like(slot.tensor.detach(), initial)
                                  : tensor_of(values, slot.tensor));
      };
      out.push_back(std::move(row));
    }
    LiveRow row = step_row(slot.info, slot.step, peers);
    row.write = [this, &slot, write = row.write](std::span<const std::byte> values) {
      write(values);
      set_step(slot);
    };
    out.push_back(std::move(row));
  }
  return out;
}

}  // namespace weft
