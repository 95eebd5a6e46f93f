// The Transformer in blocks: encoder.embedding | encoder 0 .. n-1 | decoder.embedding | decoder 0 .. n-1 |
// projection.
//   embeddings   x = sqrt(width) rows + sinusoids of the positions, dropout; one table for the source's tokens
//                and one for the target's
//   encoder i    two parts: attention over the whole source, mlp; the last has a norm behind them
//   decoder i    three parts: attention over what came before, attention over what the encoder gave, mlp
//   projection   logits = norm(x) W^T + b; the sum of the cross entropy
// Vaswani et al., NIPS 2017, with the norms before the layers and not behind them, and nothing tied. Weights:
// as gpt's, but tables normal 1 / sqrt(width).
#include "weft_torch/models/transformer.h"

#include <torch/torch.h>

#include <cmath>

#include "weft_torch/models/layers.h"
#include "weft_torch/models/ops.h"
#include "workload/model_shapes.h"

namespace weft {

namespace {

// [length, width]: sines in the even columns, cosines of the same angles beside them.
torch::Tensor sinusoids(std::int64_t length, std::int64_t width) {
  const torch::Tensor positions = torch::arange(length, torch::kFloat64).unsqueeze(1);
  const torch::Tensor even = torch::arange(0, width, 2, torch::kFloat64);
  const torch::Tensor angles = positions * (even * (-std::log(1e4) / static_cast<double>(width))).exp();
  return torch::stack({angles.sin(), angles.cos()}, 2).flatten(1).slice(1, 0, width);
}

class Transformer final : public LayeredModel {
 public:
  explicit Transformer(const ModelOptions& o)
      : LayeredModel(model_shape("transformer", o), o, batch_kind_of("transformer")) {
    const double of_table = 1 / std::sqrt(static_cast<double>(o.width));
    add_normal(kSource, {o.vocabulary, o.width}, of_table);
    for (int i = 0; i < o.layers; ++i) {
      const double residual = kDeviation / std::sqrt(2.0 * o.layers);
      const std::string name = "encoder." + std::to_string(i);
      Encoder layer;
      layer.attention = add_attention(name + ".attention", residual);
      layer.mlp = add_mlp(name + ".mlp", residual);
      encoder_.push_back(layer);
    }
    encoder_norm_ = add_norm("encoder.norm");
    add_normal(kTarget, {o.vocabulary, o.width}, of_table);
    for (int i = 0; i < o.layers; ++i) {
      const double residual = kDeviation / std::sqrt(3.0 * o.layers);
      const std::string name = "decoder." + std::to_string(i);
      Decoder layer;
      layer.attention = add_attention(name + ".attention", residual);
      layer.cross = add_cross_attention(name + ".cross", residual);
      layer.mlp = add_mlp(name + ".mlp", residual);
      decoder_.push_back(layer);
    }
    projection_norm_ = add_norm("projection.norm");
    projection_ = add_linear("projection", o.width, o.vocabulary, kDeviation);
    source_at_ = place_of(kSource);
    target_at_ = place_of(kTarget);
  }

  std::vector<TableIds> lookups(const Batch& batch, const StepContext&) const override {
    return {{source_at_, batch.source.flatten()}, {target_at_, batch.tokens.flatten()}};
  }

  std::vector<torch::Tensor> forward(int block, int part, std::span<const torch::Tensor> taken,
                                     const Batch& batch, const StepContext& context) const override {
    const std::size_t n = encoder_.size();
    const auto at = static_cast<std::size_t>(block);
    const auto place = [&](std::size_t site) { return Place{site, batch, context}; };
    if (at == 0) return {embed(source_at_, batch.source, place(0))};
    if (at <= n) return {encode(at - 1, part, taken.front(), place(2 * at - 1))};
    if (at == n + 1) return {embed(target_at_, batch.tokens, place(2 * n + 1))};
    if (at <= 2 * n + 1) return {decode(at - n - 2, part, taken, place(2 * n + 2 + 3 * (at - n - 2)))};
    const torch::Tensor logits = projection_(projection_norm_.norm(taken.front()).flatten(0, 1));
    return {cross_entropy_sum(logits, batch.targets.flatten())};
  }

 private:
  static constexpr const char* kSource = "encoder.embedding.weight";
  static constexpr const char* kTarget = "decoder.embedding.weight";

  struct Encoder {
    Attention attention;
    Mlp mlp;
  };
  struct Decoder {
    Attention attention;
    CrossAttention cross;
    Mlp mlp;
  };

  torch::Tensor embed(int table, const torch::Tensor& ids, const Place& place) const {
    const torch::Tensor rows = look_up(table, ids, place.context);
    const torch::Tensor positions = sinusoids(ids.size(1), options().width).to(rows.options());
    return dropped(rows * std::sqrt(static_cast<double>(options().width)) + positions, place);
  }

  // `first`: the place of a layer's first part; its others follow.
  torch::Tensor encode(std::size_t layer, int part, const torch::Tensor& x, const Place& first) const {
    if (part == 0) return attend(encoder_[layer].attention, x, /*causal=*/false, first);
    if (part == 1) return feed_forward(encoder_[layer].mlp, x, {first.site + 1, first.batch, first.context});
    return encoder_norm_.norm(x);
  }
  torch::Tensor decode(std::size_t layer, int part, std::span<const torch::Tensor> taken,
                       const Place& first) const {
    const Place place{first.site + static_cast<std::size_t>(part), first.batch, first.context};
    const torch::Tensor& x = taken.front();
    if (part == 0) return attend(decoder_[layer].attention, x, /*causal=*/true, place);
    if (part == 1) return attend(decoder_[layer].cross, x, taken.back(), place);
    return feed_forward(decoder_[layer].mlp, x, place);
  }

  int source_at_ = 0, target_at_ = 0;
  std::vector<Encoder> encoder_;
  std::vector<Decoder> decoder_;
  Affine encoder_norm_, projection_norm_, projection_;
};

}  // namespace

std::unique_ptr<Model> make_transformer(const ModelOptions& options) {
  return std::make_unique<Transformer>(options);
}

}  // namespace weft
