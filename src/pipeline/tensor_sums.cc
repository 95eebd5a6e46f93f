#include "pipeline/tensor_sums.h"

#include <algorithm>
#include <utility>

#include "collectives/registry.h"
#include "transports/endpoint.h"
#include "weft/collective.h"
#include "weft/error.h"
#include "wire/bfloat16.h"

namespace weft {

namespace {

[[noreturn]] void refuse(const std::string& what) { throw UsageError("tensor parallel: " + what); }

TensorName tensor_of(const SumShape& sum, int micro_batch) {
  return {sum.gradient ? TensorName::Of::gradient : TensorName::Of::activation, sum.activation, micro_batch};
}

std::string title_of(const SumShape& sum) {
  return std::string(sum.gradient ? "sum of the gradients of " : "sum of ") + sum.activation;
}

}  // namespace

TensorSums::TensorSums(Engine& engine, const Comm& group, std::vector<SumShape> sums, Options options)
    : engine_(engine), comm_(group), sums_(std::move(sums)), options_(std::move(options)) {
  if (std::ranges::any_of(sums_, &SumShape::bf16) && options_.dtype != DType::float32)
    refuse("what is rounded to bfloat16 between these ranks is float32, not " +
           std::string(name_of(options_.dtype)));
  comm_.endpoint().add_whole_slots(comm_.group_id(), options_.first_slot, num_slots());
}

// Tokens travel, each for itself.
const LinkCost& TensorSums::cost() const { return comm_.endpoint().cost(/*whole=*/true); }

Shape TensorSums::call_of(const SumShape& sum, std::int64_t tokens) const {
  return {.size = comm_.size(),
          .count = tokens * sum.values,
          .element_bytes = size_of(wire(sum)),
          .node_size = comm_.node_size(),
          .micro_op_bytes = comm_.endpoint().micro_op_bytes(/*whole=*/true)};
}

std::uint64_t TensorSums::bytes_of(const SumShape& sum, std::int64_t tokens) const {
  const Shape call = call_of(sum, tokens);
  return choose(Family::all_reduce, call, cost()).bytes(call);
}

std::vector<PlanRow> TensorSums::rows() const {
  std::vector<PlanRow> out;
  for (std::size_t s = 0; s < sums_.size(); ++s) {
    const SumShape& sum = sums_[s];
    PlanRow row{.tensor = title_of(sum),
                .count = options_.tokens * sum.values,
                .strategy = std::string(name()),
                .group = comm_.group_id(),
                .ranks = comm_.size(),
                .scheme = "dense",
                .codec = sum.bf16 ? "bf16" : "",
                .traffic = TrafficClass::blocking,
                .slot = options_.first_slot + static_cast<std::uint32_t>(s)};
    row.bytes = static_cast<double>(bytes_of(sum, options_.tokens)) * options_.micro_batches;
    const Shape call = call_of(sum, options_.tokens);
    row.seconds = options_.micro_batches * choose(Family::all_reduce, call, cost()).seconds(call, cost());
    row.why = "of " + std::to_string(comm_.size()) + " ranks' shares, in each micro-batch";
    out.push_back(std::move(row));
  }
  return out;
}

std::vector<Exchange> TensorSums::exchanges() const {
  std::vector<Exchange> out;
  for (std::size_t s = 0; s < sums_.size(); ++s) {
    Exchange exchange{.name = title_of(sums_[s]),
                      .traffic = TrafficClass::blocking,
                      .group = comm_.group_id(),
                      .slot = options_.first_slot + static_cast<std::uint32_t>(s),
                      .codec = sums_[s].bf16 ? "bf16" : "",
                      .each_micro_batch = true};
    exchange.reads = {tensor_of(sums_[s], 0)};
    exchange.writes = exchange.reads;
    out.push_back(std::move(exchange));
  }
  return out;
}

void TensorSums::weave(Weaver& weaver) const {
  for (int m = 0; m < weaver.micro_batches(); ++m) {
    for (std::size_t s = 0; s < sums_.size(); ++s) {
      const SumShape& sum = sums_[s];
      const int exchange = static_cast<int>(s);
      if (!sum.gradient) {
        weaver.after({Work::forward, sum.block, sum.part, m}, start_of(exchange, 0, m));
        weaver.before({Work::forward, sum.block, sum.part + 1, m}, wait_of(exchange, 0, m));
        continue;
      }
      weaver.after(weaver.going_back(sum.block, sum.part, m), start_of(exchange, 0, m));
      weaver.before(weaver.going_back(sum.block, sum.part - 1, m), wait_of(exchange, 0, m));
    }
  }
}

void TensorSums::set_tokens(std::span<const std::int64_t> of_micro_batch) {
  if (std::ranges::any_of(work(), [](const Ticket& t) { return t.valid() && !t.done(); }))
    refuse("a step begins while sums of the last one are on their way");
  bytes_ = std::make_shared<Bytes>();
  walked_ += static_cast<std::uint32_t>(batches_.size());
  batches_.clear();
  for (const std::int64_t tokens : of_micro_batch)
    batches_.push_back({tokens, std::vector<Ticket>(sums_.size())});
}

void TensorSums::start(int exchange, const When& when, TensorSource& tensors) {
  if (static_cast<std::size_t>(when.micro_batch) >= batches_.size())
    refuse("micro-batch " + std::to_string(when.micro_batch) + " of a step whose tokens nobody has told");
  MicroBatch& batch = batches_[static_cast<std::size_t>(when.micro_batch)];
  if (batch.tokens == 0) return;  // on all ranks of the group
  const SumShape& sum = sums_[static_cast<std::size_t>(exchange)];
  const Dense data = tensors.tensor(tensor_of(sum, when.micro_batch));
  if (data.count != batch.tokens * sum.values || data.dtype != options_.dtype)
    refuse("'" + sum.activation + "' of micro-batch " + std::to_string(when.micro_batch) + " has " +
           std::to_string(data.count) + " values of type " + std::string(name_of(data.dtype)) +
           " instead of " + std::to_string(batch.tokens * sum.values) + " of " +
           std::string(name_of(options_.dtype)));
  const SubmitOptions how{.name = sum.gradient ? "sum of shares of gradients" : "sum of shares",
                          .traffic = TrafficClass::blocking,
                          .slot = options_.first_slot + static_cast<std::uint32_t>(exchange),
                          .step = walked_ + static_cast<std::uint32_t>(when.micro_batch)};
  batch.tickets[static_cast<std::size_t>(exchange)] =
      engine_.submit(comm_, how, [bytes = bytes_, data, rounds = sum.bf16](Comm comm) {
        return rounds ? add_up_rounded(comm, bytes, data) : add_up(comm, bytes, data);
      });
}

Task<void> TensorSums::add_up(Comm comm, std::shared_ptr<Bytes> bytes, Dense data) {
  const AllReduceOptions options;
  co_await all_reduce(comm, data, options);
  bytes->sent += comm.bytes_sent();
}

Task<void> TensorSums::add_up_rounded(Comm comm, std::shared_ptr<Bytes> bytes, Dense data) {
  const auto count = static_cast<std::size_t>(data.count);
  const Buffer memory = comm.buffer(count * sizeof(bfloat16));
  const std::span<bfloat16> rounded = memory.as<bfloat16>();
  const std::span<float> values(reinterpret_cast<float*>(data.data), count);
  auto narrow = [&] {
    wire::narrow(values, rounded);
    return comm.kernels().round_element * static_cast<double>(count);
  };
  co_await comm.compute(narrow);
  const Dense sum(rounded);
  co_await add_up(comm, bytes, sum);
  auto widen = [&] {
    wire::widen(rounded, values);
    return comm.kernels().widen_element * static_cast<double>(count);
  };
  co_await comm.compute(widen);
}

Ticket TensorSums::ticket(int exchange, const When& when) const {
  if (when.offset != 0 || static_cast<std::size_t>(when.micro_batch) >= batches_.size()) return {};
  return batches_[static_cast<std::size_t>(when.micro_batch)].tickets[static_cast<std::size_t>(exchange)];
}

std::vector<Ticket> TensorSums::work() const {
  std::vector<Ticket> out;
  for (const MicroBatch& batch : batches_) out.insert(out.end(), batch.tickets.begin(), batch.tickets.end());
  return out;
}

void TensorSums::step_end() {
  ended_ = bytes_;
  if (ended_ == nullptr) return;
  for (const MicroBatch& batch : batches_) {
    for (const SumShape& sum : sums_)
      ended_->formula += static_cast<std::int64_t>(bytes_of(sum, batch.tokens));
  }
}

}  // namespace weft
