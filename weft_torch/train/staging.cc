#include "weft_torch/train/staging.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include <utility>

namespace weft {

torch::Tensor pinned_like(const torch::Tensor& tensor) {
  return torch::empty(tensor.sizes(), torch::TensorOptions().dtype(tensor.scalar_type()).pinned_memory(true));
}

void Staging::start(int index, const torch::Tensor& gradient, const torch::Tensor& host) {
  const torch::NoGradGuard no_grad;
  const c10::Device device = gradient.device();
  const c10::DeviceGuard guard(device);
  host.copy_(gradient, /*non_blocking=*/true);
  Copy copy{index, c10::Event(device.type())};
  copy.done.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  under_way_.push_back(std::move(copy));
}

void Staging::hand_over(bool wait, const std::function<void(int index)>& f) {
  while (!under_way_.empty() && (wait || under_way_.front().done.query())) {
    if (wait) under_way_.front().done.synchronize();
    const int index = under_way_.front().index;
    under_way_.pop_front();
    f(index);
  }
}

}  // namespace weft
