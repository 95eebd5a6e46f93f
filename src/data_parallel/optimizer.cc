#include "data_parallel/optimizer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>

#include "base/names.h"
#include "kernels/optimize.h"
#include "weft/error.h"

namespace weft {

namespace {

constexpr std::array<std::string_view, 4> kNames = {"sgd", "adam", "adamw", "adagrad"};  // Rule's order

std::size_t index_of(std::string_view name) {
  const auto found = std::find(kNames.begin(), kNames.end(), name);
  if (found == kNames.end()) throw UsageError(unknown_name("optimizer", name, kNames));
  return static_cast<std::size_t>(found - kNames.begin());
}

void check_range(const std::string& optimizer, const char* field, double value, double below) {
  if (value >= 0 && value < below) return;  // neither holds for NaN
  throw UsageError("optimizer " + optimizer + ": " + field + " is " + std::to_string(value) +
                   ", not finite, at least 0" + (below == 1 ? " and below 1" : ""));
}

void check_unused(const OptimizerOptions& o, const char* field, double value) {
  if (value == 0) return;
  throw UsageError("optimizer " + o.name + " has no " + field + ": leave it at 0");
}

OptimizerSnapshot::Vector make_vector(const char* name, const OptimizerParameter& p, double value) {
  const auto n = static_cast<std::size_t>(p.count);
  if (p.dtype == DType::float32) return {name, std::vector<float>(n, static_cast<float>(value))};
  return {name, std::vector<double>(n, value)};
}

bool is_sum_of_squares(std::string_view vector) { return vector == "exp_avg_sq" || vector == "sum"; }

void check_values(const std::string& parameter, const OptimizerSnapshot::Vector& v) {
  const bool positive = is_sum_of_squares(v.name);
  const bool sound = std::visit(
      [&](const auto& values) {
        return std::all_of(values.begin(), values.end(),
                           [&](auto x) { return std::isfinite(x) && (!positive || x >= 0); });
      },
      v.values);
  if (sound) return;
  throw UsageError("optimizer: " + v.name + " of '" + parameter + "' in the snapshot is not finite" +
                   (positive ? " or is negative" : ""));
}

std::size_t length_of(const OptimizerSnapshot::Vector& v) {
  return std::visit([](const auto& values) { return values.size(); }, v.values);
}

}  // namespace

OptimizerOptions default_options(std::string_view name) {
  OptimizerOptions options{.name = std::string(kNames[index_of(name)])};
  if (name == "adamw") options.weight_decay = 1e-2;
  if (name == "adagrad") {
    options.lr = 1e-2;
    options.eps = 1e-10;
  }
  return options;
}

void validate(const OptimizerOptions& o) {
  index_of(o.name);
  check_range(o.name, "lr", o.lr, INFINITY);
  check_range(o.name, "weight_decay", o.weight_decay, INFINITY);
  check_range(o.name, "eps", o.eps, INFINITY);
  check_range(o.name, "beta1", o.beta1, 1);
  check_range(o.name, "beta2", o.beta2, 1);
  check_range(o.name, "momentum", o.momentum, INFINITY);
  check_range(o.name, "lr_decay", o.lr_decay, INFINITY);
  check_range(o.name, "initial_accumulator", o.initial_accumulator, INFINITY);
  if (!std::isfinite(o.dampening)) throw UsageError("optimizer " + o.name + ": dampening is not finite");
  if (o.name != "sgd") {
    check_unused(o, "momentum", o.momentum);
    check_unused(o, "dampening", o.dampening);
    check_unused(o, "nesterov", o.nesterov ? 1 : 0);
  }
  if (o.name != "adagrad") {
    check_unused(o, "lr_decay", o.lr_decay);
    check_unused(o, "initial_accumulator", o.initial_accumulator);
  }
  if (o.nesterov && (o.momentum == 0 || o.dampening != 0)) {
    throw UsageError("optimizer sgd: nesterov needs a momentum above 0 and no dampening");
  }
}

Optimizer::Optimizer(const OptimizerOptions& options, std::span<const OptimizerParameter> parameters)
    : options_(options), rule_(static_cast<Rule>(index_of(options.name))) {
  validate(options_);
  for (const OptimizerParameter& p : parameters) {
    if (p.name.empty() || !places_.emplace(p.name, num_parameters()).second) {
      throw UsageError("optimizer: parameter name '" + p.name + "' is empty or there twice");
    }
    if (p.count < 0 || (p.dtype != DType::float32 && p.dtype != DType::float64)) {
      throw UsageError("optimizer: parameter '" + p.name + "' has " + std::to_string(p.count) +
                       " elements of " + std::string(name_of(p.dtype)) + ", not some of float32 or float64");
    }
    Slot& slot = parameters_.emplace_back(Slot{.info = p});
    switch (rule_) {
      case Rule::sgd:
        if (options_.momentum != 0) slot.vectors.push_back(make_vector("momentum_buffer", p, 0));
        break;
      case Rule::adam:
      case Rule::adamw:
        slot.vectors.push_back(make_vector("exp_avg", p, 0));
        slot.vectors.push_back(make_vector("exp_avg_sq", p, 0));
        break;
      case Rule::adagrad:
        slot.vectors.push_back(make_vector("sum", p, options_.initial_accumulator));
        break;
    }
  }
}

void Optimizer::set_lr(double lr) {
  check_range(options_.name, "lr", lr, INFINITY);
  options_.lr = lr;
}

int Optimizer::find(const std::string& name) const {
  const auto found = places_.find(name);
  return found == places_.end() ? -1 : found->second;
}

template <class T>
void Optimizer::update_typed(int parameter, std::span<T> value, std::span<const T> gradient) {
  if (parameter < 0 || parameter >= num_parameters()) {
    throw UsageError("Optimizer::update: parameter " + std::to_string(parameter) + " of " +
                     std::to_string(num_parameters()));
  }
  Slot& slot = parameters_[static_cast<std::size_t>(parameter)];
  const auto count = static_cast<std::size_t>(slot.info.count);
  if (slot.info.dtype != dtype_of<T>() || value.size() != count || gradient.size() != count) {
    throw UsageError("Optimizer::update: '" + slot.info.name + "' has " + std::to_string(count) +
                     " elements of " + std::string(name_of(slot.info.dtype)) + ", the call " +
                     std::to_string(value.size()) + " values and " + std::to_string(gradient.size()) +
                     " gradients of " + std::string(name_of(dtype_of<T>())));
  }
  const auto state = [&](std::size_t i) -> std::span<T> {
    if (i >= slot.vectors.size()) return {};
    return std::get<std::vector<T>>(slot.vectors[i].values);
  };
  const OptimizerOptions& o = options_;
  ++slot.step;
  switch (rule_) {
    case Rule::sgd: {
      const SgdStep step{.lr = o.lr,
                         .momentum = o.momentum,
                         .dampening = o.dampening,
                         .weight_decay = o.weight_decay,
                         .nesterov = o.nesterov,
                         .first = slot.step == 1};
      return sgd_update(value, gradient, state(0), step);
    }
    case Rule::adam:
    case Rule::adamw: {
      const AdamStep step{.lr = o.lr,
                          .beta1 = o.beta1,
                          .beta2 = o.beta2,
                          .eps = o.eps,
                          .weight_decay = o.weight_decay,
                          .decoupled = rule_ == Rule::adamw,
                          .step = slot.step};
      return adam_update(value, gradient, state(0), state(1), step);
    }
    case Rule::adagrad: {
      const AdagradStep step{.lr = o.lr,
                             .lr_decay = o.lr_decay,
                             .eps = o.eps,
                             .weight_decay = o.weight_decay,
                             .step = slot.step};
      return adagrad_update(value, gradient, state(0), step);
    }
  }
}

void Optimizer::update(int parameter, std::span<float> value, std::span<const float> gradient) {
  update_typed(parameter, value, gradient);
}
void Optimizer::update(int parameter, std::span<double> value, std::span<const double> gradient) {
  update_typed(parameter, value, gradient);
}

OptimizerSnapshot Optimizer::save() const {
  OptimizerSnapshot out{.optimizer = options_.name, .lr = options_.lr, .parameters = {}};
  for (const Slot& s : parameters_) {
    out.parameters.push_back({.name = s.info.name, .step = s.step, .vectors = s.vectors});
  }
  return out;
}

int Optimizer::checked_place(const OptimizerSnapshot::Parameter& from) const {
  const int place = find(from.name);
  if (place < 0)
    throw UsageError("optimizer: the snapshot's parameter '" + from.name + "' is not known here");
  if (from.step < 0) {
    throw UsageError("optimizer: '" + from.name + "' is at step " + std::to_string(from.step) +
                     " in the snapshot");
  }
  const Slot& here = slot(place);
  if (from.vectors.size() != here.vectors.size()) {
    throw UsageError("optimizer: '" + from.name + "' has " + std::to_string(from.vectors.size()) +
                     " vectors in the snapshot, " + std::to_string(here.vectors.size()) + " here");
  }
  for (std::size_t i = 0; i < here.vectors.size(); ++i) {
    const OptimizerSnapshot::Vector& v = from.vectors[i];
    const OptimizerSnapshot::Vector& mine = here.vectors[i];
    if (v.name != mine.name || v.values.index() != mine.values.index() || length_of(v) != length_of(mine)) {
      throw UsageError("optimizer: '" + from.name + "' has " + std::to_string(length_of(v)) +
                       " elements of '" + v.name + "' in the snapshot, " + std::to_string(length_of(mine)) +
                       " of '" + mine.name + "' (" + std::string(name_of(here.info.dtype)) + ") here");
    }
    check_values(from.name, v);
  }
  return place;
}

void Optimizer::load(const OptimizerSnapshot& snapshot) {
  if (snapshot.optimizer != options_.name) {
    throw UsageError("optimizer: a snapshot of '" + snapshot.optimizer + "' does not load into " +
                     options_.name);
  }
  check_range(options_.name, "the snapshot's lr", snapshot.lr, INFINITY);
  if (snapshot.parameters.size() != parameters_.size()) {
    throw UsageError("optimizer: the snapshot has " + std::to_string(snapshot.parameters.size()) +
                     " parameters, not " + std::to_string(parameters_.size()));
  }
  // Copied first and swapped last: if memory runs out, nothing has changed.
  std::vector<Slot> next(parameters_.size());
  for (const OptimizerSnapshot::Parameter& from : snapshot.parameters) {
    const int place = checked_place(from);
    Slot& to = next[static_cast<std::size_t>(place)];
    if (!to.info.name.empty()) {
      throw UsageError("optimizer: the snapshot has '" + from.name + "' twice");
    }
    to = {.info = slot(place).info, .step = from.step, .vectors = from.vectors};
  }
  parameters_.swap(next);
  options_.lr = snapshot.lr;
}

}  // namespace weft
