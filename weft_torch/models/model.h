// A language model as a list of blocks, a block a list of parts, as its shape says (weft/train/shape.h). What
// happens between parts (waiting for parameters, timing, sending activations) is the caller's: it computes
// them one by one.
//
//   auto model = make_model("gpt", model_options("gpt"));
//   torch::Tensor loss = model->loss(batch, {.seed = 1, .step = 0});  // all parts as one graph
//   (loss / global_count).backward();
//
// Nothing draws from torch's generators: weights are functions of (seed, name, element), dropout masks of
// (seed, step, site, global token, feature). So a batch that is cut between ranks computes what the whole
// batch on one rank does, models built in several threads are equal, and a block may be computed again.
//
// Thread: a model belongs to one thread at a time; different models are independent.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "weft/train/model_options.h"
#include "weft/train/shape.h"

namespace weft {

struct TokenBatch;

struct Batch {
  torch::Tensor tokens;             // [sequences, length] int64
  torch::Tensor targets;            // [sequences, length] int64; kNotCounted where nothing is to be predicted
  std::int64_t first_sequence = 0;  // index of its first sequence in the step's global batch
};
inline constexpr std::int64_t kNotCounted = -100;

Batch to_batch(const TokenBatch& batch);   // a copy
std::int64_t counted(const Batch& batch);  // targets that are predicted
std::int64_t counted(const TokenBatch& batch);
std::int64_t sequences(const Batch& batch);  // of this rank; may be 0

struct StepContext {
  std::uint64_t seed = 0;
  std::int64_t step = 0;
  bool training = true;  // dropout, sampled softmax
};

struct Parameter {
  std::string name;  // as in the shape
  torch::Tensor tensor;
};

class Model {
 public:
  virtual ~Model() = default;
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  const std::string& name() const { return shape_.model; }
  const ModelOptions& options() const { return options_; }
  const ModelShape& shape() const { return shape_; }
  const std::vector<Parameter>& parameters() const { return parameters_; }  // in the order of the shape

  // The sum of the cross entropy over counted tokens. An empty batch gives zero, and zero gradients. Throws
  // UsageError for a batch that does not fit the model.
  torch::Tensor loss(const Batch& batch, const StepContext& context) const;
  // One part: `taken` has what the shape says that it takes, in that order; what it gives comes back in the
  // order of the shape. Autograd may be cut around it. REQUIRES: check(batch) passed, the batch is not empty.
  virtual std::vector<torch::Tensor> forward(int block, int part, std::span<const torch::Tensor> taken,
                                             const Batch& batch, const StepContext& context) const = 0;
  // Throws UsageError for a batch that does not fit the model.
  void check(const Batch& batch) const;
  // torch::kFloat32 (as built) or torch::kFloat64. Parameters stay the same tensors. REQUIRES: no gradients
  // yet.
  void to(torch::ScalarType type);

 protected:
  // Throws UsageError for a shape that does not hold together.
  Model(ModelShape shape, const ModelOptions& options);
  // The next parameter of the shape. Throws UsageError for another name or other sizes.
  torch::Tensor add(Parameter parameter);

 private:
  ModelShape shape_;
  ModelOptions options_;
  std::vector<Parameter> parameters_;
};

// "gpt" or "lm". Throws UsageError with the nearest name, or for impossible options.
std::unique_ptr<Model> make_model(std::string_view name, const ModelOptions& options);

}  // namespace weft
