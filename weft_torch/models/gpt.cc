// GPT-2 in blocks: embedding | layer 0 .. n-1 | head.
//   embedding   x = tokens' rows + positions' rows, dropout
//   layer i     two parts: x += dropout(projection(attention(norm(x)))), x +=
//   dropout(down(gelu(up(norm(x))))) head        logits = norm(x) E^T, E being the embedding's weight; the
//   sum of the cross entropy
// Weights: normal 0.02, residual projections 0.02 / sqrt(2 layers), biases 0, as Radford et al. 2019 and its
// code. The attention's probabilities have no dropout: torch's would draw from the process's generator.
#include "weft_torch/models/gpt.h"

#include <torch/torch.h>

#include <cmath>

#include "weft_torch/models/ops.h"
#include "workload/model_shapes.h"

namespace weft {

namespace {

constexpr double kDeviation = 0.02;
constexpr double kNormEpsilon = 1e-5;

struct Affine {
  torch::Tensor weight, bias;
  torch::Tensor operator()(const torch::Tensor& x) const { return torch::linear(x, weight, bias); }
  torch::Tensor norm(const torch::Tensor& x) const {
    return torch::layer_norm(x, {x.size(-1)}, weight, bias, kNormEpsilon);
  }
};

struct Layer {
  Affine attention_norm, qkv, projection, mlp_norm, up, down;
};

class Gpt final : public Model {
 public:
  explicit Gpt(const ModelOptions& o) : Model(model_shape("gpt", o), o) {
    const std::int64_t d = o.width;
    const double residual = kDeviation / std::sqrt(2.0 * o.layers);
    tokens_ = add(normal_parameter(o.seed, "embedding.token.weight", {o.vocabulary, d}, kDeviation));
    positions_ = add(normal_parameter(o.seed, "embedding.position.weight", {o.context, d}, kDeviation));
    for (int i = 0; i < o.layers; ++i) {
      const std::string name = "layer." + std::to_string(i);
      Layer layer;
      layer.attention_norm = add_norm(name + ".attention.norm");
      layer.qkv = add_linear(name + ".attention.qkv", d, 3 * d, kDeviation);
      layer.projection = add_linear(name + ".attention.projection", d, d, residual);
      layer.mlp_norm = add_norm(name + ".mlp.norm");
      layer.up = add_linear(name + ".mlp.up", d, 4 * d, kDeviation);
      layer.down = add_linear(name + ".mlp.down", 4 * d, d, residual);
      layers_.push_back(layer);
    }
    head_norm_ = add_norm("head.norm");
  }

  std::vector<torch::Tensor> forward(int block, int part, std::span<const torch::Tensor> taken,
                                     const Batch& batch, const StepContext& context) const override {
    const Call call{batch, context};
    if (block == 0) return {embed(call)};
    const torch::Tensor& x = taken.front();
    const auto layer = static_cast<std::size_t>(block - 1);
    if (layer < layers_.size())
      return {part == 0 ? attend(layers_[layer], 2 * layer + 1, x, call)
                        : feed_forward(layers_[layer], 2 * layer + 2, x, call)};
    const torch::Tensor logits = torch::linear(head_norm_.norm(x).flatten(0, 1), tokens_);
    return {cross_entropy_sum(logits, batch.targets.flatten())};
  }

 private:
  struct Call {
    const Batch& batch;
    const StepContext& context;
  };

  Affine add_norm(const std::string& name) {
    const torch::Tensor weight = add(constant_parameter(name + ".weight", {options().width}, 1));
    return {weight, add(constant_parameter(name + ".bias", {options().width}, 0))};
  }
  Affine add_linear(const std::string& name, std::int64_t in, std::int64_t out, double deviation) {
    const torch::Tensor weight =
        add(normal_parameter(options().seed, name + ".weight", {out, in}, deviation));
    return {weight, add(constant_parameter(name + ".bias", {out}, 0))};
  }

  torch::Tensor dropped(const torch::Tensor& x, std::size_t site, const Call& call) const {
    const DropoutSite where{.probability = options().dropout,
                            .site = static_cast<std::uint32_t>(site),
                            .first_sequence = call.batch.first_sequence};
    return keyed_dropout(x, where, call.context);
  }

  torch::Tensor embed(const Call& call) const {
    const std::int64_t length = call.batch.tokens.size(1);
    const torch::Tensor x = torch::embedding(tokens_, call.batch.tokens) + positions_.slice(0, 0, length);
    return dropped(x, 0, call);
  }

  torch::Tensor attention(const Layer& layer, const torch::Tensor& x) const {
    const std::int64_t sequences = x.size(0), length = x.size(1), heads = options().heads;
    const torch::Tensor qkv = layer.qkv(x).view({sequences, length, 3, heads, x.size(2) / heads});
    const auto part = [&](int i) { return qkv.select(2, i).transpose(1, 2); };
    const torch::Tensor out = at::scaled_dot_product_attention(part(0), part(1), part(2), {}, /*dropout_p=*/0,
                                                               /*is_causal=*/true);
    return layer.projection(out.transpose(1, 2).reshape(x.sizes()));
  }

  torch::Tensor attend(const Layer& layer, std::size_t site, const torch::Tensor& x, const Call& call) const {
    return x + dropped(attention(layer, layer.attention_norm.norm(x)), site, call);
  }
  torch::Tensor feed_forward(const Layer& layer, std::size_t site, const torch::Tensor& x,
                             const Call& call) const {
    const torch::Tensor inner = torch::gelu(layer.up(layer.mlp_norm.norm(x)), "tanh");
    return x + dropped(layer.down(inner), site, call);
  }

  torch::Tensor tokens_, positions_;
  std::vector<Layer> layers_;
  Affine head_norm_;
};

}  // namespace

std::unique_ptr<Model> make_gpt(const ModelOptions& options) { return std::make_unique<Gpt>(options); }

}  // namespace weft
