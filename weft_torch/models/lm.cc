// A recurrent language model in blocks: embedding | lstm 0 .. n-1 | softmax.
//   embedding   tokens' rows, dropout
//   lstm i      one layer from a zero state, perhaps with a projection (Sak et al., 2014), dropout
//   softmax     logits = h W^T + b; the sum of the cross entropy. b is the last column of W's table
// With samples > 0 training estimates the softmax's sum by importance sampling (Bengio and Senecal, AISTATS
// 2003): the target exactly, all other words by S draws from the log-uniform distribution (words are numbered
// from the most frequent), each divided by how often its word is expected among them; draws that hit the
// target do not count. So the sum is right in expectation. The draws are a function of (seed, step): the same
// for all tokens and ranks. Without training the softmax is full. Weights: uniform within 1 / sqrt(LSTM's width), as
// torch's LSTM; embedding normal 0.02.
#include "weft_torch/models/lm.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "weft/error.h"
#include "weft_torch/models/ops.h"
#include "weft_torch/models/weights.h"
#include "workload/model_shapes.h"

namespace weft {

namespace {

constexpr double kDeviation = 0.02;

class Lm final : public Model {
 public:
  explicit Lm(const ModelOptions& o) : Model(model_shape("lm", o), o) {
    const std::int64_t h = lstm_width(o), out = lstm_output(o);
    const double bound = 1 / std::sqrt(static_cast<double>(h));
    const auto uniform = [&](const std::string& name, torch::IntArrayRef sizes) {
      return add(name, sizes, uniform_values(o.seed, name, bound));
    };
    add(kEmbedding, {o.vocabulary, o.width}, normal_values(o.seed, kEmbedding, kDeviation));
    std::int64_t in = o.width;
    for (int i = 0; i < o.layers; ++i) {
      const std::string name = "lstm." + std::to_string(i);
      std::vector<torch::Tensor> layer;
      layer.push_back(uniform(name + ".input.weight", {4 * h, in}));
      layer.push_back(uniform(name + ".state.weight", {4 * h, out}));
      layer.push_back(uniform(name + ".input.bias", {4 * h}));
      layer.push_back(uniform(name + ".state.bias", {4 * h}));
      if (o.projection > 0) layer.push_back(uniform(name + ".projection.weight", {o.projection, h}));
      layers_.push_back(std::move(layer));
      in = out;
    }
    softmax_ = add(kSoftmax, {o.vocabulary, out + 1},
                   with_bias_column(uniform_values(o.seed, kSoftmax, bound), out + 1));
    embedding_at_ = place_of(kEmbedding);
    softmax_at_ = place_of(kSoftmax);
  }

  std::vector<torch::Tensor> forward(int block, int /*part*/, std::span<const torch::Tensor> taken,
                                     const Batch& batch, const StepContext& context) const override {
    const DropoutSite where{.probability = options().dropout,
                            .site = static_cast<std::uint32_t>(block),
                            .first_sequence = batch.first_sequence};
    if (block == 0) return {keyed_dropout(look_up(embedding_at_, batch.tokens, context), where, context)};
    const torch::Tensor& input = taken.front();
    const auto layer = static_cast<std::size_t>(block - 1);
    if (layer < layers_.size()) {
      const LstmSizes sizes{.cells = lstm_width(options()), .outputs = lstm_output(options())};
      return {keyed_dropout(lstm_layer(input, layers_[layer], sizes, context), where, context)};
    }
    const torch::Tensor hidden = input.flatten(0, 1), targets = batch.targets.flatten();
    if (samples(context)) return {sampled(hidden, targets, context)};
    if (options().samples > 0) return {full(hidden, targets, context)};
    const Rows all = rows(softmax_);
    return {cross_entropy_sum(torch::linear(hidden, all.weight, all.bias), targets)};
  }

  std::vector<TableIds> lookups(const Batch& batch, const StepContext& context) const override {
    std::vector<TableIds> out{{.parameter = embedding_at_, .ids = batch.tokens.flatten()}};
    if (options().samples == 0) return out;
    if (!context.training) throw UsageError("model lm: without training its softmax is of all words");
    const torch::Tensor targets = batch.targets.flatten();
    out.push_back({.parameter = softmax_at_,
                   .ids = torch::cat({targets.masked_select(targets.ne(kNotCounted)), words(context)}),
                   .shared = options().samples});
    return out;
  }

