#include "weft_torch/serve/decoder.h"

#include <torch/torch.h>

#include <algorithm>
#include <string>

#include "weft/error.h"

namespace weft {

namespace {

[[noreturn]] void refuse(const std::string& what) { throw UsageError("serve: " + what); }

}  // namespace

Decoder::Decoder(std::shared_ptr<const Model> model) : model_(std::move(model)) {
  const ModelOptions& o = model_->options();
  if (model_->name() != "gpt" && model_->name() != "gpt-moe")
    refuse("model '" + model_->name() + "' does not generate: gpt and gpt-moe do");
  if (o.experts.ranks != 1) refuse("a rank that serves has all experts");
  const torch::NoGradGuard no_grad;
  tokens_ = parameter("embedding.token.weight");
  positions_ = parameter("embedding.position.weight");
  for (int i = 0; i < o.layers; ++i) {
    const std::string name = "layer." + std::to_string(i);
    attention_.push_back({affine(name + ".attention.norm"), affine(name + ".attention.heads"),
                          affine(name + ".attention.projection")});
    const auto& all = model_->shape().experts;
    const auto found = std::ranges::find(all, name + ".experts", &ExpertShape::name);
    const bool has = found != all.end();
    experts_of_layer_.push_back(has ? static_cast<int>(expert_layers_.size()) : -1);
    mlp_.push_back(
        has ? Mlp{} : Mlp{affine(name + ".mlp.norm"), affine(name + ".mlp.up"), affine(name + ".mlp.down")});
    if (has) add_experts(*found);
  }
  head_norm_ = affine("head.norm");
  head_ = o.untied ? parameter("head.weight") : tokens_;
}

torch::Tensor Decoder::parameter(const std::string& name) const {
  const auto found = std::ranges::find(model_->parameters(), name, &Parameter::name);
  if (found == model_->parameters().end()) refuse("the model has no '" + name + "'");
  return found->tensor.detach();
}

Affine Decoder::affine(const std::string& name) const {
  return {parameter(name + ".weight"), parameter(name + ".bias")};
}

void Decoder::add_experts(const ExpertShape& shape) {
  ExpertLayer layer{.shape = shape, .route = route_options(model_->options().experts)};
  layer.norm = affine(shape.name + ".norm");
  layer.gate = parameter(shape.name + ".gate.weight");
  if (model_->options().experts.shared > 0) {
    const std::string shared = shape.name.substr(0, shape.name.rfind('.')) + ".shared";
    layer.shared_up = affine(shared + ".up");
    layer.shared_down = affine(shared + ".down");
  }
  layer.up = parameter(shape.name + ".up.weight");
  layer.up_bias = parameter(shape.name + ".up.bias");
  layer.down = parameter(shape.name + ".down.weight");
  layer.down_bias = parameter(shape.name + ".down.bias");
  expert_layers_.push_back(std::move(layer));
}

// Of each feed alone; its keys and values stay.
torch::Tensor Decoder::attend(std::size_t layer, const torch::Tensor& x, std::span<const Feed> feeds) const {
  const Attention& attention = attention_[layer];
  const std::int64_t heads = model_->options().heads, width = x.size(1);
  const torch::Tensor qkv = attention.heads(attention.norm.norm(x))
                                .view({x.size(0), heads, 3, width / heads})
                                .permute({2, 1, 0, 3});
  std::vector<torch::Tensor> out{torch::empty({0, width}, x.options())};
  std::int64_t at = 0;
  for (const Feed& feed : feeds) {
    const auto count = static_cast<std::int64_t>(feed.tokens.size());
    const torch::Tensor mine = qkv.slice(2, at, at + count);
    torch::Tensor &keys = feed.sequence->keys[layer], &values = feed.sequence->values[layer];
    keys = torch::cat({keys, mine[1]}, 1);
    values = torch::cat({values, mine[2]}, 1);
    // A token sees what came before its feed, and of that what stands before it.
    const torch::Tensor seen =
        torch::ones({count, keys.size(1)}, torch::TensorOptions(torch::kBool)).tril(keys.size(1) - count);
    const torch::Tensor attended =
        at::scaled_dot_product_attention(mine[0].unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), seen);
    out.push_back(attended.squeeze(0).transpose(0, 1).reshape({count, width}));
    at += count;
  }
  return x + attention.projection(torch::cat(out));
}

