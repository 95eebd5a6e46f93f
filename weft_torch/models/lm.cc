// A recurrent language model in blocks: embedding | lstm 0 .. n-1 | softmax.
//   embedding   tokens' rows, dropout
//   lstm i      one layer from a zero state, dropout
//   softmax     logits = h W^T + b; the sum of the cross entropy
// With samples > 0 training estimates the softmax's sum by importance sampling (Bengio and Senecal, AISTATS
// 2003): the target exactly, all other words by S draws from the log-uniform distribution (words are numbered
// from the most frequent), each divided by how often its word is expected among them; draws that hit the
// target do not count. So the sum is right in expectation. The draws are a function of (seed, step): the same
// for all tokens and ranks. Without training the softmax is full. Weights: uniform within 1 / sqrt(width), as
// torch's LSTM; embedding normal 0.02.
#include "weft_torch/models/lm.h"

#include <torch/torch.h>

#include <cmath>
#include <limits>

#include "weft_torch/models/ops.h"
#include "weft_torch/models/weights.h"
#include "workload/model_shapes.h"

namespace weft {

namespace {

constexpr double kDeviation = 0.02;

class Lm final : public Model {
 public:
  explicit Lm(const ModelOptions& o) : Model(model_shape("lm", o), o) {
    const std::int64_t d = o.width;
    const double bound = 1 / std::sqrt(static_cast<double>(d));
    const auto uniform = [&](const std::string& name, torch::IntArrayRef shape) {
      return add(uniform_parameter(o.seed, name, shape, bound));
    };
    embedding_ = add(normal_parameter(o.seed, "embedding.weight", {o.vocabulary, d}, kDeviation));
    for (int i = 0; i < o.layers; ++i) {
      const std::string name = "lstm." + std::to_string(i);
      std::vector<torch::Tensor> layer;
      layer.push_back(uniform(name + ".input.weight", {4 * d, d}));
      layer.push_back(uniform(name + ".state.weight", {4 * d, d}));
      layer.push_back(uniform(name + ".input.bias", {4 * d}));
      layer.push_back(uniform(name + ".state.bias", {4 * d}));
      layers_.push_back(std::move(layer));
    }
    weight_ = uniform("softmax.weight", {o.vocabulary, d});
    bias_ = add(constant_parameter("softmax.bias", {o.vocabulary, 1}, 0));
  }

  std::vector<torch::Tensor> forward(int block, int /*part*/, std::span<const torch::Tensor> taken,
                                     const Batch& batch, const StepContext& context) const override {
    const DropoutSite where{.probability = options().dropout,
                            .site = static_cast<std::uint32_t>(block),
                            .first_sequence = batch.first_sequence};
    if (block == 0) return {keyed_dropout(rows(embedding_, batch.tokens), where, context)};
    const torch::Tensor& input = taken.front();
    const auto layer = static_cast<std::size_t>(block - 1);
    if (layer < layers_.size()) {
      const torch::Tensor zero = torch::zeros({1, input.size(0), input.size(2)}, input.options());
      const auto [out, h, c] = torch::lstm(input, {zero, zero}, layers_[layer], /*has_biases=*/true,
                                           /*num_layers=*/1, /*dropout=*/0.0, context.training,
                                           /*bidirectional=*/false, /*batch_first=*/true);
      return {keyed_dropout(out, where, context)};
    }
    const torch::Tensor hidden = input.flatten(0, 1), targets = batch.targets.flatten();
    if (options().samples > 0 && context.training) return {sampled(hidden, targets, context)};
    return {cross_entropy_sum(torch::linear(hidden, weight_, bias_.squeeze(1)), targets)};
  }

 private:
  torch::Tensor rows(const torch::Tensor& table, const torch::Tensor& ids) const {
    return torch::embedding(table, ids, /*padding_idx=*/-1, /*scale_grad_by_freq=*/false,
                            options().sparse_gradients);
  }

  // ln of how often a word is expected among the samples: S ln((w + 2) / (w + 1)) / ln(V + 1).
  torch::Tensor log_expected(const torch::Tensor& words, const torch::Tensor& like) const {
    const torch::Tensor w = words.to(torch::kFloat64);
    const double scale =
        static_cast<double>(options().samples) / std::log(static_cast<double>(options().vocabulary) + 1);
    return (((w + 2) / (w + 1)).log() * scale).log().to(like.options());
  }

  torch::Tensor sampled(const torch::Tensor& hidden, const torch::Tensor& targets,
                        const StepContext& context) const {
    const torch::Tensor counts = targets.ne(kNotCounted);
    const torch::Tensor wanted = targets.clamp_min(0);
    torch::Tensor others = torch::empty({options().samples}, torch::kInt64);
    draw_words(context.seed, context.step, options().vocabulary,
               {others.data_ptr<std::int64_t>(), static_cast<std::size_t>(others.numel())});

    const torch::Tensor at_target = (hidden * rows(weight_, wanted)).sum(1) + rows(bias_, wanted).squeeze(1);
    const torch::Tensor at_others = torch::linear(hidden, rows(weight_, others)) +
                                    (rows(bias_, others).squeeze(1) - log_expected(others, hidden));
    const torch::Tensor hits = wanted.unsqueeze(1).eq(others.unsqueeze(0));
    const torch::Tensor logits = torch::cat(
        {at_target.unsqueeze(1), at_others.masked_fill(hits, -std::numeric_limits<float>::infinity())}, 1);
    const torch::Tensor entropy = torch::logsumexp(logits, 1) - at_target;
    return (entropy * counts.to(entropy.options())).sum();
  }

  torch::Tensor embedding_, weight_, bias_;
  std::vector<std::vector<torch::Tensor>> layers_;
};

}  // namespace

std::unique_ptr<Model> make_lm(const ModelOptions& options) { return std::make_unique<Lm>(options); }

}  // namespace weft
