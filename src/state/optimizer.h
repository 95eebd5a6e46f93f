// The optimizers of training, without torch but with its arithmetic (kernels/optimize.h).
//
// State is kept here by parameter name and is rows of a registry (registry.h); values and gradients stay the
// caller's. Every parameter counts its
// own steps, as in torch: one that gets no gradient in a step is simply not updated, and the parameters of a
// block can be updated as soon as their gradients are there, before others or without them.
//
// Thread: update() of different parameters may run at the same time; nothing else beside any other call.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <variant>
#include <vector>

#include "base/large_vector.h"
#include "kernels/optimize.h"
#include "state/registry.h"
#include "weft/dtype.h"
#include "weft/train/optimizer_options.h"

namespace weft {

// validate(), for rows of tables: what would move rows without a gradient (momentum, and weight decay other
// than adamw's, which is of the rows that have one) is refused as well.
void validate_rows(const OptimizerOptions& options);

// Of everything that results depend on.
std::uint64_t hash_of(const OptimizerOptions& options);

struct OptimizerParameter {
  std::string name;  // unique: state is kept by it
  std::int64_t count = 0;
  DType dtype = DType::float32;   // or float64
  Shard shard;                    // of a tensor, with `count` elements; without a shape: a vector of its own
  std::optional<Peers> holders;   // who hold the same shard; none: all who have the optimizer
  std::optional<Peers> counters;  // who have it, or a part: for its number of updates; none: all as well
};

// ---- rows, the same for every maker of optimizers ----
//
//   momentum_buffer; exp_avg, exp_avg_sq; sum   moves   torch's names, of the parameter's type
//   step   same   of each parameter: updates so far; with none the vectors hold their initial values
//   lr     same   its name is the optimizer's: what another one left is not taken

inline constexpr std::string_view kOptimizerOwner = "optimizer";

// A vector that an optimizer keeps for each parameter.
struct Moment {
  const char* name = "";
  double initial = 0;
};
std::vector<Moment> moments_of(const OptimizerOptions& options);
// Whoever calls sets read and write. Sums of squares are not taken where they are negative.
LiveRow moment_row(const OptimizerParameter& parameter, const Moment& moment, const Peers& peers);
// `step` and what set_lr() changes outlive the row.
LiveRow step_row(const OptimizerParameter& parameter, std::int64_t& step, const Peers& peers);
LiveRow lr_row(const OptimizerOptions& options, std::function<void(double)> set_lr, const Peers& peers);

class Optimizer {
 public:
  // Throws UsageError for options that validate() refuses, a name that is empty or there twice, a negative
  // count, a type other than float32 and float64.
  Optimizer(const OptimizerOptions& options, std::span<const OptimizerParameter> parameters);

  const OptimizerOptions& options() const { return options_; }  // with the lr that holds now
  void set_lr(double lr);  // Throws UsageError if negative or not finite.
  // For updates to come. Throws UsageError where validate() does, and for a rule with other state.
  void set_options(const OptimizerOptions& options);

  // The parameter is another part of its tensor from now on: the same name and type. Its steps stay; its
  // vectors hold their initial values until rows of them are loaded.
  void set_part(int parameter, const OptimizerParameter& part);

  int num_parameters() const { return static_cast<int>(parameters_.size()); }
  int find(const std::string& name) const;  // -1: there is none
  // REQUIRES: 0 <= parameter < num_parameters().
  const OptimizerParameter& parameter(int parameter) const { return slot(parameter).info; }
  std::int64_t step(int parameter) const { return slot(parameter).step; }  // updates so far

  // One step of one parameter, in place. Throws UsageError, and changes nothing, for an unknown parameter,
  // another length or another type. REQUIRES: no overlap.
  void update(int parameter, std::span<float> value, std::span<const float> gradient);
  void update(int parameter, std::span<double> value, std::span<const double> gradient);

  // Some rows of a table, of rows.width columns, in place; the others and their state stay as they are
  // (kernels/optimize.h). A step may do so in several calls with the same `at`, on rows apart; count_step()
  // then counts it once. Throws UsageError as update() does. REQUIRES: validate_rows() takes the options.
  struct At {
    std::int64_t step = 1;  // from 1
    double lr = 0;
  };
  void update_rows(int parameter, std::span<float> value, std::span<const float> gradient,
                   const TableRows& rows, const At& at);
  void update_rows(int parameter, std::span<double> value, std::span<const double> gradient,
                   const TableRows& rows, const At& at);
  void count_step(int parameter) { ++parameters_[static_cast<std::size_t>(parameter)].step; }

  // All state and the lr. `peers`: those that hold the same shards. The rows' accesses live as long as this.
  std::vector<LiveRow> rows(const Peers& peers = {});

 private:
  enum class Rule : std::uint8_t { sgd, adam, adamw, adagrad };
  using Values = std::variant<LargeVector<float>, LargeVector<double>>;  // of the parameter's type
  struct Slot {
    OptimizerParameter info;
    std::int64_t step = 0;
    std::vector<Values> vectors;  // of each moment
  };
  const Slot& slot(int parameter) const { return parameters_[static_cast<std::size_t>(parameter)]; }
  template <class T>
  Slot& checked(int parameter, std::size_t values);
  template <class T>
  void update_typed(int parameter, std::span<T> value, std::span<const T> gradient);
  template <class T>
  void update_rows_typed(int parameter, std::span<T> value, std::span<const T> gradient,
                         const TableRows& rows, const At& at);

  OptimizerOptions options_;
  Rule rule_;
  std::vector<Moment> moments_;
  std::vector<Slot> parameters_;
  std::unordered_map<std::string, int> places_;
};

}  // namespace weft
