// GNMT in blocks: encoder.embedding | encoder.lstm 0 .. n-1 | decoder.embedding | decoder.lstm 0 .. n-1 |
// projection.
//   embeddings       rows, dropout; one table for the source's tokens and one for the target's
//   encoder.lstm i   the first in both directions, side by side; dropout
//   decoder.lstm i   those behind the first take the context beside their input; dropout. The first has a
//                    second part, the context: attention of its output over what the encoder gave
//   projection       logits = h W^T + b; the sum of the cross entropy
// From the third layer on a residual is added, on either side. Wu et al., 2016, in the form in which the first
// decoder layer does not see the context, so that a layer computes all tokens at once; the attention is a
// scaled product of query and key, each projected. Weights: uniform within 1 / sqrt(width), tables normal 0.02.
#include "weft_torch/models/gnmt.h"

#include <torch/torch.h>

#include <cmath>

#include "weft_torch/models/ops.h"
#include "workload/model_shapes.h"

namespace weft {

namespace {

constexpr double kDeviation = 0.02;
constexpr std::size_t kFirstResidual = 2;  // layer

class Gnmt final : public Model {
 public:
  explicit Gnmt(const ModelOptions& o) : Model(model_shape("gnmt", o), o, batch_kind_of("gnmt")) {
    const std::int64_t d = o.width;
    add(kSource, {o.vocabulary, d}, normal_values(o.seed, kSource, kDeviation));
    for (int i = 0; i < o.layers; ++i) {
      const std::string name = "encoder.lstm." + std::to_string(i);
      std::vector<torch::Tensor>& layer = encoder_.emplace_back();
      add_lstm(layer, name, i == 1 ? 2 * d : d);
      if (i == 0) add_lstm(layer, name + ".reverse", d);
    }
    add(kTarget, {o.vocabulary, d}, normal_values(o.seed, kTarget, kDeviation));
    for (int i = 0; i < o.layers; ++i) {
      add_lstm(decoder_.emplace_back(), "decoder.lstm." + std::to_string(i), i == 0 ? d : 2 * d);
      if (i > 0) continue;
      query_ = add_uniform("decoder.attention.query.weight", {d, d});
      key_ = add_uniform("decoder.attention.key.weight", {d, d});
    }
    projection_ = add_uniform("projection.weight", {o.vocabulary, d});
    bias_ = add("projection.bias", {o.vocabulary}, constant_values(0));
    source_at_ = place_of(kSource);
    target_at_ = place_of(kTarget);
  }

  std::vector<TableIds> lookups(const Batch& batch, const StepContext&) const override {
    return {{source_at_, batch.source.flatten()}, {target_at_, batch.tokens.flatten()}};
  }

  std::vector<torch::Tensor> forward(int block, int part, std::span<const torch::Tensor> taken,
                                     const Batch& batch, const StepContext& context) const override {
    const DropoutSite where{.probability = options().dropout,
                            .site = static_cast<std::uint32_t>(block),
                            .first_sequence = batch.first_sequence};
    const auto dropped = [&](const torch::Tensor& x) { return keyed_dropout(x, where, context); };
    const std::size_t n = encoder_.size();
    const auto at = static_cast<std::size_t>(block);
    if (at == 0) return {dropped(look_up(source_at_, batch.source, context))};
    if (at == n + 1) return {dropped(look_up(target_at_, batch.tokens, context))};
    if (at == 2 * n + 2) {
      const torch::Tensor logits = torch::linear(taken.front().flatten(0, 1), projection_, bias_);
      return {cross_entropy_sum(logits, batch.targets.flatten())};
    }
    if (part == 1) return {attention(taken[0], taken[1])};
    const bool encodes = at <= n;
    const std::size_t layer = encodes ? at - 1 : at - n - 2;
    const torch::Tensor x = taken.size() == 1 ? taken.front() : torch::cat({taken[0], taken[1]}, 2);
    const LstmSizes sizes{
        .cells = options().width, .outputs = options().width, .both_directions = encodes && layer == 0};
    const torch::Tensor out =
        dropped(lstm_layer(x, encodes ? encoder_[layer] : decoder_[layer], sizes, context));
    return {layer < kFirstResidual ? out : taken.front() + out};
  }

 private:
  static constexpr const char* kSource = "encoder.embedding.weight";
  static constexpr const char* kTarget = "decoder.embedding.weight";

  torch::Tensor add_uniform(const std::string& name, torch::IntArrayRef sizes) {
    const double bound = 1 / std::sqrt(static_cast<double>(options().width));
    return add(name, sizes, uniform_values(options().seed, name, bound));
  }
  void add_lstm(std::vector<torch::Tensor>& layer, const std::string& name, std::int64_t in) {
    const std::int64_t d = options().width;
    layer.push_back(add_uniform(name + ".input.weight", {4 * d, in}));
    layer.push_back(add_uniform(name + ".state.weight", {4 * d, d}));
    layer.push_back(add_uniform(name + ".input.bias", {4 * d}));
    layer.push_back(add_uniform(name + ".state.bias", {4 * d}));
  }

  // What the encoder gave, [sequences, length, width], weighted for every token of the decoder.
  torch::Tensor attention(const torch::Tensor& x, const torch::Tensor& encoded) const {
    const torch::Tensor query = torch::linear(x, query_).unsqueeze(1);
    const torch::Tensor key = torch::linear(encoded, key_).unsqueeze(1);
    return at::scaled_dot_product_attention(query, key, encoded.unsqueeze(1)).squeeze(1);
  }

  int source_at_ = 0, target_at_ = 0;
  std::vector<std::vector<torch::Tensor>> encoder_, decoder_;
  torch::Tensor query_, key_, projection_, bias_;
};

}  // namespace

std::unique_ptr<Model> make_gnmt(const ModelOptions& options) { return std::make_unique<Gnmt>(options); }

}  // namespace weft
