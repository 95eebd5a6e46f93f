// What tensor-parallel ranks add up between parts of a model: shares of activations in forward, shares of gradients
// in backward (step/tensor.h says which). Every sum is waited for by the very next part, so it goes before
// everything that has slack; all ranks get the same bits.
//
// Bytes of a rank, of each sum and micro-batch: those of an all-reduce of [tokens, values].
//
// Sums of a shape that says so (SumShape::bf16) travel as bfloat16: every rank's share is rounded to nearest even, every
// addition rounds again (kernels/fold.h), and the sum is float32 again where it arrived, the same bits on all ranks.
// What rounding takes away is lost, as between stages.
//
// Thread: one at a time, that of the driver. Memory: the driver's, in place, until the ticket is done.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "step/strategy.h"
#include "weft/train/shape.h"

namespace weft {

struct Shape;  // collectives/registry.h

class TensorSums final : public Strategy {
 public:
  struct Options {
    // equal on all ranks of the group
    std::string name = "tensor";
    DType dtype = DType::float32;
    // affects speed only
    int micro_batches = 0;  // of a step, and tokens of each, for what rows say; 0: not known
    std::int64_t tokens = 0;
    std::uint32_t first_slot = 0;  // takes num_slots()
  };
  TensorSums(Engine& engine, const Comm& group, std::vector<SumShape> sums, Options options);

  std::string_view name() const override { return options_.name; }
  const Comm& group() const override { return comm_; }
  std::uint32_t num_slots() const override { return static_cast<std::uint32_t>(sums_.size()); }
  std::vector<PlanRow> rows() const override;
  std::vector<Exchange> exchanges() const override;
  void weave(Weaver& weaver) const override;
  void start(int exchange, const When& when, TensorSource& tensors) override;
  Ticket ticket(int exchange, const When& when) const override;
  std::vector<Ticket> work() const override;
  void step_end() override;
  StepResult verdict() override { return {.committed = true, .step = 0, .bad = {}, .text = {}}; }
  void close(bool, double) override { closed_ = ended_; }

  // Tokens of each micro-batch of the step, or of the evaluation, that is walked next: the same on all ranks of
  // the group. Throws UsageError while a sum is under way.
  void set_tokens(std::span<const std::int64_t> of_micro_batch);
  const std::vector<SumShape>& sums() const { return sums_; }

  // Payload of this rank in the step that was committed or rolled back last, and of the busiest rank by formula.
  std::uint64_t step_bytes() const { return closed_ == nullptr ? 0 : closed_->sent.load(); }
  std::int64_t formula_bytes() const { return closed_ == nullptr ? 0 : closed_->formula; }

 private:
  struct Bytes {  // of a step
    std::atomic<std::uint64_t> sent = 0;
    std::int64_t formula = 0;
  };
  struct MicroBatch {
    std::int64_t tokens = 0;
    std::vector<Ticket> tickets;  // of each sum
  };
  const LinkCost& cost() const;
  Shape call_of(const SumShape& sum, std::int64_t tokens) const;  // of the all-reduce
  std::uint64_t bytes_of(const SumShape& sum, std::int64_t tokens) const;
  DType wire(const SumShape& sum) const { return sum.bf16 ? DType::bfloat16 : options_.dtype; }
  static Task<void> add_up(Comm comm, std::shared_ptr<Bytes> bytes, Dense data);
  static Task<void> add_up_rounded(Comm comm, std::shared_ptr<Bytes> bytes, Dense data);

  Engine& engine_;
  Comm comm_;
  std::vector<SumShape> sums_;
  Options options_;
  std::vector<MicroBatch> batches_;
  std::uint32_t walked_ = 0;  // micro-batches before those of this step
  std::shared_ptr<Bytes> bytes_, ended_, closed_;
};

}  // namespace weft
