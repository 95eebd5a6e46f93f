#include "weft_torch/models/model.h"

#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <utility>

#include "data/batches.h"
#include "step/stage.h"
#include "weft/error.h"
#include "weft_torch/models/bert.h"
#include "weft_torch/models/gnmt.h"
#include "weft_torch/models/gpt.h"
#include "weft_torch/models/lm.h"
#include "weft_torch/models/transformer.h"
#include "workload/model_shapes.h"

namespace weft {

Batch to_batch(const TokenBatch& batch) {
  const auto tensor = [&](const std::vector<std::int64_t>& ids, std::int64_t columns) {
    torch::Tensor t = torch::empty({batch.sequences, columns}, torch::kInt64);
    std::copy(ids.begin(), ids.end(), t.data_ptr<std::int64_t>());
    return t;
  };
  Batch out{.tokens = tensor(batch.tokens, batch.length),
            .targets = tensor(batch.targets, batch.targets_per_sequence()),
            .first_sequence = batch.first_sequence};
  if (batch.kind == BatchKind::pairs) out.source = tensor(batch.source, batch.length);
  return out;
}

Batch part_of(const Batch& whole, std::int64_t begin, std::int64_t end) {
  Batch out{.tokens = whole.tokens.slice(0, begin, end),
            .targets = whole.targets.slice(0, begin, end),
            .first_sequence = whole.first_sequence + begin};
  if (whole.source.defined()) out.source = whole.source.slice(0, begin, end);
  return out;
}

std::int64_t counted(const Batch& batch) { return batch.targets.ne(kNotCounted).sum().item<std::int64_t>(); }

std::int64_t counted(const TokenBatch& batch) {
  return std::count_if(batch.targets.begin(), batch.targets.end(),
                       [](std::int64_t target) { return target != kNotCounted; });
}

std::int64_t sequences(const Batch& batch) { return batch.tokens.size(0); }

Model::Model(ModelShape shape, const ModelOptions& options)
    : Model(std::move(shape), options, BatchKind::tokens) {}

Model::Model(ModelShape shape, const ModelOptions& options, BatchKind kind)
    : shape_(std::move(shape)), options_(options), kind_(kind) {
  shape_.check();
  parameters_.resize(shape_.parameters.size());
}

namespace {

// With the values that a rank's part has in the whole.
void fill(const torch::Tensor& tensor, const ParameterShape* shape, const InitialValues& initial) {
  const std::span<float> all(tensor.data_ptr<float>(), static_cast<std::size_t>(tensor.numel()));
  if (shape == nullptr || shape->cut_of == 0) {
    // Of experts: from this rank's first one's first element on.
    const std::int64_t first =
        shape == nullptr || shape->first == 0 ? 0 : shape->first * (shape->count() / shape->dims.front());
    return initial(first, all);
  }
  std::int64_t inner = 1;
  for (std::size_t d = static_cast<std::size_t>(shape->cut) + 1; d < shape->dims.size(); ++d)
    inner *= shape->dims[d];
  const std::int64_t run = shape->dims[static_cast<std::size_t>(shape->cut)] * inner;
  for (std::int64_t at = 0, outer = 0; at < tensor.numel(); at += run, ++outer)
    initial((outer * shape->cut_of + shape->cut_first) * inner,
            all.subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(run)));
}

}  // namespace

torch::Tensor Model::add(Parameter parameter) {
  const int at = place_of(parameter.name);
  const bool is_next = at >= 0 && (at == 0 || parameters_[static_cast<std::size_t>(at - 1)].tensor.defined());
  if (!shape_.chunks.empty() && at < 0) return {};
  const bool there = shape_.chunks.empty() ? is_next : at >= 0;
  std::vector<std::int64_t> sizes = parameter.tensor.sizes().vec();
  const ParameterShape* const shape = there ? &shape_.parameters[static_cast<std::size_t>(at)] : nullptr;
  if (there && shape->table && options_.tables_elsewhere) sizes.front() = shape->rows();
  if (!there || shape->dims != sizes)
    throw UsageError("model " + name() + ": '" + parameter.name + "' is not what its shape has next");
  parameters_[static_cast<std::size_t>(at)] = std::move(parameter);
  return parameters_[static_cast<std::size_t>(at)].tensor;
}

torch::Tensor Model::add(const std::string& name, torch::IntArrayRef sizes, InitialValues initial) {
  std::vector<std::int64_t> made = sizes.vec();
  const int place = place_of(name);
  if (place < 0 && !shape_.chunks.empty()) return {};
  const ParameterShape* const shape =
      place < 0 ? nullptr : &shape_.parameters[static_cast<std::size_t>(place)];
  if (shape != nullptr && shape->table && options_.tables_elsewhere) made.front() = 0;
  if (shape != nullptr && shape->cut_of > 0) {
    if (shape->whole_dims() != made)
      throw UsageError("model " + this->name() + ": '" + name + "' is not what its shape has cut");
    made = shape->dims;
  }
  torch::Tensor tensor = torch::empty(made, torch::kFloat32);
  fill(tensor, shape, initial);
  return add({.name = name, .tensor = tensor.set_requires_grad(true), .initial = std::move(initial)});
}

std::vector<TableIds> Model::lookups(const Batch&, const StepContext&) const { return {}; }

int Model::place_of(const std::string& name) const {
  const auto found = std::ranges::find(shape_.parameters, name, &ParameterShape::name);
  return found == shape_.parameters.end() ? -1 : static_cast<int>(found - shape_.parameters.begin());
}

int Model::block_at(int origin) const {
  for (int b = 0; b < shape_.num_blocks(); ++b) {
    if (shape_.origin_of(b) == origin) return b;
  }
  return -1;
}

