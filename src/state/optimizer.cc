#include "state/optimizer.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <utility>

#include "base/identity.h"
#include "base/names.h"
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

bool is_sum_of_squares(std::string_view moment) { return moment == "exp_avg_sq" || moment == "sum"; }

template <class T>
bool has_negative(std::span<const std::byte> values) {
  const std::span<const T> all(reinterpret_cast<const T*>(values.data()), values.size() / sizeof(T));
  return std::any_of(all.begin(), all.end(), [](T v) { return v < 0; });
}

StateRow row_of(const OptimizerParameter& p, const char* kind, const Peers& peers) {
  return {.key = {std::string(kOptimizerOwner), kind, p.name},
          .dtype = p.dtype,
          .rule = LayoutRule::moves,
          .shard = p.shard.shape.empty() ? Shard::whole({p.count}) : p.shard,
          .peers = peers};
}

template <class T>
T one_of(std::span<const std::byte> values) {
  T out{};
  if (values.size() != sizeof out) return -1;
  std::memcpy(&out, values.data(), sizeof out);
  return out;
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

std::uint64_t hash_of(const OptimizerOptions& o) {
  std::uint64_t hash = mix(index_of(o.name));
  for (const double value : {o.lr, o.weight_decay, o.momentum, o.dampening, o.nesterov ? 1.0 : 0.0, o.beta1,
                             o.beta2, o.eps, o.lr_decay, o.initial_accumulator})
    hash = mix(hash ^ std::bit_cast<std::uint64_t>(value));
  return hash;
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

void validate_rows(const OptimizerOptions& o) {
  validate(o);
  const auto refuse = [&](const char* what) {
    throw UsageError("optimizer " + o.name + " with " + what +
                     " moves every row of a table in every step, but only rows with a gradient are updated: "
                     "leave it at 0 for tables");
  };
  if (o.momentum != 0) refuse("momentum");
  if (o.weight_decay != 0 && o.name != "adamw") refuse("weight decay");
}

Optimizer::Optimizer(const OptimizerOptions& options, std::span<const OptimizerParameter> parameters)
    : options_(options), rule_(static_cast<Rule>(index_of(options.name))), moments_(moments_of(options)) {
  validate(options_);
  for (const OptimizerParameter& p : parameters) {
    if (p.name.empty() || !places_.emplace(p.name, num_parameters()).second) {
      throw UsageError("optimizer: parameter name '" + p.name + "' is empty or there twice");
    }
    parameters_.emplace_back();
    set_part(num_parameters() - 1, p);
  }
}

void Optimizer::set_part(int parameter, const OptimizerParameter& p) {
  if (p.count < 0 || (p.dtype != DType::float32 && p.dtype != DType::float64)) {
    throw UsageError("optimizer: parameter '" + p.name + "' has " + std::to_string(p.count) +
                     " elements of " + std::string(name_of(p.dtype)) + ", not some of float32 or float64");
  }
  if (!p.shard.shape.empty() && (!trouble_with(p.shard).empty() || p.shard.num_elements() != p.count)) {
    throw UsageError("optimizer: parameter '" + p.name + "' has " + std::to_string(p.count) +
                     " elements, which " + text_of(p.shard) + " has not");
  }
  Slot& slot = parameters_[static_cast<std::size_t>(parameter)];
  slot.info = p;
  slot.vectors.clear();
  const auto count = static_cast<std::size_t>(p.count);
  for (const Moment& moment : moments_) {
    if (p.dtype == DType::float32)
      slot.vectors.emplace_back(LargeVector<float>(count, static_cast<float>(moment.initial)));
    else
      slot.vectors.emplace_back(LargeVector<double>(count, moment.initial));
  }
}

void Optimizer::set_lr(double lr) {
  check_range(options_.name, "lr", lr, INFINITY);
  options_.lr = lr;
}

void Optimizer::set_options(const OptimizerOptions& options) {
  validate(options);
  if (options.name != options_.name || (options.momentum != 0) != (options_.momentum != 0))
    throw UsageError("optimizer " + options_.name + " becomes neither another one nor one with or without " +
                     "momentum: make a new one");
  options_ = options;
}

int Optimizer::find(const std::string& name) const {
  const auto found = places_.find(name);
  return found == places_.end() ? -1 : found->second;
}

namespace {

template <class Values, class T>
std::span<T> moment_of(std::vector<Values>& vectors, std::size_t i) {
  if (i >= vectors.size()) return {};
  return std::get<LargeVector<T>>(vectors[i]);
}

AdamStep adam_step(const OptimizerOptions& o, double lr, std::int64_t step) {
  return {.lr = lr,
          .beta1 = o.beta1,
          .beta2 = o.beta2,
          .eps = o.eps,
          .weight_decay = o.weight_decay,
          .decoupled = o.name == "adamw",
          .step = step};
}

AdagradStep adagrad_step(const OptimizerOptions& o, double lr, std::int64_t step) {
  return {.lr = lr, .lr_decay = o.lr_decay, .eps = o.eps, .weight_decay = o.weight_decay, .step = step};
}

}  // namespace

template <class T>
Optimizer::Slot& Optimizer::checked(int parameter, std::size_t values) {
  if (parameter < 0 || parameter >= num_parameters()) {
    throw UsageError("Optimizer::update: parameter " + std::to_string(parameter) + " of " +
                     std::to_string(num_parameters()));
  }
  Slot& slot = parameters_[static_cast<std::size_t>(parameter)];
  if (slot.info.dtype != dtype_of<T>() || values != static_cast<std::size_t>(slot.info.count)) {
    throw UsageError("Optimizer::update: '" + slot.info.name + "' has " + std::to_string(slot.info.count) +
                     " elements of " + std::string(name_of(slot.info.dtype)) + ", the call " +
                     std::to_string(values) + " values of " + std::string(name_of(dtype_of<T>())));
  }
  return slot;
}

template <class T>
void Optimizer::update_typed(int parameter, std::span<T> value, std::span<const T> gradient) {
  Slot& slot = checked<T>(parameter, value.size());
  if (gradient.size() != value.size()) {
    throw UsageError("Optimizer::update: '" + slot.info.name + "' has " + std::to_string(value.size()) +
                     " elements, the call " + std::to_string(gradient.size()) + " gradients");
  }
  const auto state = [&](std::size_t i) { return moment_of<Values, T>(slot.vectors, i); };
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
    case Rule::adamw:
      return adam_update(value, gradient, state(0), state(1), adam_step(o, o.lr, slot.step));
    case Rule::adagrad:
      return adagrad_update(value, gradient, state(0), adagrad_step(o, o.lr, slot.step));
  }
}

template <class T>
void Optimizer::update_rows_typed(int parameter, std::span<T> value, std::span<const T> gradient,
                                  const TableRows& rows, const At& at) {
  Slot& slot = checked<T>(parameter, value.size());
  if (gradient.size() != rows.ids.size() * rows.width) {
    throw UsageError("Optimizer::update_rows: " + std::to_string(rows.ids.size()) + " rows of " +
                     std::to_string(rows.width) + " columns of '" + slot.info.name + "', and " +
                     std::to_string(gradient.size()) + " gradients");
  }
  const auto state = [&](std::size_t i) { return moment_of<Values, T>(slot.vectors, i); };
  switch (rule_) {
    case Rule::sgd:
      return sgd_rows(value, gradient, rows, {.lr = at.lr});
    case Rule::adam:
    case Rule::adamw:
      return adam_rows(value, gradient, state(0), state(1), rows, adam_step(options_, at.lr, at.step));
    case Rule::adagrad:
      return adagrad_rows(value, gradient, state(0), rows, adagrad_step(options_, at.lr, at.step));
  }
}

void Optimizer::update(int parameter, std::span<float> value, std::span<const float> gradient) {
  update_typed(parameter, value, gradient);
}
void Optimizer::update(int parameter, std::span<double> value, std::span<const double> gradient) {
  update_typed(parameter, value, gradient);
}

void Optimizer::update_rows(int parameter, std::span<float> value, std::span<const float> gradient,
                            const TableRows& rows, const At& at) {
  update_rows_typed(parameter, value, gradient, rows, at);
}
void Optimizer::update_rows(int parameter, std::span<double> value, std::span<const double> gradient,
                            const TableRows& rows, const At& at) {
  update_rows_typed(parameter, value, gradient, rows, at);
}

// ---- rows of state ----

std::vector<Moment> moments_of(const OptimizerOptions& options) {
  switch (index_of(options.name)) {
    case 0:
      if (options.momentum == 0) return {};
      return {{"momentum_buffer", 0}};
    case 3:
      return {{"sum", options.initial_accumulator}};
    default:
      return {{"exp_avg", 0}, {"exp_avg_sq", 0}};
  }
}

LiveRow moment_row(const OptimizerParameter& p, const Moment& moment, const Peers& peers) {
  LiveRow out;
  out.row = row_of(p, moment.name, p.holders.value_or(peers));
  if (!is_sum_of_squares(moment.name)) return out;
  out.takes = [row = out.row](const Shard&, std::span<const std::byte> values) {
    if (row.dtype == DType::float32 ? has_negative<float>(values) : has_negative<double>(values))
      throw UsageError(describe(row.key) + " has a value that is negative");
    return true;
  };
  return out;
}

LiveRow step_row(const OptimizerParameter& p, std::int64_t& step, const Peers& peers) {
  LiveRow out;
  out.row = row_of(p, "step", p.counters.value_or(peers));
  out.row.dtype = DType::int64;
  out.row.rule = LayoutRule::same;
  out.row.shard = Shard::whole({});
  out.read = [&step](auto&) { return std::as_bytes(std::span(&step, 1)); };
  out.write = [&step](std::span<const std::byte> values) {
    step = values.empty() ? 0 : one_of<std::int64_t>(values);
  };
  out.takes = [name = p.name](const Shard&, std::span<const std::byte> values) {
    const auto told = one_of<std::int64_t>(values);
    if (told < 0)
      throw UsageError("the optimizer is at step " + std::to_string(told) + " for '" + name + "'");
    return true;
  };
  out.required = true;
  return out;
}

LiveRow lr_row(const OptimizerOptions& options, std::function<void(double)> set_lr, const Peers& peers) {
  LiveRow out;
  out.row = {.key = {std::string(kOptimizerOwner), "lr", options.name},
             .dtype = DType::float64,
             .rule = LayoutRule::same,
             .shard = Shard::whole({}),
             .peers = peers};
  out.read = [&options](auto&) { return std::as_bytes(std::span(&options.lr, 1)); };
  out.write = [set = std::move(set_lr)](std::span<const std::byte> values) {
    if (!values.empty()) set(one_of<double>(values));
  };
  out.takes = [](const Shard&, std::span<const std::byte> values) {
    if (!(one_of<double>(values) >= 0)) throw UsageError("the learning rate is negative");
    return true;
  };
  out.required = true;
  return out;
}

std::vector<LiveRow> Optimizer::rows(const Peers& peers) {
  std::vector<LiveRow> out{lr_row(options_, [this](double lr) { options_.lr = lr; }, peers)};
  for (Slot& slot : parameters_) {
    for (std::size_t i = 0; i < moments_.size(); ++i) {
      LiveRow row = moment_row(slot.info, moments_[i], peers);
      row.read = [&values = slot.vectors[i]](auto&) {
        return std::visit([](const auto& v) { return std::as_bytes(std::span(v)); }, values);
      };
      row.write = [&values = slot.vectors[i],
                   initial = moments_[i].initial](std::span<const std::byte> from) {
        std::visit(
            [&]<class T>(LargeVector<T>& v) {
              std::fill(v.begin(), v.end(), static_cast<T>(initial));
              if (!from.empty()) std::memcpy(v.data(), from.data(), from.size());
            },
            values);
      };
      out.push_back(std::move(row));
    }
    out.push_back(step_row(slot.info, slot.step, peers));
  }
  return out;
}

}  // namespace weft
