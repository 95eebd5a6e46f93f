#include "weft_torch/models/layers.h"

#include <torch/torch.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "weft_torch/models/experts.h"
#include "weft_torch/models/ops.h"
#include "weft_torch/models/weight_queue.h"

namespace weft {

namespace {

constexpr double kNormEpsilon = 1e-5;

// [sequences, length, heads of all], each of `parts`, as so many tensors [sequences, heads, length, width of a head].
std::vector<torch::Tensor> heads_of(const torch::Tensor& x, std::int64_t parts, std::int64_t heads) {
  const torch::Tensor cut = x.view({x.size(0), x.size(1), heads, parts, x.size(2) / parts / heads});
  std::vector<torch::Tensor> out;
  for (std::int64_t i = 0; i < parts; ++i) out.push_back(cut.select(3, i).transpose(1, 2));
  return out;
}

}  // namespace

LayeredModel::LayeredModel(ModelShape shape, const ModelOptions& options, BatchKind kind)
    : Model(std::move(shape), options, kind) {}

torch::Tensor Affine::operator()(const torch::Tensor& x, const StepContext& context) const {
  return linear(x, weight, bias, context.weights);
}

torch::Tensor Affine::norm(const torch::Tensor& x) const {
  return torch::layer_norm(x, {x.size(-1)}, weight, bias, kNormEpsilon);
}

torch::Tensor LayeredModel::add_normal(const std::string& name, torch::IntArrayRef sizes, double deviation) {
  return add(name, sizes, normal_values(options().seed, name, deviation));
}

Affine LayeredModel::add_norm(const std::string& name) {
  const torch::Tensor weight = add(name + ".weight", {options().width}, constant_values(1));
  return {weight, add(name + ".bias", {options().width}, constant_values(0))};
}

Affine LayeredModel::add_linear(const std::string& name, std::int64_t in, std::int64_t out,
                                double deviation) {
  const torch::Tensor weight = add_normal(name + ".weight", {out, in}, deviation);
  return {weight, add(name + ".bias", {out}, constant_values(0))};
}

Attention LayeredModel::add_attention(const std::string& name, double residual) {
  const std::int64_t d = options().width;
  Attention out;
  out.norm = add_norm(name + ".norm");
  out.heads = add_linear(name + ".heads", d, 3 * d, kDeviation);
  out.projection = add_linear(name + ".projection", d, d, residual);
  return out;
}

CrossAttention LayeredModel::add_cross_attention(const std::string& name, double residual) {
  const std::int64_t d = options().width;
  CrossAttention out;
  out.norm = add_norm(name + ".norm");
  out.query = add_linear(name + ".query", d, d, kDeviation);
  out.kv = add_linear(name + ".kv", d, 2 * d, kDeviation);
  out.projection = add_linear(name + ".projection", d, d, residual);
  return out;
}

Mlp LayeredModel::add_mlp(const std::string& name, double residual) {
  const std::int64_t d = options().width;
  Mlp out;
  out.norm = add_norm(name + ".norm");
  out.up = add_linear(name + ".up", d, 4 * d, kDeviation);
  out.down = add_linear(name + ".down", 4 * d, d, residual);
  return out;
}

ExpertLayer LayeredModel::add_experts(const ExpertShape& shape, double residual) {
  const std::int64_t d = options().width;
  const ExpertOptions& o = options().experts;
  const std::int64_t mine = o.count / o.ranks;
  ExpertLayer out{.shape = shape, .route = route_options(o), .jitter = o.jitter};
  out.norm = add_norm(shape.name + ".norm");
  out.gate = add_normal(shape.name + ".gate.weight", {o.count, d}, kDeviation);
  if (o.shared > 0) {
    const std::string shared = shape.name.substr(0, shape.name.rfind('.')) + ".shared";
    out.shared_up = add_linear(shared + ".up", d, 4 * d * o.shared, kDeviation);
    out.shared_down = add_linear(shared + ".down", 4 * d * o.shared, d, residual);
  }
  out.up = add_normal(shape.name + ".up.weight", {mine, 4 * d, d}, kDeviation);
  out.up_bias = add(shape.name + ".up.bias", {mine, 4 * d}, constant_values(0));
  out.down = add_normal(shape.name + ".down.weight", {mine, d, 4 * d}, residual);
  out.down_bias = add(shape.name + ".down.bias", {mine, d}, constant_values(0));
  return out;
}

const ExpertShape* LayeredModel::experts_of(int block) const {
  const auto found = std::ranges::find(shape().experts, block, &ExpertShape::block);
  return found == shape().experts.end() ? nullptr : &*found;
}

std::vector<torch::Tensor> LayeredModel::pass(const ExpertLayer& layer, int part,
                                              std::span<const torch::Tensor> taken,
                                              const Place& place) const {
  const ExpertShape& shape = layer.shape;
  const torch::Tensor& x = taken.front();
  if (part == shape.gate) {
    const torch::Tensor h = layer.norm.norm(x);
    const DropoutSite where{.site = static_cast<std::uint32_t>(place.site),
                            .first_sequence = place.batch.first_sequence};
    return pass_gate(layer, h.flatten(0, 1),
                     keyed_jitter(h, layer.jitter, where, place.context).flatten(0, 1));
  }
  if (part < shape.first_slice)
    return {layer.shared_down(torch::gelu(layer.shared_up(layer.norm.norm(x), place.context), "tanh"),
                              place.context)};
  if (part < shape.merge()) return {pass_experts(layer, taken[0], taken[1], place.context.weights)};
  const bool shared = layer.shared_up.weight.defined();
  torch::Tensor out = merge_rows(taken.subspan(shared ? 4 : 3), taken[1], taken[2]).view(x.sizes());
  if (shared) out = out + taken[3];
  return {x + dropped(out, place)};
}

torch::Tensor LayeredModel::dropped(const torch::Tensor& x, const Place& place) const {
  const DropoutSite where{.probability = options().dropout,
                          .site = static_cast<std::uint32_t>(place.site),
                          .first_sequence = place.batch.first_sequence};
  return keyed_dropout(x, where, place.context);
}

torch::Tensor LayeredModel::embed(int table, const torch::Tensor& positions, PartRole role,
                                  std::span<const torch::Tensor> taken, const Place& place) const {
  const torch::Tensor& ids = place.batch.tokens;
  if (role == PartRole::product) {
    const ParameterShape& mine = shape().parameters[static_cast<std::size_t>(table)];
    const torch::Tensor local = ids - mine.cut_first;
    const torch::Tensor is_mine = local.ge(0).logical_and(local.lt(mine.rows()));
    return look_up(table, local.clamp(0, mine.rows() - 1), place.context) * is_mine.unsqueeze(2);
  }
  const torch::Tensor rows = role == PartRole::behind ? taken.back() : look_up(table, ids, place.context);
  return dropped(rows + positions.slice(0, 0, ids.size(1)), place);
}

torch::Tensor LayeredModel::attend(const Attention& layer, PartRole role,
                                   std::span<const torch::Tensor> taken, bool causal,
                                   const Place& place) const {
  const auto product = [&](const torch::Tensor& h, const torch::Tensor& bias) {
    const std::vector<torch::Tensor> qkv =
        heads_of(layer.heads(h, place.context), 3, options().heads / options().tensor.ranks);
    const torch::Tensor out =
        at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], {}, /*dropout_p=*/0, causal);
    return linear(out.transpose(1, 2).flatten(2), layer.projection.weight, bias, place.context.weights);
  };
  return residual(role, taken, layer.norm, layer.projection.bias, place, product);
}

torch::Tensor LayeredModel::attend(const CrossAttention& layer, const torch::Tensor& x,
                                   const torch::Tensor& seen, const Place& place) const {
  const std::vector<torch::Tensor> query = heads_of(layer.query(layer.norm.norm(x)), 1, options().heads);
  const std::vector<torch::Tensor> kv = layer.kv(seen).chunk(2, 2);
  const torch::Tensor out = at::scaled_dot_product_attention(query[0], heads_of(kv[0], 1, options().heads)[0],
                                                             heads_of(kv[1], 1, options().heads)[0]);
  return x + dropped(layer.projection(out.transpose(1, 2).reshape(x.sizes())), place);
}

torch::Tensor LayeredModel::feed_forward(const Mlp& layer, PartRole role,
                                         std::span<const torch::Tensor> taken, const Place& place) const {
  const auto product = [&](const torch::Tensor& h, const torch::Tensor& bias) {
    return linear(torch::gelu(layer.up(h, place.context), "tanh"), layer.down.weight, bias,
                  place.context.weights);
  };
  return residual(role, taken, layer.norm, layer.down.bias, place, product);
}

}  // namespace weft
