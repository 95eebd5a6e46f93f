#include "weft_torch/train/snapshot.h"

#include <torch/torch.h>

#include <cstring>
#include <map>

#include "weft/error.h"
#include "workload/job_strategies.h"
#include "workload/model_shapes.h"

namespace weft {

namespace {

DType dtype_of(const torch::Tensor& tensor) {
  return tensor.scalar_type() == torch::kFloat64 ? DType::float64 : DType::float32;
}

StateKey key_of(const Parameter& parameter) {
  return {std::string(kModelOwner), std::string(kModelValue), parameter.name};
}

}  // namespace

std::vector<LiveRow> model_rows(const Model& model,
                                const std::function<Peers(const ParameterShape& of)>& holders) {
  std::vector<LiveRow> out;
  for (std::size_t i = 0; i < model.parameters().size(); ++i) {
    const Parameter& parameter = model.parameters()[i];
    const ParameterShape& shape = model.shape().parameters[i];
    LiveRow row;
    row.row = {.key = key_of(parameter),
               .dtype = dtype_of(parameter.tensor),
               .rule = LayoutRule::moves,
               .shard = shape.of_experts > 0 || shape.cut_of > 0
                            ? shard_of(shape)
                            : Shard::whole(parameter.tensor.sizes().vec()),
               .peers = holders(shape)};
    row.read = [tensor = parameter.tensor](std::vector<std::byte>& scratch) -> std::span<const std::byte> {
      if (tensor.is_cpu() && tensor.is_contiguous())
        return {static_cast<const std::byte*>(tensor.data_ptr()), tensor.nbytes()};
      const torch::Tensor host = tensor.detach().cpu().contiguous();
      scratch.resize(host.nbytes());
      if (!scratch.empty()) std::memcpy(scratch.data(), host.data_ptr(), scratch.size());
      return scratch;
    };
    row.write = [tensor = parameter.tensor](std::span<const std::byte> values) {
      if (values.empty()) return;
      const torch::NoGradGuard no_grad;
      const bool in_place = tensor.is_cpu() && tensor.is_contiguous();
      const torch::Tensor host =
          in_place ? tensor : torch::empty(tensor.sizes(), tensor.options().device(torch::kCPU));
      std::memcpy(host.data_ptr(), values.data(), values.size());
      if (!in_place) tensor.copy_(host);
    };
    out.push_back(std::move(row));
  }
  return out;
}

void check_model(const Model& model, const Checkpoint& checkpoint) {
  const auto refuse = [&](const std::string& why) {
    throw UsageError(checkpoint.where() + ": the checkpoint is of another model: " + why);
  };
  std::map<StateKey, const StateRow*> saved;
  for (const StateSource::Saved& each : checkpoint.rows()) {
    if (each.row.key.owner == kModelOwner) saved[each.row.key] = &each.row;
  }
  const std::vector<Parameter> parameters = model.parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const Parameter& p = parameters[i];
    const std::vector<std::int64_t> dims = model.shape().parameters[i].whole_dims();
    const auto found = saved.find(key_of(p));
    if (found == saved.end()) refuse("it has no '" + p.name + "'");
    const StateRow& from = *found->second;
    if (from.shard.shape != dims || from.dtype != dtype_of(p.tensor)) {
      refuse("its '" + p.name + "' is " + std::string(name_of(from.dtype)) + " " +
             text_of(Shard::whole(from.shard.shape)) + ", not " + std::string(name_of(dtype_of(p.tensor))) +
             " " + text_of(Shard::whole(dims)));
    }
  }
  ModelOptions whole = model.options();  // other stages' as well
  whole.stage = {};
  const std::size_t tensors = rank_shape(model.name(), whole).parameters.size();
  if (saved.size() != tensors)
    refuse("it has " + std::to_string(saved.size()) + " tensors, not " + std::to_string(tensors));
}

}  // namespace weft