torch::Tensor Model::look_up(int parameter, const torch::Tensor& ids, const StepContext& context) const {
  if (context.tables != nullptr) {
    torch::Tensor rows = context.tables->rows(parameter, ids);
    if (rows.defined()) return rows;
  }
  return torch::embedding(parameters_[static_cast<std::size_t>(parameter)].tensor, ids, /*padding_idx=*/-1,
                          /*scale_grad_by_freq=*/false, options_.sparse_gradients);
}

torch::Tensor TableHolder::block(int, std::int64_t, std::int64_t) const { return {}; }

torch::Tensor Model::block(int parameter, std::int64_t first, std::int64_t count,
                           const StepContext& context) const {
  if (context.tables != nullptr) {
    torch::Tensor rows = context.tables->block(parameter, first, count);
    if (rows.defined()) return rows;
  }
  const torch::Tensor& own = parameters_[static_cast<std::size_t>(parameter)].tensor;
  if (own.size(0) < first + count)
    throw UsageError("model " + name() + ": table '" + parameters_[static_cast<std::size_t>(parameter)].name +
                     "' is held elsewhere: evaluate with whoever holds it");
  return own.slice(0, first, first + count);
}

Batch Model::blank() const {
  const torch::Tensor one = torch::zeros({1, 1}, torch::kInt64);
  Batch out{.tokens = one, .targets = torch::full({1, kind_ == BatchKind::spans ? 2 : 1}, kNotCounted)};
  if (kind_ == BatchKind::pairs) out.source = one;
  return out;
}

torch::Tensor Model::loss(const Batch& batch, const StepContext& context) const {
  check(batch);
  if (sequences(batch) == 0) {
    // Depends on every parameter, and on none of their elements.
    torch::Tensor zero = torch::zeros({}, parameters_.front().tensor.options().requires_grad(false));
    for (const Parameter& p : parameters_) zero = zero + p.tensor.slice(0, 0, 0).sum();
    return zero;
  }
  std::map<std::string, torch::Tensor> given;
  for (std::size_t b = 0; b < shape_.blocks.size(); ++b) {
    for (std::size_t p = 0; p < shape_.blocks[b].parts.size(); ++p) {
      const PartShape& part = shape_.blocks[b].parts[p];
      std::vector<torch::Tensor> taken;
      for (const std::string& activation : part.takes) taken.push_back(given.at(activation));
      const std::vector<torch::Tensor> out =
          forward(static_cast<int>(b), static_cast<int>(p), taken, batch, context);
      for (std::size_t i = 0; i < part.gives.size(); ++i) given[part.gives[i]] = out[i];
    }
  }
  return given.at(kLoss);
}

void Model::to(torch::ScalarType type) {
  if (type != torch::kFloat32 && type != torch::kFloat64) {
    throw UsageError("a model computes in float32 or float64, not in " + std::string(c10::toString(type)));
  }
  const torch::NoGradGuard guard;
  for (const Parameter& p : parameters_) torch::Tensor(p.tensor).set_data(p.tensor.to(type));
}

void Model::lay_out_experts(int ranks, int rank) {
  ModelOptions options = options_;
  options.experts.ranks = ranks;
  options.experts.rank = rank;
  check_model(name(), options);
  ModelShape shape = rank_shape(name(), options);
  const torch::NoGradGuard guard;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (shape.parameters[i] == shape_.parameters[i]) continue;
    torch::Tensor tensor = parameters_[i].tensor;
    tensor.mutable_grad().reset();
    tensor.set_data(torch::empty(shape.parameters[i].dims, tensor.options().requires_grad(false)));
  }
  shape_ = std::move(shape);
  options_ = options;
}

void Model::check(const Batch& batch) const {
  const auto require = [&](bool holds, const std::string& what) {
    if (!holds) throw UsageError("model " + name() + ": " + what);
  };
  const auto is_matrix = [](const torch::Tensor& t) { return t.defined() && t.dim() == 2; };
  require(is_matrix(batch.tokens) && is_matrix(batch.targets),
          "a batch has a matrix of tokens and one of targets");
  const bool spans = kind_ == BatchKind::spans, pairs = kind_ == BatchKind::pairs;
  const std::int64_t sequences = batch.tokens.size(0), length = batch.tokens.size(1);
  if (spans) {
    require(batch.targets.size(0) == sequences && batch.targets.size(1) == 2,
            "a batch has tokens [sequences, length] and targets [sequences, 2]");
  } else {
    require(batch.tokens.sizes() == batch.targets.sizes(),
            "a batch has tokens and targets of one shape [sequences, length]");
  }
  require(pairs == batch.source.defined(), pairs ? "a batch has a source" : "a batch has no source");
  for (const torch::Tensor& ids : {batch.tokens, batch.targets, batch.source}) {
    require(!ids.defined() || ids.scalar_type() == torch::kInt64, "tokens and targets are int64");
  }
  std::int64_t longest = length;
  if (pairs) {
    require(is_matrix(batch.source) && batch.source.size(0) == sequences && batch.source.size(1) >= 1,
            "a batch has as many sources as sequences of tokens");
    longest = std::max(longest, batch.source.size(1));
  }
  require(longest <= options_.context, "sequences of " + std::to_string(longest) +
                                           " tokens are longer than the context of " +
                                           std::to_string(options_.context));
  require(batch.first_sequence >= 0, "first_sequence is negative");
}

std::unique_ptr<Model> make_model(std::string_view name, const ModelOptions& options) {
  check_model(name, options);
  if (name == "gpt" || name == "gpt-moe") return make_gpt(name, options);
  if (name == "lm") return make_lm(options);
  if (name == "gnmt") return make_gnmt(options);
  if (name == "transformer" || name == "bert2gpt2-moe") return make_transformer(name, options);
  return make_bert(options);
}

}  // namespace weft
