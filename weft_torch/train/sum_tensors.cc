#include "weft_torch/train/sum_tensors.h"

#include <torch/torch.h>

#include <algorithm>
#include <vector>

namespace weft {

SumTensors::SumTensors(JobStrategies& job, CutModel& cut) : job_(job), cut_(cut) {}

void SumTensors::begin(std::span<const Batch> micro_batches) {
  if (job_.tensor_sums() == nullptr) return;
  std::vector<std::int64_t> tokens;
  for (const Batch& batch : micro_batches) tokens.push_back(batch.tokens.numel());
  job_.tensor_sums()->set_tokens(tokens);
}

bool SumTensors::has(const std::string& activation) const {
  return job_.tensor_sums() != nullptr &&
         std::ranges::find(job_.tensor_sums()->sums(), activation, &SumShape::activation) !=
             job_.tensor_sums()->sums().end();
}

void SumTensors::before_forward(const Piece& piece) {
  if (job_.tensor_sums() == nullptr) return;
  for (const SumShape& sum : job_.tensor_sums()->sums()) {
    if (!sum.gradient && sum.block == piece.block && sum.part + 1 == piece.part)
      cut_.take_sum(sum.activation, piece.micro_batch);
  }
}

void SumTensors::before_backward(const Piece& piece) {
  if (job_.tensor_sums() == nullptr) return;
  for (const SumShape& sum : job_.tensor_sums()->sums()) {
    if (sum.gradient && sum.block == piece.block && sum.part == piece.part + 1)
      cut_.take_gradient_sum(sum.activation, piece.micro_batch);
  }
}

Dense SumTensors::tensor(const TensorName& name) {
  const torch::Tensor from = name.of == TensorName::Of::gradient
                                 ? cut_.gradient_to_send(name.name, name.micro_batch)
                                 : cut_.to_send(name.name, name.micro_batch);
  if (!from.defined()) return {};
  const DType dtype = from.scalar_type() == torch::kFloat64 ? DType::float64 : DType::float32;
  return {static_cast<std::byte*>(from.data_ptr()), from.numel(), dtype};
}

}  // namespace weft