 private:
  static constexpr const char* kEmbedding = "embedding.weight";
  static constexpr const char* kSoftmax = "softmax.weight";
  static constexpr std::int64_t kBlock = 1 << 13;  // words of the full softmax at a time

  struct Rows {
    torch::Tensor weight, bias;
  };
  static Rows rows(const torch::Tensor& table) {
    const std::int64_t width = table.size(1) - 1;
    return {table.slice(1, 0, width), table.select(1, width)};
  }
  bool samples(const StepContext& context) const { return options().samples > 0 && context.training; }

  torch::Tensor words(const StepContext& context) const {
    torch::Tensor out = torch::empty({options().samples}, torch::kInt64);
    draw_words(context.seed, context.step, options().vocabulary,
               {out.data_ptr<std::int64_t>(), static_cast<std::size_t>(out.numel())});
    return out;
  }

  // ln of how often a word is expected among the samples: S ln((w + 2) / (w + 1)) / ln(V + 1).
  torch::Tensor log_expected(const torch::Tensor& words, const torch::Tensor& like) const {
    const torch::Tensor w = words.to(torch::kFloat64);
    const double scale =
        static_cast<double>(options().samples) / std::log(static_cast<double>(options().vocabulary) + 1);
    return (((w + 2) / (w + 1)).log() * scale).log().to(like.options());
  }

  // Of the tokens that count: rows that nothing is predicted with are not looked up.
  torch::Tensor sampled(const torch::Tensor& all_hidden, const torch::Tensor& all_targets,
                        const StepContext& context) const {
    const torch::Tensor counts = all_targets.ne(kNotCounted).nonzero().squeeze(1);
    const torch::Tensor hidden = all_hidden.index_select(0, counts);
    const torch::Tensor wanted = all_targets.index_select(0, counts);
    const torch::Tensor others = words(context);
    const Rows target = rows(look_up(softmax_at_, wanted, context));
    const Rows other = rows(look_up(softmax_at_, others, context));

    const torch::Tensor at_target = (hidden * target.weight).sum(1) + target.bias;
    const torch::Tensor at_others =
        torch::linear(hidden, other.weight) + (other.bias - log_expected(others, hidden));
    const torch::Tensor hits = wanted.unsqueeze(1).eq(others.unsqueeze(0));
    const torch::Tensor logits = torch::cat(
        {at_target.unsqueeze(1), at_others.masked_fill(hits, -std::numeric_limits<float>::infinity())}, 1);
    return (torch::logsumexp(logits, 1) - at_target).sum();
  }

  // The softmax over all words, whose table may be elsewhere and large: one block of words after the other.
  torch::Tensor full(const torch::Tensor& hidden, const torch::Tensor& targets,
                     const StepContext& context) const {
    const std::int64_t tokens = hidden.size(0), all = options().vocabulary;
    if (all <= kBlock) {
      const Rows words = rows(block(softmax_at_, 0, all, context));
      return cross_entropy_sum(torch::linear(hidden, words.weight, words.bias), targets);
    }
    torch::Tensor total = torch::full({tokens}, -std::numeric_limits<double>::infinity(), hidden.options());
    torch::Tensor at_target = torch::zeros({tokens}, hidden.options());
    for (std::int64_t first = 0; first < all; first += kBlock) {
      const std::int64_t count = std::min(kBlock, all - first);
      const Rows words = rows(block(softmax_at_, first, count, context));
      const torch::Tensor logits = torch::linear(hidden, words.weight, words.bias);
      total = torch::logaddexp(total, torch::logsumexp(logits, 1));
      const torch::Tensor here = targets.ge(first).logical_and(targets.lt(first + count));
      const torch::Tensor places = (targets - first).clamp(0, count - 1).unsqueeze(1);
      at_target = torch::where(here, logits.gather(1, places).squeeze(1), at_target);
    }
    return (total - at_target).masked_select(targets.ne(kNotCounted)).sum();
  }

  torch::Tensor softmax_;
  int embedding_at_ = 0, softmax_at_ = 0;
  std::vector<std::vector<torch::Tensor>> layers_;
};

}  // namespace

std::unique_ptr<Model> make_lm(const ModelOptions& options) { return std::make_unique<Lm>(options); }

}  // namespace weft
