#include "weft_torch/train/cut_model.h"

#include <torch/torch.h>

namespace weft {

CutModel::CutModel(const Model& model, bool recompute) : model_(model), recompute_(recompute) {
  for (const ChunkShape& chunk : model.shape().chunks) {
    if (!chunk.arrives.empty()) places_.emplace(chunk.arrives, places_.size());
  }
  for (const BlockShape& block : model.shape().blocks) {
    std::vector<Ports>& of_block = ports_.emplace_back();
    for (const PartShape& part : block.parts) {
      Ports& mine = of_block.emplace_back();
      for (const std::string& name : part.takes) mine.takes.push_back(places_.at(name));
      for (const std::string& name : part.gives)
        mine.gives.push_back(places_.emplace(name, places_.size()).first->second);
    }
  }
  if (const auto loss = places_.find(kLoss); loss != places_.end()) loss_ = loss->second;
}

void CutModel::begin(std::span<const Batch> micro_batches, const StepContext& context) {
  for (const Batch& batch : micro_batches) model_.check(batch);
  batches_ = micro_batches;
  context_ = context;
  activations_.assign(micro_batches.size(), std::vector<Activation>(places_.size()));
  loss_sum_ = 0;
}

const PartShape& CutModel::part(const Piece& piece) const {
  return model_.shape()
      .blocks[static_cast<std::size_t>(piece.block)]
      .parts[static_cast<std::size_t>(piece.part)];
}

// Empty: nothing came to compute on.
std::vector<torch::Tensor> CutModel::computed(const Piece& piece) const {
  const auto m = static_cast<std::size_t>(piece.micro_batch);
  const bool empty = sequences(batches_[m]) == 0;
  if (empty && !part(piece).of_others) return {};
  std::vector<torch::Tensor> taken;
  for (const std::size_t place : ports(piece).takes) taken.push_back(activations_[m][place].leaf);
  if (empty && !taken.front().defined()) return {};  // others' rows do not come here
  return model_.forward(piece.block, piece.part, taken, batches_[m], context_);
}

void CutModel::forward(const Piece& piece) {
  std::vector<Activation>& all = activations_[static_cast<std::size_t>(piece.micro_batch)];
  const bool keeps = !recompute_ && torch::GradMode::is_enabled();
  std::vector<torch::Tensor> given;
  {
    const torch::AutoGradMode graph(keeps);
    given = computed(piece);
  }
  for (std::size_t i = 0; i < given.size(); ++i) {
    const std::size_t place = ports(piece).gives[i];
    all[place].given = given[i];
    if (place == loss_) {
      loss_sum_ += given[i].item<double>();
      continue;
    }
    all[place].leaf = given[i].detach();
    const bool learns =
        recompute_ ? torch::GradMode::is_enabled() && given[i].is_floating_point() : given[i].requires_grad();
    if (learns) all[place].leaf.requires_grad_(true);
  }
}

void CutModel::backward(const Piece& piece, double scale) {
  const auto m = static_cast<std::size_t>(piece.micro_batch);
  if (sequences(batches_[m]) == 0 && !part(piece).of_others) return;
  std::vector<torch::Tensor> again;
  if (recompute_) again = computed(piece);
  std::vector<torch::Tensor> roots, gradients;
  for (std::size_t i = 0; i < ports(piece).gives.size(); ++i) {
    const std::size_t place = ports(piece).gives[i];
    Activation activation = std::exchange(activations_[m][place], {});
    if (recompute_) activation.given = i < again.size() ? again[i] : torch::Tensor();
    if (!activation.given.defined() || !activation.given.requires_grad()) continue;
    const torch::Tensor gradient = place == loss_                  ? torch::full_like(activation.given, scale)
                                   : activation.gradient.defined() ? activation.gradient
                                                                   : activation.leaf.grad();
    if (!gradient.defined()) continue;  // nobody used it
    roots.push_back(activation.given);
    gradients.push_back(gradient);
  }
  if (!roots.empty()) torch::autograd::backward(roots, gradients);
}

torch::Tensor CutModel::to_send(const std::string& name, int micro_batch) {
  Activation& mine = activation(name, micro_batch);
  if (mine.given.defined()) mine.sent = mine.given.detach().cpu().contiguous();
  return mine.sent;
}

torch::Tensor CutModel::gradient_to_send(const std::string& name, int micro_batch) {
  Activation& mine = activation(name, micro_batch);
  if (!mine.leaf.defined()) return {};
  const torch::Tensor gradient = mine.leaf.grad();
  mine.sent_gradient = (gradient.defined() ? gradient : torch::zeros_like(mine.leaf)).cpu().contiguous();
  return mine.sent_gradient;
}

void CutModel::arrived(const std::string& name, int micro_batch, const torch::Tensor& tensor) {
  Activation& mine = activation(name, micro_batch);
  mine.leaf = tensor.detach();
  if (tensor.is_floating_point()) mine.leaf.requires_grad_(true);
}

void CutModel::take_sum(const std::string& name, int micro_batch) {
  Activation& mine = activation(name, micro_batch);
  if (!mine.sent.defined()) return;
  const bool learns = mine.leaf.requires_grad();
  mine.leaf = mine.sent.to(mine.leaf.device()).detach();
  mine.leaf.requires_grad_(learns);
}

void CutModel::take_gradient_sum(const std::string& name, int micro_batch) {
  Activation& mine = activation(name, micro_batch);
  if (mine.sent_gradient.defined()) mine.gradient = mine.sent_gradient.to(mine.leaf.device());
}

void CutModel::gradient_arrived(const std::string& name, int micro_batch, const torch::Tensor& gradient) {
  activation(name, micro_batch).gradient = gradient;
}

}  // namespace weft
