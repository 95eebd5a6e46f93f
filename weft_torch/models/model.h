// A language model as a list of blocks in order of use. What happens between blocks (waiting for parameters,
// timing, sending activations) is the caller's: it is told before each block.
//
//   auto model = make_model("gpt", model_options("gpt"));
//   torch::Tensor loss = model->loss(batch, {.seed = 1, .step = 0}, [&](int block) { ... });
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
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "workload/model_options.h"

namespace weft {

struct TokenBatch;

struct Batch {
  torch::Tensor tokens;             // [sequences, length] int64
  torch::Tensor targets;            // [sequences, length] int64; kNotCounted where nothing is to be predicted
  std::int64_t first_sequence = 0;  // index of its first sequence in the step's global batch
};
inline constexpr std::int64_t kNotCounted = -100;

Batch to_batch(const TokenBatch& batch);     // a copy
std::int64_t counted(const Batch& batch);    // targets that are predicted
std::int64_t sequences(const Batch& batch);  // of this rank; may be 0

struct StepContext {
  std::uint64_t seed = 0;
  std::int64_t step = 0;
  bool training = true;  // dropout, sampled softmax
};

struct Parameter {
  std::string name;  // stable: checkpoints and weights depend on it
  torch::Tensor tensor;
  bool table = false;  // rows are looked up and nothing else is done with it: few rows get a gradient
};

struct Block {
  std::string name;
  std::vector<Parameter> parameters;  // that it owns: a shared one belongs to its first user
  double flops_per_token = 0;         // of its forward pass, at full context; backward takes twice as many
};

class Model {
 public:
  using BeforeBlock = std::function<void(int block)>;

  virtual ~Model() = default;
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  const std::string& name() const { return name_; }
  const ModelOptions& options() const { return options_; }
  const std::vector<Block>& blocks() const { return blocks_; }
  std::vector<Parameter> parameters() const;  // of all blocks, in order of first use, none twice
  std::int64_t num_elements() const;
  double flops_per_token() const;

  // The sum of the cross entropy over counted tokens. before_block(b) is called just before block b's
  // parameters are used. An empty batch gives zero, and zero gradients. Throws UsageError for a batch that
  // does not fit the model.
  torch::Tensor loss(const Batch& batch, const StepContext& context,
                     const BeforeBlock& before_block = {}) const;
  // One block: the first ignores its input, the last returns the loss.
  virtual torch::Tensor forward(int block, const torch::Tensor& input, const Batch& batch,
                                const StepContext& context) const = 0;
  // torch::kFloat32 (as built) or torch::kFloat64. Parameters stay the same tensors. REQUIRES: no gradients
  // yet.
  void to(torch::ScalarType type);

 protected:
  Model(std::string name, const ModelOptions& options);
  // A parameter of the last block.
  torch::Tensor add(Parameter parameter);
  void begin_block(std::string block_name, double flops_per_token);

 private:
  void check(const Batch& batch) const;

  std::string name_;
  ModelOptions options_;
  std::vector<Block> blocks_;
};

// "gpt" or "lm". Throws UsageError with the nearest name, or for impossible options.
std::unique_ptr<Model> make_model(std::string_view name, const ModelOptions& options);

}  // namespace weft
