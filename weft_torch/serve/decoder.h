// A decoder (gpt, gpt-moe) that generates: what a token's attention needs of those before it is kept (keys and
// values), so that a new token costs one token. What its logits are is what the model's whole forward gives, without
// dropout; no token is dropped by its experts, whatever their capacity was in training.
//
// Sequences of a step may have different lengths: attention is of each alone, everything else of all their
// tokens together.
//
// Thread: one at a time; several decoders may share a model, which none of them changes.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "weft_torch/models/experts.h"
#include "weft_torch/models/layers.h"
#include "weft_torch/models/model.h"

namespace weft {

// Whoever has the experts of layers.
class ExpertRunner {
 public:
  virtual ~ExpertRunner() = default;
  // A step of so many tokens begins, and is over. All ranks take part, also those without a token.
  virtual void begin(std::int64_t tokens) = 0;
  virtual void end() = 0;
  // What the chosen experts of a layer make of rows: [tokens, width] and [tokens, choices] give
  // [tokens, choices, width].
  virtual torch::Tensor pass(int layer, const torch::Tensor& rows, const torch::Tensor& chosen) = 0;
};

struct DecodedSequence {
  std::vector<torch::Tensor> keys, values;  // of each layer: [heads, length, width of a head]
  std::int64_t length = 0;                  // tokens that it has
};

class Decoder {
 public:
  // Throws UsageError for a model that is none, or whose experts are dealt to several ranks.
  explicit Decoder(std::shared_ptr<const Model> model);

  const Model& model() const { return *model_; }
  const std::vector<ExpertLayer>& experts() const {
    return expert_layers_;
  }  // of those layers that have some
  std::int64_t context() const { return model_->options().context; }

  struct Feed {
    DecodedSequence* sequence = nullptr;
    std::vector<std::int64_t> tokens;  // behind those that it has
  };
  // What the last layer makes of the new tokens, one feed after the other: [tokens, width]. Throws UsageError for
  // tokens that are not in the vocabulary or too many for the context; then nothing has changed.
  torch::Tensor feed(std::span<const Feed> feeds, ExpertRunner& runner) const;
  torch::Tensor logits(const torch::Tensor& rows) const;  // [rows, vocabulary]

 private:
  torch::Tensor attend(std::size_t layer, const torch::Tensor& x, std::span<const Feed> feeds) const;
  torch::Tensor parameter(const std::string& name) const;
  Affine affine(const std::string& name) const;
  void add_experts(const ExpertShape& shape);

  std::shared_ptr<const Model> model_;
  torch::Tensor tokens_, positions_, head_;
  std::vector<Attention> attention_;
  std::vector<Mlp> mlp_;               // of each layer; undefined where it has experts
  std::vector<int> experts_of_layer_;  // place in expert_layers_; -1: none
  std::vector<ExpertLayer> expert_layers_;
  Affine head_norm_;
};

// All experts here.
class LocalExperts final : public ExpertRunner {
 public:
  explicit LocalExperts(const Decoder& decoder) : decoder_(decoder) {}
  void begin(std::int64_t) override {}
  void end() override {}
  torch::Tensor pass(int layer, const torch::Tensor& rows, const torch::Tensor& chosen) override;

 private:
  const Decoder& decoder_;
};

}  // namespace weft
