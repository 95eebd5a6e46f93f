// The optimizers of training, by name.
#pragma once

#include <string>
#include <string_view>

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

}  // namespace weft
