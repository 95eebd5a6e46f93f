// BERT with a span head in blocks: embedding | layer 0 .. n-1 | span.
//   embedding   x = tokens' rows + positions' rows, dropout
//   layer i     two parts, as gpt's but that every token sees the whole sequence
//   span        two logits a token of norm(x); the cross entropy of the places of the span's first and last
//               token, each over the places of the sequence
// Devlin et al., NAACL 2019, with the norms before the layers and not behind them, one kind of segment, and no
// pooled output (which the span head does not use). Weights: as gpt's.
#include "weft_torch/models/bert.h"

#include <torch/torch.h>

#include <cmath>

#include "weft_torch/models/layers.h"
#include "weft_torch/models/ops.h"
#include "weft_torch/models/weight_queue.h"
#include "workload/model_shapes.h"

namespace weft {

namespace {

class Bert final : public LayeredModel {
 public:
  explicit Bert(const ModelOptions& o) : LayeredModel(rank_shape("bert", o), o, batch_kind_of("bert")) {
    const double residual = kDeviation / std::sqrt(2.0 * o.layers);
    add_normal(kTokens, {o.vocabulary, o.width}, kDeviation);
    positions_ = add_normal("embedding.position.weight", {o.context, o.width}, kDeviation);
    for (int i = 0; i < o.layers; ++i) {
      const std::string name = "layer." + std::to_string(i);
      attention_.push_back(add_attention(name + ".attention", residual));
      mlp_.push_back(add_mlp(name + ".mlp", residual));
    }
    span_norm_ = add_norm("span.norm");
    span_ = add_normal("span.weight", {2, o.width}, kDeviation);
    tokens_at_ = place_of(kTokens);
  }

  std::vector<TableIds> lookups(const Batch& batch, const StepContext&) const override {
    if (tokens_at_ < 0) return {};
    return {{tokens_at_, batch.tokens.flatten()}};
  }

  std::vector<torch::Tensor> forward(int block, int part, std::span<const torch::Tensor> taken,
                                     const Batch& batch, const StepContext& context) const override {
    const int origin = shape().origin_of(block);
    if (origin == 0) return {embed(tokens_at_, positions_, role_of(block, part), taken, {0, batch, context})};
    const auto layer = static_cast<std::size_t>(origin - 1);
    if (layer < mlp_.size()) {
      const PartRole role = role_of(block, part);
      if (origin_of_part(block, part) == 0)
        return {attend(attention_[layer], role, taken, /*causal=*/false, {2 * layer + 1, batch, context})};
      return {feed_forward(mlp_[layer], role, taken, {2 * layer + 2, batch, context})};
    }
    const torch::Tensor& x = taken.front();
    // [sequences, places, 2]
    const torch::Tensor ends = linear(span_norm_.norm(x), span_, {}, context.weights);
    const torch::Tensor logits = ends.transpose(1, 2).flatten(0, 1);
    return {cross_entropy_sum(logits, batch.targets.flatten())};
  }

 private:
  static constexpr const char* kTokens = "embedding.token.weight";

  torch::Tensor positions_, span_;
  int tokens_at_ = 0;
  std::vector<Attention> attention_;
  std::vector<Mlp> mlp_;
  Affine span_norm_;
};

}  // namespace

std::unique_ptr<Model> make_bert(const ModelOptions& options) { return std::make_unique<Bert>(options); }

}  // namespace weft
