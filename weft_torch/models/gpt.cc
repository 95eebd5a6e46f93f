// GPT-2 in blocks: embedding | layer 0 .. n-1 | head.
//   embedding   x = tokens' rows + positions' rows, dropout
//   layer i     two parts: x += dropout(projection(attention(norm(x))));
//               x += dropout(down(gelu(up(norm(x)))))
//   head        logits = norm(x) E^T, E being the embedding's weight, or untied one of its own; the sum of
//               the cross entropy
// gpt-moe has experts in place of the mlp in every so many layers: attention, gate, perhaps experts that all
// tokens share, a part for each slice, merge: x += dropout(what a token's experts made of norm(x)).
// Weights: normal 0.02, residual projections 0.02 / sqrt(2 layers), biases 0, as Radford et al. 2019 and its
// code.
#include "weft_torch/models/gpt.h"

#include <torch/torch.h>

#include <cmath>

#include "weft_torch/models/experts.h"
#include "weft_torch/models/layers.h"
#include "weft_torch/models/ops.h"
#include "weft_torch/models/weight_queue.h"
#include "workload/model_shapes.h"

namespace weft {

namespace {

class Gpt final : public LayeredModel {
 public:
  Gpt(std::string_view model, const ModelOptions& o)
      : LayeredModel(rank_shape(model, o), o, batch_kind_of(model)) {
    const double residual = kDeviation / std::sqrt(2.0 * o.layers);
    head_ = add_normal(kTokens, {o.vocabulary, o.width}, kDeviation);
    tokens_at_ = place_of(kTokens);
    positions_ = add_normal("embedding.position.weight", {o.context, o.width}, kDeviation);
    for (int i = 0; i < o.layers; ++i) {
      const std::string name = "layer." + std::to_string(i);
      attention_.push_back(add_attention(name + ".attention", residual));
      const ExpertShape* const experts = experts_of(block_at(i + 1));
      mlp_.push_back(experts != nullptr ? Mlp{} : add_mlp(name + ".mlp", residual));
      experts_.push_back(experts == nullptr ? ExpertLayer{} : add_experts(*experts, residual));
    }
    head_norm_ = add_norm("head.norm");
    if (o.untied) head_ = add_normal("head.weight", {o.vocabulary, o.width}, kDeviation);
  }

  std::vector<TableIds> lookups(const Batch& batch, const StepContext&) const override {
    if (!options().untied || tokens_at_ < 0) return {};
    return {{tokens_at_, batch.tokens.flatten()}};
  }

  std::vector<torch::Tensor> forward(int block, int part, std::span<const torch::Tensor> taken,
                                     const Batch& batch, const StepContext& context) const override {
    const int origin = shape().origin_of(block);
    const PartRole role = role_of(block, part);
    if (origin == 0) return {embed(tokens_at_, positions_, role, taken, {0, batch, context})};
    const auto layer = static_cast<std::size_t>(origin - 1);
    if (layer < mlp_.size()) {
      if (origin_of_part(block, part) == 0)
        return {attend(attention_[layer], role, taken, /*causal=*/true, {2 * layer + 1, batch, context})};
      const Place place{2 * layer + 2, batch, context};
      if (experts_of(block) != nullptr) return pass(experts_[layer], part, taken, place);
      return {feed_forward(mlp_[layer], role, taken, place)};
    }
    return {head(role, taken, batch, context)};
  }

 private:
  torch::Tensor head(PartRole role, std::span<const torch::Tensor> taken, const Batch& batch,
                     const StepContext& context) const {
    const torch::Tensor targets = batch.targets.flatten();
    if (role == PartRole::behind) return scores_loss(taken[1], targets);
    const torch::Tensor h = role == PartRole::product ? taken[0] : head_norm_.norm(taken[0]);
    if (role == PartRole::before) return h;
    const torch::Tensor logits = linear(h.flatten(0, 1), head_, {}, context.weights);
    if (role == PartRole::whole) return cross_entropy_sum(logits, targets);
    const TensorOptions& tensor = options().tensor;
    const std::string name = options().untied ? "head.weight" : kTokens;
    const std::int64_t first = shape().parameters[static_cast<std::size_t>(place_of(name))].cut_first;
    return class_scores(logits, targets - first, tensor.ranks, tensor.rank);
  }

  static constexpr const char* kTokens = "embedding.token.weight";

  torch::Tensor head_, positions_;  // head_: the table of tokens, where it is tied
  int tokens_at_ = 0;
  std::vector<Attention> attention_;
  std::vector<Mlp> mlp_;              // of each layer, or
  std::vector<ExpertLayer> experts_;  // its experts
  Affine head_norm_;
};

}  // namespace

std::unique_ptr<Model> make_gpt(std::string_view name, const ModelOptions& options) {
  return std::make_unique<Gpt>(name, options);
}

}  // namespace weft