torch::Tensor Decoder::feed(std::span<const Feed> feeds, ExpertRunner& runner) const {
  const torch::NoGradGuard no_grad;
  std::vector<std::int64_t> ids, places;
  for (const Feed& feed : feeds) {
    if (feed.sequence->length + static_cast<std::int64_t>(feed.tokens.size()) > context())
      refuse("a sequence has at most " + std::to_string(context()) + " tokens");
    for (const std::int64_t token : feed.tokens) {
      if (token < 0 || token >= tokens_.size(0))
        refuse("token " + std::to_string(token) + " is not in a vocabulary of " +
               std::to_string(tokens_.size(0)));
      ids.push_back(token);
    }
    for (std::size_t i = 0; i < feed.tokens.size(); ++i)
      places.push_back(feed.sequence->length + static_cast<std::int64_t>(i));
  }
  const std::int64_t heads = model_->options().heads, width = tokens_.size(1);
  for (const Feed& feed : feeds) {
    if (!feed.sequence->keys.empty()) continue;
    const torch::Tensor nothing = torch::empty({heads, 0, width / heads}, tokens_.options());
    feed.sequence->keys.assign(attention_.size(), nothing);
    feed.sequence->values.assign(attention_.size(), nothing);
  }
  runner.begin(static_cast<std::int64_t>(ids.size()));
  torch::Tensor x = tokens_.index_select(0, torch::tensor(ids, torch::kInt64)) +
                    positions_.index_select(0, torch::tensor(places, torch::kInt64));
  for (std::size_t i = 0; i < attention_.size(); ++i) {
    x = attend(i, x, feeds);
    if (experts_of_layer_[i] < 0) {
      x = x + mlp_[i].down(torch::gelu(mlp_[i].up(mlp_[i].norm.norm(x)), "tanh"));
      continue;
    }
    const ExpertLayer& layer = expert_layers_[static_cast<std::size_t>(experts_of_layer_[i])];
    const torch::Tensor h = layer.norm.norm(x);
    const Choices choices = choose_experts(layer, h);
    torch::Tensor out =
        (runner.pass(experts_of_layer_[i], h, choices.chosen) * choices.weights.unsqueeze(2)).sum(1);
    if (layer.shared_up.weight.defined())
      out = out + layer.shared_down(torch::gelu(layer.shared_up(h), "tanh"));
    x = x + out;
  }
  runner.end();
  for (const Feed& feed : feeds) feed.sequence->length += static_cast<std::int64_t>(feed.tokens.size());
  return x;
}

torch::Tensor Decoder::logits(const torch::Tensor& rows) const {
  const torch::NoGradGuard no_grad;
  return torch::linear(head_norm_.norm(rows), head_);
}

torch::Tensor LocalExperts::pass(int layer, const torch::Tensor& rows, const torch::Tensor& chosen) {
  const ExpertLayer& of = decoder_.experts()[static_cast<std::size_t>(layer)];
  const torch::Tensor copies = rows.repeat_interleave(chosen.size(1), 0);
  torch::Tensor out = torch::zeros_like(copies);
  const torch::Tensor flat = chosen.flatten();
  for (std::int64_t e = 0; e < of.up.size(0); ++e) {
    const torch::Tensor mine = flat.eq(e).nonzero().flatten();
    if (mine.numel() > 0) out.index_copy_(0, mine, pass_expert(of, e, copies.index_select(0, mine)));
  }
  return out.view({rows.size(0), chosen.size(1), rows.size(1)});
}

}  // namespace weft
