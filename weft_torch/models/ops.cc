#include "weft_torch/models/ops.h"

#include <torch/torch.h>

#include <algorithm>
#include <utility>

#include "weft_torch/models/dropout_mask.h"
#include "weft_torch/models/weights.h"

namespace weft {

namespace {

std::span<float> values_of(const torch::Tensor& t) {
  return {t.data_ptr<float>(), static_cast<std::size_t>(t.numel())};
}

DropoutKey key_of(const DropoutSite& where, const StepContext& context) {
  return {.seed = context.seed, .step = context.step, .site = where.site};
}
DropoutRows rows_of(const torch::Tensor& x, const DropoutSite& where) {
  return {.first_token = where.first_sequence * x.size(1), .features = x.size(2)};
}

}  // namespace

InitialValues normal_values(std::uint64_t seed, std::string name, double deviation) {
  return [seed, name = std::move(name), deviation](std::int64_t first, std::span<float> out) {
    fill_normal(seed, name, static_cast<float>(deviation), first, out);
  };
}

InitialValues uniform_values(std::uint64_t seed, std::string name, double bound) {
  return [seed, name = std::move(name), bound](std::int64_t first, std::span<float> out) {
    fill_uniform(seed, name, static_cast<float>(bound), first, out);
  };
}

InitialValues constant_values(double value) {
  return [value](std::int64_t, std::span<float> out) { std::ranges::fill(out, static_cast<float>(value)); };
}

InitialValues with_bias_column(InitialValues weights, std::int64_t columns) {
  return [weights = std::move(weights), columns](std::int64_t first, std::span<float> out) {
    const std::int64_t width = columns - 1, end = first + static_cast<std::int64_t>(out.size());
    for (std::int64_t at = first; at < end;) {
      const std::int64_t row = at / columns, column = at % columns;
      const std::int64_t count = std::min(end - at, width - column);  // up to the bias
      std::span<float> to = out.subspan(static_cast<std::size_t>(at - first));
      if (count > 0) weights(row * width + column, to.first(static_cast<std::size_t>(count)));
      if (at + count < end) to[static_cast<std::size_t>(count)] = 0;
      at += count + 1;
    }
  };
}

torch::Tensor keyed_dropout(const torch::Tensor& x, const DropoutSite& where, const StepContext& context) {
  if (!context.training || where.probability <= 0) return x;
  torch::Tensor mask = torch::empty(x.sizes(), torch::kFloat32);
  write_dropout_mask(key_of(where, context), where.probability, rows_of(x, where), values_of(mask));
  return x * mask.to(x.options());
}

torch::Tensor keyed_jitter(const torch::Tensor& x, double amount, const DropoutSite& where,
                           const StepContext& context) {
  if (!context.training || amount <= 0) return x;
  torch::Tensor factors = torch::empty(x.sizes(), torch::kFloat32);
  write_jitter(key_of(where, context), amount, rows_of(x, where), values_of(factors));
  return x * factors.to(x.options());
}

torch::Tensor lstm_layer(const torch::Tensor& x, const std::vector<torch::Tensor>& weights,
                         const LstmSizes& sizes, const StepContext& context) {
  const auto zeros = [&](std::int64_t columns) {
    return torch::zeros({sizes.both_directions ? 2 : 1, x.size(0), columns}, x.options());
  };
  const torch::Tensor output = zeros(sizes.outputs), cells = zeros(sizes.cells);
  const auto [out, h, c] = torch::lstm(x, {output, cells}, weights, /*has_biases=*/true,
                                       /*num_layers=*/1, /*dropout=*/0.0, context.training,
                                       sizes.both_directions, /*batch_first=*/true);
  return out;
}

torch::Tensor cross_entropy_sum(const torch::Tensor& logits, const torch::Tensor& targets) {
  return at::cross_entropy_loss(logits, targets, {}, at::Reduction::Sum, kNotCounted);
}

torch::Tensor class_scores(const torch::Tensor& logits, const torch::Tensor& targets, int ranks, int rank) {
  const std::int64_t classes = logits.size(1);
  const torch::Tensor is_mine = targets.ge(0).logical_and(targets.lt(classes));
  const torch::Tensor picked = logits.gather(1, targets.clamp(0, classes - 1).unsqueeze(1)).squeeze(1);
  const torch::Tensor mine = torch::stack({torch::logsumexp(logits, 1), picked * is_mine});
  return torch::constant_pad_nd(mine.unsqueeze(0), {0, 0, 0, 0, rank, ranks - 1 - rank});
}

torch::Tensor scores_loss(const torch::Tensor& scores, const torch::Tensor& targets) {
  const torch::Tensor losses = torch::logsumexp(scores.select(1, 0), 0) - scores.select(1, 1).sum(0);
  return (losses * targets.ne(kNotCounted)).sum();
}

}  // namespace weft
