// The Transformer in blocks: encoder.embedding | encoder 0 .. n-1 | decoder.embedding | decoder 0 .. n-1 |
// projection.
//   embeddings   x = sqrt(width) rows + sinusoids of the positions, dropout; one table for the source's tokens
//                and one for the target's
//   encoder i    two parts: attention over the whole source, mlp; the last has a norm behind them
//   decoder i    three parts: attention over what came before, attention over what the encoder gave, mlp
//   projection   logits = norm(x) W^T + b; the sum of the cross entropy
// bert2gpt2-moe has experts in place of the mlp in every so many layers of encoder and decoder (gate, perhaps
// experts that all tokens share, a part for each slice, merge), x = rows + positions that are learned, as BERT
// and GPT-2 have them, and the encoder's norm in a block of its own.
// Vaswani et al., NIPS 2017, with the norms before the layers and not behind them, and nothing tied. Weights:
// as gpt's, but tables normal 1 / sqrt(width).
#include "weft_torch/models/transformer.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "weft_torch/models/experts.h"
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
  Transformer(std::string_view name, const ModelOptions& o)
      : LayeredModel(model_shape(name, o), o, batch_kind_of(name)), learned_(has_experts(name)) {
    const double of_table = learned_ ? kDeviation : 1 / std::sqrt(static_cast<double>(o.width));
    add_normal(kSource, {o.vocabulary, o.width}, of_table);
    if (learned_) source_positions_ = add_normal(kSourcePositions, {o.context, o.width}, kDeviation);
    for (int i = 0; i < o.layers; ++i) {
      const double residual = kDeviation / std::sqrt(2.0 * o.layers);
      const std::string at = "encoder." + std::to_string(i);
      Encoder layer;
      layer.attention = add_attention(at + ".attention", residual);
      layer.last = add_last(at, i + 1, residual);
      encoder_.push_back(std::move(layer));
    }
    encoder_norm_ = add_norm("encoder.norm");
    add_normal(kTarget, {o.vocabulary, o.width}, of_table);
    if (learned_) target_positions_ = add_normal(kTargetPositions, {o.context, o.width}, kDeviation);
    for (int i = 0; i < o.layers; ++i) {
      const double residual = kDeviation / std::sqrt(3.0 * o.layers);
      const std::string at = "decoder." + std::to_string(i);
      Decoder layer;
      layer.attention = add_attention(at + ".attention", residual);
      layer.cross = add_cross_attention(at + ".cross", residual);
      layer.last = add_last(at, decoder_block(i), residual);
      decoder_.push_back(std::move(layer));
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
    const auto place = [&](std::size_t site) { return Place{site, batch, context}; };
    if (block == 0) return {embed(source_at_, source_positions_, batch.source, place(0))};
    if (block <= options().layers) {
      const auto layer = static_cast<std::size_t>(block - 1);
      return encode(encoder_[layer], part, taken, place(2 * layer + 1));
    }
    if (block < decoder_block(-1)) return {encoder_norm_.norm(taken.front())};
    if (block == decoder_block(-1))
      return {embed(target_at_, target_positions_, batch.tokens, place(2 * n + 1))};
    if (block < decoder_block(options().layers)) {
      const auto layer = static_cast<std::size_t>(block - decoder_block(0));
      return decode(decoder_[layer], part, taken, place(2 * n + 2 + 3 * layer));
    }
    const torch::Tensor logits = projection_(projection_norm_.norm(taken.front()).flatten(0, 1));
    return {cross_entropy_sum(logits, batch.targets.flatten())};
  }

 private:
  static constexpr const char* kSource = "encoder.embedding.weight";
  static constexpr const char* kTarget = "decoder.embedding.weight";
  static constexpr const char* kSourcePositions = "encoder.embedding.position.weight";
  static constexpr const char* kTargetPositions = "decoder.embedding.position.weight";

  struct Last {  // of a layer: an mlp, or
    Mlp mlp;
    std::optional<ExpertLayer> experts;
  };
  struct Encoder {
    Attention attention;
    Last last;
  };
  struct Decoder {
    Attention attention;
    CrossAttention cross;
    Last last;
  };

  // Of a layer; before the first one stands the embedding.
  int decoder_block(int layer) const { return options().layers + (learned_ ? 3 : 2) + layer; }

  Last add_last(const std::string& name, int block, double residual) {
    const ExpertShape* const experts = experts_of(block);
    if (experts != nullptr) return {.mlp = {}, .experts = add_experts(*experts, residual)};
    return {.mlp = add_mlp(name + ".mlp", residual), .experts = {}};
  }

  torch::Tensor embed(int table, const torch::Tensor& positions, const torch::Tensor& ids,
                      const Place& place) const {
    const torch::Tensor rows = look_up(table, ids, place.context);
    if (positions.defined()) return dropped(rows + positions.slice(0, 0, ids.size(1)), place);
    const torch::Tensor fixed = sinusoids(ids.size(1), options().width).to(rows.options());
    return dropped(rows * std::sqrt(static_cast<double>(options().width)) + fixed, place);
  }

  // `first`: the place of a layer's first part; its others follow.
  std::vector<torch::Tensor> encode(const Encoder& layer, int part, std::span<const torch::Tensor> taken,
                                    const Place& first) const {
    if (part == 0) return {attend(layer.attention, PartRole::whole, taken, /*causal=*/false, first)};
    const Place place{first.site + 1, first.batch, first.context};
    if (layer.last.experts) return pass(*layer.last.experts, part, taken, place);
    if (part == 1) return {feed_forward(layer.last.mlp, PartRole::whole, taken, place)};
    return {encoder_norm_.norm(taken.front())};
  }
  std::vector<torch::Tensor> decode(const Decoder& layer, int part, std::span<const torch::Tensor> taken,
                                    const Place& first) const {
    const Place place{first.site + static_cast<std::size_t>(std::min(part, 2)), first.batch, first.context};
    const torch::Tensor& x = taken.front();
    if (part == 0) return {attend(layer.attention, PartRole::whole, taken, /*causal=*/true, place)};
    if (part == 1) return {attend(layer.cross, x, taken.back(), place)};
    if (layer.last.experts) return pass(*layer.last.experts, part, taken, place);
    return {feed_forward(layer.last.mlp, PartRole::whole, taken, place)};
  }

  const bool learned_;  // positions
  torch::Tensor source_positions_, target_positions_;
  int source_at_ = 0, target_at_ = 0;
  std::vector<Encoder> encoder_;
  std::vector<Decoder> decoder_;
  Affine encoder_norm_, projection_norm_, projection_;
};

}  // namespace

std::unique_ptr<Model> make_transformer(std::string_view name, const ModelOptions& options) {
  return std::make_unique<Transformer>(name, options);
}

}  // namespace weft
