#include "weft_torch/train/cut_model.h"

#include <torch/torch.h>

#include <map>

namespace weft {

CutModel::CutModel(const Model& model) : model_(model) {
  std::map<std::string, std::size_t> places;
  for (const BlockShape& block : model.shape().blocks) {
    std::vector<Ports>& of_block = ports_.emplace_back();
    for (const PartShape& part : block.parts) {
      Ports& mine = of_block.emplace_back();
      for (const std::string& name : part.takes) mine.takes.push_back(places.at(name));
      for (const std::string& name : part.gives)
        mine.gives.push_back(places.emplace(name, places.size()).first->second);
    }
  }
  num_activations_ = places.size();
  loss_ = places.at(kLoss);
}

void CutModel::begin(std::span<const Batch> micro_batches, const StepContext& context) {
  for (const Batch& batch : micro_batches) model_.check(batch);
  batches_ = micro_batches;
  context_ = context;
  activations_.assign(micro_batches.size(), std::vector<Activation>(num_activations_));
  loss_sum_ = 0;
}

void CutModel::forward(const Piece& piece) {
  const auto m = static_cast<std::size_t>(piece.micro_batch);
  if (sequences(batches_[m]) == 0) return;
  std::vector<Activation>& all = activations_[m];
  std::vector<torch::Tensor> taken;
  for (const std::size_t place : ports(piece).takes) taken.push_back(all[place].leaf);
  const std::vector<torch::Tensor> given =
      model_.forward(piece.block, piece.part, taken, batches_[m], context_);
  for (std::size_t i = 0; i < given.size(); ++i) {
    const std::size_t place = ports(piece).gives[i];
    all[place].given = given[i];
    if (place == loss_) {
      loss_sum_ += given[i].item<double>();
      continue;
    }
    all[place].leaf = given[i].detach();
    if (given[i].requires_grad()) all[place].leaf.requires_grad_(true);
  }
}

void CutModel::backward(const Piece& piece, double scale) {
  const auto m = static_cast<std::size_t>(piece.micro_batch);
  if (sequences(batches_[m]) == 0) return;
  std::vector<torch::Tensor> roots, gradients;
  for (const std::size_t place : ports(piece).gives) {
    Activation activation = std::exchange(activations_[m][place], {});
    if (!activation.given.requires_grad()) continue;
    const torch::Tensor gradient =
        place == loss_ ? torch::full_like(activation.given, scale) : activation.leaf.grad();
    if (!gradient.defined()) continue;  // nobody used it
    roots.push_back(activation.given);
    gradients.push_back(gradient);
  }
  if (!roots.empty()) torch::autograd::backward(roots, gradients);
}

}  // namespace weft
