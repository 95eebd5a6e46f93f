// The optimizers of data-parallel training, without torch but with its arithmetic (kernels/optimize.h).
//
// State is owned here by parameter name; values and gradients stay the caller's. Every parameter counts its
// own steps, as in torch: one that gets no gradient in a step is simply not updated, and the parameters of a
// block can be updated as soon as their gradients are there, before others or without them.
//
// Thread: update() of different parameters may run at the same time; nothing else beside any other call.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <variant>
#include <vector>

#include "weft/dtype.h"

namespace weft {

// The initial values are torch's for SGD; those of another optimizer come from default_options(name).
struct OptimizerOptions {
  // affects results
  std::string name = "sgd";  // sgd, adam, adamw, adagrad
  double lr = 1e-3;
  double weight_decay = 0;  // adamw: decoupled; others: added to the gradient
  // sgd
  double momentum = 0;
  double dampening = 0;
  bool nesterov = false;
  // adam, adamw
  double beta1 = 0.9;
  double beta2 = 0.999;
  // adam, adamw, adagrad
  double eps = 1e-8;
  // adagrad
  double lr_decay = 0;
  double initial_accumulator = 0;
};

// torch's defaults. Throws UsageError, with the nearest name, for an unknown one.
OptimizerOptions default_options(std::string_view name);
// Throws UsageError for what torch refuses: an unknown name, a value out of range or not finite, Nesterov
// without momentum or with dampening, and momentum, dampening, nesterov, lr_decay or initial_accumulator
// other than 0 where the optimizer has none.
void validate(const OptimizerOptions& options);

struct OptimizerParameter {
  std::string name;  // unique: state is kept by it
  std::int64_t count = 0;
  DType dtype = DType::float32;  // or float64
};

// All state as plain data: what a checkpoint holds.
struct OptimizerSnapshot {
  using Values = std::variant<std::vector<float>, std::vector<double>>;  // of the parameter's type
  struct Vector {
    std::string name;  // torch's: momentum_buffer; exp_avg, exp_avg_sq; sum
    Values values;
    friend bool operator==(const Vector&, const Vector&) = default;
  };
  struct Parameter {
    std::string name;
    std::int64_t step = 0;  // updates so far; with none the vectors hold their initial values
    std::vector<Vector> vectors;
    friend bool operator==(const Parameter&, const Parameter&) = default;
  };
  std::string optimizer;
  double lr = 0;
  std::vector<Parameter> parameters;
  friend bool operator==(const OptimizerSnapshot&, const OptimizerSnapshot&) = default;
};

class Optimizer {
 public:
  // Throws UsageError for options that validate() refuses, a name that is empty or there twice, a negative
  // count, a type other than float32 and float64.
  Optimizer(const OptimizerOptions& options, std::span<const OptimizerParameter> parameters);

  const OptimizerOptions& options() const { return options_; }  // with the lr that holds now
  void set_lr(double lr);  // Throws UsageError if negative or not finite.

  int num_parameters() const { return static_cast<int>(parameters_.size()); }
  int find(const std::string& name) const;  // -1: there is none
  // REQUIRES: 0 <= parameter < num_parameters().
  const OptimizerParameter& parameter(int parameter) const { return slot(parameter).info; }
  std::int64_t step(int parameter) const { return slot(parameter).step; }  // updates so far

  // One step of one parameter, in place. Throws UsageError, and changes nothing, for an unknown parameter,
  // another length or another type. REQUIRES: no overlap.
  void update(int parameter, std::span<float> value, std::span<const float> gradient);
  void update(int parameter, std::span<double> value, std::span<const double> gradient);

  OptimizerSnapshot save() const;
  // Replaces all state and the lr; parameters may be in any order. Throws UsageError, and changes nothing,
  // for a snapshot of another optimizer or of other parameters, a vector with another name, type or length,
  // and values that are not finite or, where they are sums of squares, negative.
  void load(const OptimizerSnapshot& snapshot);

 private:
  enum class Rule : std::uint8_t { sgd, adam, adamw, adagrad };
  struct Slot {
    OptimizerParameter info;
    std::int64_t step = 0;
    std::vector<OptimizerSnapshot::Vector> vectors;
  };
  const Slot& slot(int parameter) const { return parameters_[static_cast<std::size_t>(parameter)]; }
  template <class T>
  void update_typed(int parameter, std::span<T> value, std::span<const T> gradient);
  int checked_place(const OptimizerSnapshot::Parameter& from) const;

  OptimizerOptions options_;
  Rule rule_;
  std::vector<Slot> parameters_;
  std::unordered_map<std::string, int> places_;
};

}  // namespace weft
