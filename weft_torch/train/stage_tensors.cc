#include "weft_torch/train/stage_tensors.h"

#include <torch/torch.h>

#include <algorithm>

namespace weft {

StageTensors::StageTensors(const Model& model, JobStrategies& job, CutModel& cut)
    : model_(model), job_(job), cut_(cut) {}

void StageTensors::begin(std::span<const Batch> micro_batches) {
  if (job_.pipeline() == nullptr) return;
  batches_ = micro_batches;
  std::vector<std::int64_t> tokens;
  for (const Batch& batch : micro_batches) tokens.push_back(batch.tokens.numel());
  job_.pipeline()->set_tokens(tokens);
}

bool StageTensors::has(const std::string& activation) const {
  return std::ranges::any_of(model_.shape().chunks, [&](const ChunkShape& chunk) {
    return chunk.arrives == activation || chunk.leaves == activation;
  });
}

torch::Tensor StageTensors::made_of(std::shared_ptr<std::byte[]> memory, int micro_batch) const {
  const torch::Tensor& tokens = batches_[static_cast<std::size_t>(micro_batch)].tokens;
  const torch::Tensor& like = model_.parameters().front().tensor;
  void* const data = memory.get();
  const auto keep = [memory = std::move(memory)](void*) {};
  return torch::from_blob(data, {tokens.size(0), tokens.size(1), job_.pipeline()->width()}, keep,
                          torch::TensorOptions(like.scalar_type()))
      .to(like.device());
}

void StageTensors::before_forward(const Piece& piece) {
  for (const ChunkShape& chunk : model_.shape().chunks) {
    if (piece.part != 0 || piece.block != chunk.first || chunk.arrives.empty()) continue;
    std::shared_ptr<std::byte[]> memory = job_.pipeline()->arrived(chunk.arrives, piece.micro_batch);
    if (memory != nullptr)
      cut_.arrived(chunk.arrives, piece.micro_batch, made_of(std::move(memory), piece.micro_batch));
  }
}

void StageTensors::before_backward(const Piece& piece) {
  for (const ChunkShape& chunk : model_.shape().chunks) {
    const int last = chunk.first + chunk.count - 1;
    if (piece.block != last || chunk.leaves.empty()) continue;
    const auto parts = model_.shape().blocks[static_cast<std::size_t>(last)].parts.size();
    if (piece.part + 1 != static_cast<int>(parts)) continue;
    std::shared_ptr<std::byte[]> memory = job_.pipeline()->gradient_arrived(chunk.leaves, piece.micro_batch);
    if (memory != nullptr)
      cut_.gradient_arrived(chunk.leaves, piece.micro_batch, made_of(std::move(memory), piece.micro_batch));
  }
}

Dense StageTensors::tensor(const TensorName& name) {
  const bool back = name.of == TensorName::Of::gradient;
  const torch::Tensor from =
      back ? cut_.gradient_to_send(name.name, name.micro_batch) : cut_.to_send(name.name, name.micro_batch);
  if (!from.defined()) return {};
  if (back) {
    leaving_ = from;
    cut_.let_go(name.name, name.micro_batch);
  }
  const DType dtype = from.scalar_type() == torch::kFloat64 ? DType::float64 : DType::float32;
  return {static_cast<std::byte*>(from.data_ptr()), from.numel(), dtype};
}

}  // namespace weft
