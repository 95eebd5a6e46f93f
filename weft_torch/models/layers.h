// What models of attention are made of: layers as in GPT-2, a norm before each and a residual around it, so that
// a layer gives x + dropout(f(norm(x))).
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "weft_torch/models/model.h"

namespace weft {

struct Affine {
  torch::Tensor weight, bias;
  torch::Tensor operator()(const torch::Tensor& x, const StepContext& context = {}) const;
  torch::Tensor norm(const torch::Tensor& x) const;
};

// Rows of `heads` are head by head: of each its query, its key, its value.
struct Attention {
  Affine norm, heads, projection;
};
struct CrossAttention {
  Affine norm, query, kv, projection;
};
struct Mlp {
  Affine norm, up, down;
};

// Where in the model, for its dropout, and of what.
struct Place {
  std::size_t site = 0;
  const Batch& batch;
  const StepContext& context;
};

struct ExpertLayer;  // experts.h

class LayeredModel : public Model {
 protected:
  static constexpr double kDeviation = 0.02;

  LayeredModel(ModelShape shape, const ModelOptions& options, BatchKind kind);

  // Weights are normal, biases 0, scales of norms 1. `residual`: deviation of the matrix behind which a layer's
  // residual is added.
  torch::Tensor add_normal(const std::string& name, torch::IntArrayRef sizes, double deviation);
  Affine add_norm(const std::string& name);
  Affine add_linear(const std::string& name, std::int64_t in, std::int64_t out, double deviation);
  Attention add_attention(const std::string& name, double residual);
  CrossAttention add_cross_attention(const std::string& name, double residual);
  Mlp add_mlp(const std::string& name, double residual);
  ExpertLayer add_experts(const ExpertShape& shape, double residual);
  const ExpertShape* experts_of(int block) const;  // null: it has none

  torch::Tensor dropped(const torch::Tensor& x, const Place& place) const;
  // Rows of a table and of their places.
  torch::Tensor embed(int table, const torch::Tensor& positions, PartRole role,
                      std::span<const torch::Tensor> taken, const Place& place) const;
  // Causal: a token sees itself and what came before it, else all of its sequence. Probabilities have no
  // dropout: torch's would draw from the process's generator.
  torch::Tensor attend(const Attention& layer, PartRole role, std::span<const torch::Tensor> taken,
                       bool causal, const Place& place) const;
  // Queries of x, keys and values of `seen`, which is not normed here.
  torch::Tensor attend(const CrossAttention& layer, const torch::Tensor& x, const torch::Tensor& seen,
                       const Place& place) const;
  torch::Tensor feed_forward(const Mlp& layer, PartRole role, std::span<const torch::Tensor> taken,
                             const Place& place) const;
  PartRole role_of(int block, int part) const { return part_of(block, part).role; }
  // Its number in the block of the whole model.
  int origin_of_part(int block, int part) const {
    const int origin = part_of(block, part).origin;
    return origin < 0 ? part : origin;
  }
  // One part of a layer of experts, by its number in the block.
  std::vector<torch::Tensor> pass(const ExpertLayer& layer, int part, std::span<const torch::Tensor> taken,
                                  const Place& place) const;

 private:
  const PartShape& part_of(int block, int part) const {
    return shape().blocks[static_cast<std::size_t>(block)].parts[static_cast<std::size_t>(part)];
  }
  // x + dropout(product(norm(x)) + bias), or what is left of it in a part that was cut.
  template <class Product>
  torch::Tensor residual(PartRole role, std::span<const torch::Tensor> taken, const Affine& norm,
                         const torch::Tensor& bias, const Place& place, const Product& product) const {
    switch (role) {
      case PartRole::before:
        return norm.norm(taken[0]);
      case PartRole::product:
        return product(taken[0], torch::Tensor());
      case PartRole::behind:
        return taken[0] + dropped(taken[1] + bias, place);
      case PartRole::whole:
        break;
    }
    return taken[0] + dropped(product(norm.norm(taken[0]), bias), place);
  }
};

}  // namespace weft
