// What the losses of routers need of all ranks. A gate learns from two losses of its own: one that rises where
// some experts are chosen more often than others, one that keeps its numbers small.
//
//   balance   E sum over experts of f_e m_e; f_e: its share of all tokens' choices, dropped ones too, from
//             which nothing is learned; m_e: the mean over all tokens of its probability
//   z         the mean over all tokens of (log of the sum of exp of the logits)^2
//
// "All" is all ranks' tokens of a micro-batch: the losses do not depend on how tokens and experts are laid
// out. Both are means over the layers' sums and over the micro-batches of a step. f_e and m_e are not known in
// forward, and need not be: the sums of all ranks come while it goes on, and are awaited when the gate's
// backward begins. They cost 2 E + 2 values a layer and micro-batch.
//
// A gate gives router(): [E] sums of probabilities, [1] of squared logarithms, [E] choices, [1] tokens.
//
// Thread: one at a time, that of the driver. Memory: it outlives its operations.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "step/strategy.h"
#include "weft/train/expert_options.h"
#include "weft/train/shape.h"

namespace weft {

// Values that a gate gives.
constexpr std::int64_t router_values(int experts) { return 2 * std::int64_t{experts} + 2; }

class RouterSums final : public Strategy {
 public:
  struct Options {
    std::string name = "router";
    ExpertOptions experts;
    std::uint32_t first_slot = 0;  // takes num_slots()
    std::uint32_t first_step = 0;  // number of the first micro-batch, in identities
  };
  RouterSums(Engine& engine, const Comm& world, std::vector<ExpertShape> layers, Options options);

  std::string_view name() const override { return options_.name; }
  const Comm& group() const override { return comm_; }
  std::uint32_t num_slots() const override { return static_cast<std::uint32_t>(layers_.size()); }
  std::vector<PlanRow> rows() const override;
  std::vector<Exchange> exchanges() const override;
  void weave(Weaver& weaver) const override;
  void start(int exchange, const When& when, TensorSource& tensors) override;
  Ticket ticket(int exchange, const When& when) const override;
  std::vector<Ticket> work() const override;
  StepResult verdict() override { return {.committed = true, .step = 0, .bad = {}, .text = {}}; }
  void close(bool, double) override {}

  // Of the step that is walked next; the same on all ranks. Throws UsageError while something is under way.
  void set_micro_batches(int count);

  // The gradient of the losses, of what this rank's gate gave. Gradients are divided by the number of ranks
  // when they are summed, so it counts that many times. REQUIRES: it was awaited.
  std::vector<double> gradient(int layer, int micro_batch) const;
  // The losses with their weights, of the micro-batches of the step so far: of all ranks.
  double loss() const;
  // Choices of each expert by all ranks, in all micro-batches of the step so far: dropped ones too.
  std::vector<double> chosen(int layer) const;
  // Of them, the most over an even share; 0: there was none.
  double load(int layer) const;

 private:
  struct Sums {
    std::vector<double> values;
    Ticket ticket;
  };
  const Sums& sums(int layer, int micro_batch) const {
    return sums_.at(static_cast<std::size_t>(micro_batch))[static_cast<std::size_t>(layer)];
  }
  double tokens(const Sums& sums) const { return sums.values.back(); }

  Engine& engine_;
  Comm comm_;
  std::vector<ExpertShape> layers_;
  Options options_;
  std::vector<std::vector<Sums>> sums_;  // of each micro-batch and layer
  std::uint32_t walked_ = 0;             // micro-batches before those of this step
};

}  // namespace weft
