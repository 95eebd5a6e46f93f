// Gradients of a GPU on their way to the engine, which reads host memory: each is copied to pinned memory on
// the stream that made it, and handed over when that copy is done. Nobody waits for the GPU while backward
// still has something to launch.
//
// Nothing here needs CUDA to be there when weft is built: streams and events are those of c10.
//
// Thread: one at a time.
#pragma once

#include <c10/core/Event.h>
#include <torch/types.h>

#include <deque>
#include <functional>

namespace weft {

// Pinned, of the tensor's shape and type.
torch::Tensor pinned_like(const torch::Tensor& tensor);

class Staging {
 public:
  // REQUIRES: `host` is pinned_like(gradient), and nobody else writes it until it was handed over.
  void start(int index, const torch::Tensor& gradient, const torch::Tensor& host);
  // f(index) for those whose copy is done, in the order of start(); with `wait`, for all of them.
  void hand_over(bool wait, const std::function<void(int index)>& f);

 private:
  struct Copy {
    int index;
    c10::Event done;
  };
  std::deque<Copy> under_way_;
};

}  // namespace weft
