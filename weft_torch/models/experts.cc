#include "weft_torch/models/experts.h"

#include <torch/torch.h>

#include <algorithm>
#include <numeric>

#include "weft/error.h"
#include "weft_torch/models/weight_queue.h"

namespace weft {

namespace {

constexpr double kSmall = 1e-20;  // against a division by zero

std::span<const std::int64_t> values_of(const torch::Tensor& t) {
  return {t.data_ptr<std::int64_t>(), static_cast<std::size_t>(t.numel())};
}
torch::Tensor tensor_of(std::span<const std::int64_t> values) {
  torch::Tensor out = torch::empty({static_cast<std::int64_t>(values.size())}, torch::kInt64);
  std::ranges::copy(values, out.data_ptr<std::int64_t>());
  return out;
}

// Rows [.., width] by their numbers; -1: zeros.
torch::Tensor rows_at(const torch::Tensor& rows, const torch::Tensor& numbers) {
  const torch::Tensor nothing = torch::zeros({1, rows.size(1)}, rows.options());
  const torch::Tensor places = torch::where(numbers.ge(0), numbers, rows.size(0)).to(rows.device());
  return torch::cat({rows, nothing}).index_select(0, places);
}

torch::Tensor through(const Affine& up, const Affine& down, const torch::Tensor& rows) {
  return down(torch::gelu(up(rows), "tanh"));
}

}  // namespace

RouteOptions route_options(const ExpertOptions& o) {
  return {.experts = o.count, .choices = o.choices, .capacity_factor = o.capacity_factor, .slices = o.slices};
}

Choices choose_experts(const ExpertLayer& layer, const torch::Tensor& seen) {
  Choices out;
  out.logits = torch::linear(seen, layer.gate);
  out.probabilities = out.logits.softmax(-1);
  out.chosen = std::get<1>(out.probabilities.detach().sort(/*stable=*/true, -1, /*descending=*/true))
                   .slice(1, 0, layer.route.choices)
                   .contiguous();
  out.weights = out.probabilities.gather(1, out.chosen);
  if (layer.route.choices > 1)
    out.weights = out.weights / out.weights.sum(1, /*keepdim=*/true).clamp_min(kSmall);
  return out;
}

std::vector<torch::Tensor> pass_gate(const ExpertLayer& layer, const torch::Tensor& h,
                                     const torch::Tensor& seen) {
  const auto [logits, probabilities, chosen, weights] = choose_experts(layer, seen);
  const Route way = route(values_of(chosen.cpu()), layer.route);
  const torch::Tensor router =
      torch::cat({probabilities.sum(0), logits.logsumexp(-1).square().sum().view({1}),
                  tensor_of(way.chosen).to(h.options()),
                  torch::full({1}, static_cast<double>(h.size(0)), h.options().requires_grad(false))});
  std::vector<torch::Tensor> out{weights, tensor_of(way.row_of_copy), router};
  std::vector<std::int64_t> lengths;
  std::vector<torch::Tensor> counts;
  for (int s = 0; s < layer.route.slices; ++s) {
    const std::span of_slice =
        std::span(way.counts)
            .subspan(static_cast<std::size_t>(s) * static_cast<std::size_t>(layer.route.experts),
                     static_cast<std::size_t>(layer.route.experts));
    lengths.push_back(std::accumulate(of_slice.begin(), of_slice.end(), std::int64_t{0}));
    counts.push_back(tensor_of(of_slice));
  }
  const std::vector<torch::Tensor> slices = rows_at(h, tensor_of(way.token_of_row)).split_with_sizes(lengths);
  out.insert(out.end(), slices.begin(), slices.end());
  out.insert(out.end(), counts.begin(), counts.end());
  return out;
}

torch::Tensor pass_expert(const ExpertLayer& layer, std::int64_t expert, const torch::Tensor& rows) {
  return through({layer.up[expert], layer.up_bias[expert]}, {layer.down[expert], layer.down_bias[expert]},
                 rows);
}

torch::Tensor pass_experts(const ExpertLayer& layer, const torch::Tensor& rows, const torch::Tensor& counts,
                           WeightQueue* queue) {
  const std::int64_t experts = layer.up.size(0);
  const torch::Tensor flat = counts.contiguous();
  const std::span<const std::int64_t> of_source = values_of(flat);
  std::vector<std::int64_t> totals(static_cast<std::size_t>(experts));
  for (std::size_t i = 0; i < of_source.size(); ++i) totals[i % totals.size()] += of_source[i];
  if (layer.route.experts != experts && counts.dim() == 1)
    throw UsageError("experts '" + layer.shape.name +
                     "' are on other ranks as well: evaluate with those who have them");
  if (std::accumulate(totals.begin(), totals.end(), std::int64_t{0}) != rows.size(0))
    throw UsageError("experts '" + layer.shape.name + "': " + std::to_string(rows.size(0)) +
                     " rows are not those that were counted");
  const torch::Tensor order = tensor_of(by_expert(of_source, experts));
  const std::vector<torch::Tensor> of_expert =
      rows.index_select(0, order.to(rows.device())).split_with_sizes(totals);
  const std::vector<torch::Tensor> up = layer.up.unbind(), up_bias = layer.up_bias.unbind(),
                                   down = layer.down.unbind(), down_bias = layer.down_bias.unbind();
  std::vector<torch::Tensor> out;
  for (std::size_t e = 0; e < of_expert.size(); ++e) {
    if (queue == nullptr) {  // (all experts' gradients are put together once: unbind)
      out.push_back(through({up[e], up_bias[e]}, {down[e], down_bias[e]}, of_expert[e]));
      continue;
    }
    const auto expert = static_cast<std::int64_t>(e);
    const torch::Tensor inner = linear(of_expert[e], layer.up, layer.up_bias, queue, expert);
    out.push_back(linear(torch::gelu(inner, "tanh"), layer.down, layer.down_bias, queue, expert));
  }
  torch::Tensor back = torch::empty_like(order);
  back.index_put_({order}, torch::arange(order.numel()));
  return torch::cat(out).index_select(0, back.to(rows.device()));
}

torch::Tensor merge_rows(std::span<const torch::Tensor> combined, const torch::Tensor& weights,
                         const torch::Tensor& rows) {
  const torch::Tensor all = torch::cat(std::vector<torch::Tensor>(combined.begin(), combined.end()));
  const torch::Tensor copies = rows_at(all, rows).view({weights.size(0), weights.size(1), all.size(1)});
  return (copies * weights.unsqueeze(2)).sum(1);
}

}  // namespace weft
