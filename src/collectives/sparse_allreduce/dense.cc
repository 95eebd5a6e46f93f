// The dense all-reduce as rows of this table, so that everything is compared by one measure.
//   Step 1  sum = gradient + residual; dense-bf16 rounds it to bfloat16 and keeps the error as residual
//   Step 2  all-reduce by the algorithm that the link's cost predicts to be fastest, or that was asked for
// Rounds and bytes: those of that algorithm; long vectors 2 n (P-1)/P elements of 4 or 2 bytes. Any size.
//
// `k`, codec and residual rule change nothing: nothing is dropped. dense loses only the rounding of float32
// additions. dense-bf16 conserves what the first rounding took away, but the sum itself rounds to bfloat16 at
// every addition (kernels/fold.h), and those errors are lost: no rank knows them.
//
// NaN and infinity need no message of their own: they stay in the sum, which all ranks see alike.
#include <algorithm>
#include <bit>
#include <variant>

#include "collectives/registry.h"
#include "collectives/sparse_allreduce/call.h"

namespace weft {

namespace {

bool all_finite(std::span<const float> values) {
  std::uint32_t largest = 0;
  for (const float v : values) largest = std::max(largest, magnitude_key(v));
  return largest < kInfinityKey;
}

// Of a value that is a bfloat16 already.
bfloat16 upper_half(float x) { return {static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(x) >> 16)}; }

void add_residual(const SparseCall& call, std::vector<float>& sum) {
  sum.assign(call.gradient.begin(), call.gradient.end());
  const std::span<const float> residual = call.work->residual;
  for (std::size_t i = 0; i < residual.size(); ++i) sum[i] += residual[i];
  call.spend(call.kernels->copy_byte, call.gradient.size_bytes());
  call.spend(call.kernels->add_element, residual.size());
}

Task<void> reduce(Comm comm, SparseCall call, Dense data) {
  const Shape shape{.size = comm.size(),
                    .count = data.count,
                    .element_bytes = size_of(data.dtype),
                    .node_size = comm.node_size(),
                    .micro_op_bytes = comm.micro_op_bytes()};
  const Algorithm& row = pick(Family::all_reduce, call.all_reduce, shape, comm.cost());
  AllReduceRun* const run = std::get<AllReduceRun*>(row.run);
  const std::uint64_t before = comm.bytes_sent();
  co_await run(comm, data, Reduction::sum, shape);
  const std::uint64_t bytes = comm.bytes_sent() - before;
  call.result->entry_bytes_sent += bytes;
  call.result->entries_sent += bytes / size_of(data.dtype);
}

void begin(const SparseCall& call) {
  call.result->deal = Deal(Deal::Kind::contiguous, 1, call.work->length);
  call.result->is_dense = true;
}

}  // namespace

Task<void> sparse_dense(Comm comm, SparseCall call) {
  begin(call);
  std::vector<float>& sum = call.result->dense;
  // Step 1
  auto add = [&] {
    const Stopwatch watch(call.result->select_seconds);
    add_residual(call, sum);
    return call.spent();
  };
  co_await comm.compute(add);
  // Step 2
  const Dense data(std::span<float>{sum});
  co_await reduce(comm, call, data);
  auto check = [&] {
    call.result->finite = all_finite(sum);
    call.spend(call.kernels->check_element, sum.size());
    return call.spent();
  };
  co_await comm.compute(check);
}

Task<void> sparse_dense_bf16(Comm comm, SparseCall call) {
  begin(call);
  std::vector<float>& sum = call.result->dense;
  std::vector<bfloat16> rounded(call.gradient.size());
  // Step 1
  auto round = [&] {
    const Stopwatch watch(call.result->select_seconds);
    add_residual(call, sum);
    call.spend(call.kernels->check_element + call.kernels->round_element + call.kernels->narrow_element,
               sum.size());
    if (!all_finite(sum)) {  // and must stay so: round_to_bfloat16 would make infinity a number
      std::transform(sum.begin(), sum.end(), rounded.begin(), to_bfloat16);
      return call.spent();
    }
    wire::round_to_bfloat16(sum, std::span<float>(call.work->staged));
    std::transform(sum.begin(), sum.end(), rounded.begin(), upper_half);
    return call.spent();
  };
  co_await comm.compute(round);
  // Step 2
  const Dense data(std::span<bfloat16>{rounded});
  co_await reduce(comm, call, data);
  auto widen = [&] {
    std::transform(rounded.begin(), rounded.end(), sum.begin(), [](bfloat16 x) { return to_float(x); });
    call.result->finite = all_finite(sum);
    call.spend(call.kernels->widen_element + call.kernels->check_element, sum.size());
    return call.spent();
  };
  co_await comm.compute(widen);
}

}  // namespace weft
