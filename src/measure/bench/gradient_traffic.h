// Gradient traffic that never ends, for benchmarks of what it does to others.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "weft/world.h"

namespace weft {

inline constexpr int kGradients = 4;  // all-reduces in flight
inline constexpr std::size_t kGradientBytes = std::size_t{8} << 20;

// All-reduces that follow each other: when one has ended, its continuation submits the next. Nobody waits for
// them.
class GradientTraffic {
 public:
  explicit GradientTraffic(Engine& engine);

  // All ranks together: each goes on until all have done as many, so that none is left waiting for a peer.
  // Without it they end with the engine.
  void stop(World& world);

 private:
  struct Lane {
    std::vector<float> data = std::vector<float>(kGradientBytes / sizeof(float));
    std::uint32_t submitted = 0, finished = 0;
    std::uint32_t last = 0xffff'ffffu;  // steps that all ranks do
  };
  // Continuations hold it: it outlives whoever started it, as the engine's tickets do.
  struct State {
    explicit State(Engine& e) : engine(e), comm(e.world()) {}
    bool over() const WEFT_REQUIRES(mutex) {
      if (error) return true;
      for (const Lane& lane : lanes) {
        if (lane.finished < lane.last) return false;
      }
      return true;
    }
    Engine& engine;
    Comm comm;
    Mutex mutex;
    std::condition_variable changed;
    std::vector<Lane> lanes = std::vector<Lane>(kGradients);
    bool paused WEFT_GUARDED_BY(mutex) = false;
    std::exception_ptr error WEFT_GUARDED_BY(mutex);
  };

  // REQUIRES: the step was taken from the lane (`submitted`) under the lock.
  static void submit(const std::shared_ptr<State>& state, std::size_t g, std::uint32_t step);
  static void ended(const std::shared_ptr<State>& state, std::size_t g, const Ticket& ticket);

  std::shared_ptr<State> state_;
};

}  // namespace weft
