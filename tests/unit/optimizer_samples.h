// What the tests of optimizers share: numbers, every kind of options, and two parameters with a registry.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "state/optimizer.h"
#include "state/registry.h"
#include "weft/random.h"

namespace weft::optimizer_samples {

inline constexpr int kSteps = 20;

// Of magnitude 0.5 .. 1.5, either sign, so that the tolerance below can be derived.
template <class T>
std::vector<T> numbers(std::size_t n, std::uint32_t purpose, std::uint32_t step) {
  Random random(7, purpose, step);
  std::vector<T> out(n);
  for (T& x : out) x = static_cast<T>((random.below(2) == 0 ? 1 : -1) * (0.5 + random.uniform()));
  return out;
}

// The formulas are torch's with their defaults, and with everything on; lr is 0.01 for the tolerance.
inline std::vector<OptimizerOptions> all_options() {
  std::vector<OptimizerOptions> out;
  for (const char* name : {"sgd", "adam", "adamw", "adagrad"}) {
    for (const double decay : {0.0, 0.1}) {
      OptimizerOptions o = default_options(name);
      o.lr = 0.01;
      o.weight_decay = decay;
      out.push_back(o);
      if (o.name == "sgd") {
        o.momentum = 0.9;
        out.push_back(o);
        o.nesterov = true;
        out.push_back(o);
        o.nesterov = false;
        o.dampening = 0.5;
        out.push_back(o);
      } else if (o.name == "adagrad") {
        o.lr_decay = 0.1;
        o.initial_accumulator = 0.5;
        o.eps = 0.01;
        out.push_back(o);
      } else {
        o.beta1 = 0.3;  // lerp starts from the other end
        o.beta2 = 0.9;
        o.eps = 0.01;
        out.push_back(o);
      }
    }
  }
  return out;
}

inline std::string describe(const OptimizerOptions& o) {
  return o.name + " decay " + std::to_string(o.weight_decay) + " momentum " + std::to_string(o.momentum) +
         (o.nesterov ? " nesterov" : "") + " dampening " + std::to_string(o.dampening) + " eps " +
         std::to_string(o.eps);
}

inline OptimizerOptions adagrad() { return default_options("adagrad"); }
inline OptimizerOptions adam() { return default_options("adam"); }

inline const std::vector<OptimizerParameter> kPair = {{"first", 7, DType::float32},
                                                      {"second", 33, DType::float64}};

struct Pair {
  Optimizer optimizer;
  StateRegistry registry;
  std::vector<float> first = numbers<float>(7, 1, 0);
  std::vector<double> second = numbers<double>(33, 1, 1);

  explicit Pair(const OptimizerOptions& options) : optimizer(options, kPair) {
    registry.add("optimizer",
                 {.rows = [this] { return optimizer.rows(); }, .missing = {}, .commit = {}, .roll_back = {}});
  }
  Pair(const Pair&) = delete;
  Pair& operator=(const Pair&) = delete;
  StateSnapshot save() { return registry.save(0, 1); }
  void load(const StateSnapshot& snapshot) { registry.load({&snapshot, 1}, 0, 1); }
  void run(int from, int to) {
    for (int s = from; s < to; ++s) {
      optimizer.update(0, first, numbers<float>(7, 2, static_cast<std::uint32_t>(s)));
      if (s % 2 == 0) optimizer.update(1, second, numbers<double>(33, 3, static_cast<std::uint32_t>(s)));
    }
  }
};

}  // namespace weft::optimizer_samples
