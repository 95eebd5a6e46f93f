#include "weft_torch/train/snapshot.h"

#include <torch/torch.h>

#include <cstring>
#include <map>

#include "weft/error.h"

namespace weft {

namespace {

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + "]";
}

DType dtype_of(const torch::Tensor& tensor) {
  return tensor.scalar_type() == torch::kFloat64 ? DType::float64 : DType::float32;
}

}  // namespace

void save_state(const Model& model, Replica& replica, TrainingSnapshot& snapshot) {
  for (const Parameter& parameter : model.parameters()) {
    const torch::Tensor tensor = parameter.tensor.detach().cpu();  // itself, unless it is on a GPU
    TrainingSnapshot::Tensor out{
        .name = parameter.name, .dtype = dtype_of(tensor), .shape = tensor.sizes().vec(), .bytes = {}};
    out.bytes.resize(tensor.nbytes());
    std::memcpy(out.bytes.data(), tensor.data_ptr(), out.bytes.size());
    snapshot.model.push_back(std::move(out));
  }
  snapshot.optimizer = replica.save_optimizer();
  snapshot.state = replica.parallel().save();
}

void load_model(const Model& model, const TrainingSnapshot& snapshot, const std::string& where) {
  const auto refuse = [&](const std::string& why) {
    throw UsageError(where + ": the checkpoint is of another model: " + why);
  };
  std::map<std::string, const TrainingSnapshot::Tensor*> saved;
  for (const TrainingSnapshot::Tensor& tensor : snapshot.model) saved[tensor.name] = &tensor;
  const std::vector<Parameter> parameters = model.parameters();
  for (const Parameter& p : parameters) {
    const auto found = saved.find(p.name);
    if (found == saved.end()) refuse("it has no '" + p.name + "'");
    const TrainingSnapshot::Tensor& from = *found->second;
    if (from.shape != p.tensor.sizes().vec() || from.dtype != dtype_of(p.tensor)) {
      refuse("its '" + p.name + "' is " + std::string(name_of(from.dtype)) + " " + shape_text(from.shape) +
             ", not " + std::string(name_of(dtype_of(p.tensor))) + " " + shape_text(p.tensor.sizes().vec()));
    }
  }
  if (saved.size() != parameters.size()) {
    refuse("it has " + std::to_string(saved.size()) + " tensors, not " + std::to_string(parameters.size()));
  }
  const torch::NoGradGuard no_grad;
  for (const Parameter& p : parameters) {
    const torch::Tensor host = p.tensor.is_cpu() ? p.tensor : torch::empty_like(p.tensor, torch::kCPU);
    std::memcpy(host.data_ptr(), saved.at(p.name)->bytes.data(), host.nbytes());
    if (!p.tensor.is_cpu()) p.tensor.copy_(host);
  }
}

}  // namespace weft
