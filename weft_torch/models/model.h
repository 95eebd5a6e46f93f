// A model as a list of blocks, a block a list of parts, as its shape says (weft/train/shape.h). What
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
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "weft/train/model_options.h"
#include "weft/train/shape.h"

namespace weft {

struct TokenBatch;                    // src/data/batches.h
enum class BatchKind : std::uint8_t;  // as well

struct Batch {
  torch::Tensor tokens;  // [sequences, length] int64
  // [sequences, length] int64, of spans [sequences, 2]; kNotCounted where nothing is to be predicted
  torch::Tensor targets;
  std::int64_t first_sequence = 0;  // index of its first sequence in the step's global batch
  torch::Tensor source;             // of pairs: [sequences, any length] int64
};
inline constexpr std::int64_t kNotCounted = -100;

Batch to_batch(const TokenBatch& batch);  // a copy
// Sequences [begin, end) of it, as views.
Batch part_of(const Batch& whole, std::int64_t begin, std::int64_t end);
std::int64_t counted(const Batch& batch);  // targets that are predicted
std::int64_t counted(const TokenBatch& batch);
std::int64_t sequences(const Batch& batch);  // of this rank; may be 0

// Whoever holds tables in place of the model: rows come from there, and their gradients go there.
class TableHolder {
 public:
  virtual ~TableHolder() = default;
  // Rows of a table, [..., columns] for ids [...]; undefined for a parameter that it does not hold. Throws
  // UsageError for an id that lookups() had not said.
  virtual torch::Tensor rows(int parameter, const torch::Tensor& ids) const = 0;
  // Rows [first, first + count) of it, or undefined: for what reads a table from end to end. Who holds tables
  // for steps alone does not have them.
  virtual torch::Tensor block(int parameter, std::int64_t first, std::int64_t count) const;
};

class WeightQueue;  // weight_queue.h

struct StepContext {
  std::uint64_t seed = 0;
  std::int64_t step = 0;
  bool training = true;                 // dropout, sampled softmax
  const TableHolder* tables = nullptr;  // null: the model's own parameters
  WeightQueue* weights = nullptr;       // backward is in halves; null: it is whole
};

// Ids that a step looks up in a table.
struct TableIds {
  int parameter = 0;        // place in the shape's list
  torch::Tensor ids;        // [any number] int64, contiguous; an id may be there several times
  std::int64_t shared = 0;  // so many, the last ones, are the same on all ranks
};

// Elements [first, first + out.size()) of a parameter, before the first step; of experts, of all ranks' in one.
using InitialValues = std::function<void(std::int64_t first, std::span<float> out)>;

struct Parameter {
  std::string name;      // as in the shape
  torch::Tensor tensor;  // of a table that is elsewhere (ModelOptions::tables_elsewhere): without rows
  InitialValues initial;
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

  // The sum of the cross entropy over counted targets. An empty batch gives zero, and zero gradients. Throws
  // UsageError for a batch that does not fit the model.
  torch::Tensor loss(const Batch& batch, const StepContext& context) const;
  // One part: `taken` has what the shape says that it takes, in that order; what it gives comes back in the
  // order of the shape. Autograd may be cut around it. REQUIRES: check(batch) passed, the batch is not empty.
  virtual std::vector<torch::Tensor> forward(int block, int part, std::span<const torch::Tensor> taken,
                                             const Batch& batch, const StepContext& context) const = 0;
  // What forward() of a step on this batch looks up, of every parameter that the shape calls a table: known
  // before the step, and the same function of (batch, seed, step, training) on every rank.
  virtual std::vector<TableIds> lookups(const Batch& batch, const StepContext& context) const;
  // Throws UsageError for a batch that does not fit the model.
  void check(const Batch& batch) const;
  // One short sequence that fits, of which nothing counts.
  Batch blank() const;
  // torch::kFloat32 (as built) or torch::kFloat64. Parameters stay the same tensors. REQUIRES: no gradients
  // yet.
  void to(torch::ScalarType type);
  // This rank's experts are those of place `rank` of `ranks` from now on: the same tensors with other sizes,
  // whose values are the caller's to set, without gradients. Throws UsageError. REQUIRES: no graph of a step
  // is alive.
  void lay_out_experts(int ranks, int rank);

 protected:
  // Throws UsageError for a shape that does not hold together. Without a kind batches are of tokens.
  Model(ModelShape shape, const ModelOptions& options);
  Model(ModelShape shape, const ModelOptions& options, BatchKind kind);
  // The next parameter of the shape; of a stage: undefined, and nothing, where it is another stage's. Throws
  // UsageError for another name or other sizes.
  torch::Tensor add(Parameter parameter);
  torch::Tensor add(const std::string& name, torch::IntArrayRef sizes, InitialValues initial);
  // Rows of a table by their ids, [..., columns]: from whoever holds it.
  torch::Tensor look_up(int parameter, const torch::Tensor& ids, const StepContext& context) const;
  // Rows [first, first + count) of it: the same.
  torch::Tensor block(int parameter, std::int64_t first, std::int64_t count,
                      const StepContext& context) const;
  int place_of(const std::string& name) const;  // -1: it is another stage's
  int block_at(int origin) const;  // that has this place in the whole model; -1: it is another stage's

 private:
  ModelShape shape_;
  ModelOptions options_;
  BatchKind kind_;
  std::vector<Parameter> parameters_;
};

// One of model_names(). Throws UsageError with the nearest name, or for impossible options.
std::unique_ptr<Model> make_model(std::string_view name, const ModelOptions& options);

}  // namespace weft
