#include "weft_torch/train/expert_rows.h"

#include <torch/torch.h>

#include <algorithm>

#include "experts/experts.h"
#include "experts/router.h"
#include "weft/error.h"

namespace weft {

namespace {

DType dtype_of(const torch::Tensor& tensor) {
  if (tensor.scalar_type() == torch::kInt64) return DType::int64;
  return tensor.scalar_type() == torch::kFloat64 ? DType::float64 : DType::float32;
}

}  // namespace

ExpertRows::ExpertRows(const Model& model, JobStrategies& job, CutModel& cut)
    : model_(model), job_(job), cut_(cut) {}

void ExpertRows::begin(std::span<const Batch> micro_batches) {
  if (job_.experts() == nullptr) return;
  std::vector<std::int64_t> tokens;
  for (const Batch& batch : micro_batches) {
    tokens.push_back(batch.tokens.numel());
    if (batch.source.defined() && batch.source.numel() != batch.tokens.numel())
      throw UsageError("experts: a source of " + std::to_string(batch.source.numel()) +
                       " tokens is not as long as its target of " + std::to_string(batch.tokens.numel()) +
                       ", and both go by one number of places");
  }
  job_.experts()->set_tokens(tokens);
  job_.router()->set_micro_batches(static_cast<int>(tokens.size()));
}

const ExpertShape* ExpertRows::layer_of(const Piece& piece, int& layer) const {
  const std::vector<ExpertShape>& all = model_.shape().experts;
  const auto found = std::ranges::find(all, piece.block, &ExpertShape::block);
  layer = static_cast<int>(found - all.begin());
  return found == all.end() ? nullptr : &*found;
}

torch::Tensor ExpertRows::rows_of(int layer, RowExchange kind, int slice, int micro_batch) const {
  const Experts::Rows rows = job_.experts()->arrived(layer, kind, slice, micro_batch);
  const torch::Tensor& like = model_.parameters().front().tensor;
  const auto keep = [memory = rows.memory](void*) {};
  return torch::from_blob(rows.memory.get(), {rows.count, job_.experts()->layer(layer).width}, keep,
                          torch::TensorOptions(like.scalar_type()))
      .to(like.device());
}

void ExpertRows::before_forward(const Piece& piece) {
  int layer = 0;
  const ExpertShape* const shape = layer_of(piece, layer);
  if (shape == nullptr || job_.experts()->group().size() == 1) return;
  const int slice = piece.part - shape->first_slice, m = piece.micro_batch;
  if (piece.part == shape->merge()) {
    for (int s = 0; s < shape->slices; ++s)
      cut_.arrived(shape->combine(s), m, rows_of(layer, RowExchange::combine, s, m));
  } else if (slice >= 0 && slice < shape->slices) {
    cut_.arrived(shape->dispatch(slice), m, rows_of(layer, RowExchange::dispatch, slice, m));
    const std::vector<std::int64_t> counts =
        job_.experts()->arrived(layer, RowExchange::dispatch, slice, m).counts;
    cut_.arrived(shape->counts(slice), m,
                 torch::tensor(counts, torch::kInt64).view({job_.experts()->group().size(), -1}));
  }
}

void ExpertRows::before_backward(const Piece& piece) {
  int layer = 0;
  const ExpertShape* const shape = layer_of(piece, layer);
  if (shape == nullptr) return;
  const int slice = piece.part - shape->first_slice, m = piece.micro_batch;
  const bool travels = job_.experts()->group().size() > 1;
  if (piece.part == shape->gate) {
    const torch::Tensor& like = model_.parameters().front().tensor;
    const torch::Tensor gradient = torch::tensor(job_.router()->gradient(layer, m), torch::kFloat64);
    cut_.gradient_arrived(shape->router(), m, gradient.to(like.options().requires_grad(false)));
    for (int s = 0; travels && s < shape->slices; ++s)
      cut_.gradient_arrived(shape->dispatch(s), m, rows_of(layer, RowExchange::dispatch_back, s, m));
  } else if (travels && slice >= 0 && slice < shape->slices) {
    cut_.gradient_arrived(shape->combine(slice), m, rows_of(layer, RowExchange::combine_back, slice, m));
  }
}

Dense ExpertRows::tensor(const TensorName& name) {
  const torch::Tensor from = name.of == TensorName::Of::gradient
                                 ? cut_.gradient_to_send(name.name, name.micro_batch)
                                 : cut_.to_send(name.name, name.micro_batch);
  if (!from.defined()) return {};
  return {static_cast<std::byte*>(from.data_ptr()), from.numel(), dtype_of(from)};
}

}  // namespace weft
