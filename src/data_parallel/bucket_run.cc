#include "data_parallel/bucket_run.h"

#include <bit>
#include <cmath>
#include <limits>
#include <type_traits>

#include "collectives/dense/finish.h"
#include "collectives/registry.h"
#include "data_parallel/quotas.h"
#include "kernels/optimize.h"
#include "kernels/select.h"
#include "weft/collective.h"

namespace weft {

namespace {

// Above the hops of every sparse all-reduce (a ring has 2 size).
std::uint32_t names_hop(int size) { return 8 * static_cast<std::uint32_t>(size) + 256; }
// Above the hops of every dense all-reduce, below those that name who is to blame by as many.
std::uint32_t second_hop(int size) { return names_hop(size) / 2; }

template <class T>
using Bits = std::conditional_t<sizeof(T) == sizeof(std::uint32_t), std::uint32_t, std::uint64_t>;

// Not 0 for infinity and NaN. Integers, and no branch: a loop over it keeps up with the memory.
template <class T>
Bits<T> not_finite(T value) {
  constexpr auto exponent = std::bit_cast<Bits<T>>(std::numeric_limits<T>::infinity());
  return (std::bit_cast<Bits<T>>(value) & exponent) == exponent ? ~Bits<T>{0} : Bits<T>{0};
}

template <class T>
bool all_finite(std::span<const T> values) {
  Bits<T> bad = 0;
  for (const T value : values) bad |= not_finite(value);
  return bad == 0;
}

// 0: all finite. A vector is to blame with its residual: their sum is what was put in.
BadKind kind_of(bool nan) { return nan ? BadKind::nan : BadKind::infinity; }

std::byte blame(std::span<const double> gradient) {
  if (all_finite(gradient)) return std::byte{0};
  bool infinite = false;
  for (const double value : gradient) {
    if (std::isnan(value)) return static_cast<std::byte>(BadKind::nan);
    infinite |= std::isinf(value);
  }
  return infinite ? static_cast<std::byte>(BadKind::infinity) : std::byte{0};
}

std::byte blame(std::span<const float> gradient, std::span<const float> residual) {
  if (residual.empty() && all_finite(gradient)) return std::byte{0};
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    const float sum = residual.empty() ? gradient[i] : gradient[i] + residual[i];
    largest = std::max(largest, magnitude_key(sum));
  }
  if (largest < kInfinityKey) return std::byte{0};
  return static_cast<std::byte>(kind_of(largest > kInfinityKey));
}

// All ranks know that the result is not finite, so all of them come here.
Task<void> name_blamed(Comm comm, BucketRun* run) {
  auto find = [run, &comm] { return run->find_blame(comm); };
  co_await comm.compute(find);
  const Dense blamed(std::span<std::byte>{run->blamed});
  const Comm apart = comm.hops_from(names_hop(comm.size()));
  co_await all_gather(apart, blamed);
}

Task<void> sum_factors(Comm comm, BucketRun* run, Dense data) {
  const std::uint64_t before = comm.bytes_sent();
  const AllReduceOptions options{.algorithm = run->order};
  co_await all_reduce(comm, data, options);
  run->result.contents().entry_bytes_sent += comm.bytes_sent() - before;
}

}  // namespace

void BucketRun::scale_by(double factor) {
  if (wide) {
    for (double& value : values.all(bucket->count)) value *= factor;
    return;
  }
  const std::span<float> scaled = buffer.all(bucket->count);  // (which may be the gradient's own memory)
  std::transform(gradient.begin(), gradient.end(), scaled.begin(),
                 [f = static_cast<float>(factor)](float value) { return value * f; });
  gradient = scaled;
}

// What is summed from here on is the velocity.
double BucketRun::accelerate(const KernelCosts& kernels) {
  velocity->has_staged = false;
  velocity->staged.resize(gradient.size());
  accumulate_velocity(momentum, velocity->committed, gradient, velocity->staged);
  gradient = velocity->staged;
  return kernels.velocity_element * static_cast<double>(gradient.size());
}

// REQUIRES: the result is finite.
double BucketRun::settle(const KernelCosts& kernels) {
  double spent = 0;
  if (measures) {
    measure();
    spent += kernels.measure_entry * static_cast<double>(magnitudes.size());
  }
  if (velocity == nullptr) return spent;
  std::size_t masked = 0;
  if (masks) {
    result.for_each([this, &masked](std::int64_t i, float) {
      velocity->staged[static_cast<std::size_t>(i)] = 0;
      ++masked;
    });
  }
  velocity->has_staged = true;
  return spent + kernels.scatter_entry * static_cast<double>(masked);
}

void BucketRun::measure() {
  magnitudes.clear();
  result.for_each([this](std::int64_t, float value) { magnitudes.push_back(std::abs(value)); });
  measured = scale_of(magnitudes, bucket->count);
}

double BucketRun::find_blame(const Comm& comm) {
  const auto rank = static_cast<std::size_t>(comm.rank());
  const std::size_t pieces = bucket->pieces.size();
  blamed.assign(pieces * static_cast<std::size_t>(comm.size()), std::byte{0});
  for (std::size_t i = 0; i < pieces; ++i) {
    const BucketPiece& piece = bucket->pieces[i];
    const auto first = static_cast<std::size_t>(piece.first);
    const auto count = static_cast<std::size_t>(count_of(piece));
    if (wide) {
      blamed[rank * pieces + i] = blame(part<double>(piece));
      continue;
    }
    const std::span<const float> residual = state->residual();
    blamed[rank * pieces + i] =
        blame(gradient.subspan(first, count), residual.empty() ? residual : residual.subspan(first, count));
  }
  return (wide ? 2 : 1) * comm.kernels().add_element * static_cast<double>(bucket->count);
}

// What a plan before this one left behind goes out with the gradient; nothing is left behind this time.
template <class T>
void BucketRun::begin_in_place() {
  SparseWork& work = state->work();
  const std::span<T> sum = memory<T>().all(bucket->count);
  for (std::size_t i = 0; i < work.residual.size(); ++i) sum[i] += static_cast<T>(work.residual[i]);
  work.has_staged = false;
  work.staged.clear();
  work.stage_controllers();
  result.contents() = SparseResult::Contents{.deal = result.contents().deal, .blocks = {}, .dense = {}};
}

namespace {

// Is everything finite, and the average where the sum was.
template <class T>
class Average final : public Finish {
 public:
  Average(double divisor, const KernelCosts& kernels)
      : divisor_(static_cast<T>(divisor)), element_(kernels.check_element * sizeof(T) / sizeof(float)) {}

  double sum(Dense piece) override {
    Bits<T> bad = 0;
    for (T& value : values(piece)) {
      value /= divisor_;
      bad |= not_finite(value);  // what the others will see, too
    }
    bad_ |= bad;
    return spent(piece);
  }
  double result(Dense piece) override {
    if (!all_finite(std::span<const T>(values(piece)))) bad_ = 1;
    return spent(piece);
  }
  bool finite() const { return bad_ == 0; }

 private:
  static std::span<T> values(const Dense& piece) {
    return {reinterpret_cast<T*>(piece.data), static_cast<std::size_t>(piece.count)};
  }
  double spent(const Dense& piece) const { return element_ * static_cast<double>(piece.count); }

  T divisor_;
  double element_;
  Bits<T> bad_ = 0;
};

}  // namespace

namespace {

// Of a sum in two steps: its groups lie differently in the nodes, and all ranks must predict the same.
std::string_view flat_order(const Comm& group, const Dense& sum, std::string_view order) {
  const Shape call{.size = group.size(),
                   .count = sum.count,
                   .element_bytes = size_of(sum.dtype),
                   .micro_op_bytes = group.micro_op_bytes()};
  return pick(Family::all_reduce, order, call, group.cost()).name;
}

}  // namespace

template <class T>
Task<void> BucketRun::reduce_in_place(Comm comm, BucketRun* run) {
  auto begin = [run, &comm] {
    const double spent = run->find_blame(comm);  // before the sum replaces the gradient
    run->begin_in_place<T>();
    return spent;
  };
  co_await comm.compute(begin);
  const std::uint64_t before = comm.bytes_sent();
  const Dense sum(run->memory<T>().all(run->bucket->count));
  Average<T> average(run->divisor, comm.kernels());
  AllReduceOptions options{.algorithm = run->order};
  Comm last = comm;
  if (run->row.valid()) {
    const Comm row = run->row.bound(comm.operation());
    options.algorithm = flat_order(row, sum, run->order);
    co_await all_reduce(row, sum, options);
    last = run->column.bound(comm.operation());
    options.algorithm = flat_order(last, sum, run->order);
  }
  co_await all_reduce_and_finish(last, sum, &average, options);
  run->result.contents().entry_bytes_sent = comm.bytes_sent() - before;
  run->result.contents().finite = run->state->work().has_staged = average.finite();
  if (run->finite()) co_return;
  const Dense blamed(std::span<std::byte>{run->blamed});
  const Comm apart = comm.hops_from(names_hop(comm.size()));
  co_await all_gather(apart, blamed);
}
template Task<void> BucketRun::reduce_in_place<float>(Comm comm, BucketRun* run);
template Task<void> BucketRun::reduce_in_place<double>(Comm comm, BucketRun* run);

Task<void> BucketRun::reduce(Comm comm, BucketRun* run) {
  auto accelerate = [run, &comm] { return run->accelerate(comm.kernels()); };
  if (run->velocity != nullptr) co_await comm.compute(accelerate);
  co_await sparse_all_reduce(comm, run->gradient, *run->state, run->result, run->options);
  if (run->result.finite()) {
    auto settle = [run, &comm] { return run->settle(comm.kernels()); };
    if (run->measures || run->velocity != nullptr) co_await comm.compute(settle);
    co_return;
  }
  co_await name_blamed(comm, run);
}

void BucketRun::begin_low_rank() {
  SparseWork& work = state->work();
  SparseResult::Contents& contents = result.contents();
  contents = SparseResult::Contents{.deal = Deal(Deal::Kind::contiguous, 1, work.length),
                                    .blocks = {},
                                    .is_dense = true,
                                    .dense = std::move(contents.dense),
                                    .finite = false};
  const Stopwatch watch(contents.select_seconds);
  work.has_staged = false;
  work.staged.resize(gradient.size());
  low_rank->begin(gradient, work.residual, work.staged, step);
}

void BucketRun::finish_low_rank(int size) {
  SparseWork& work = state->work();
  SparseResult::Contents& contents = result.contents();
  const Stopwatch watch(contents.select_seconds);
  contents.dense.resize(gradient.size());
  contents.finite = low_rank->finish(work.staged, contents.dense, size);
  if (forgets) std::ranges::fill(work.staged, 0.0F);
  work.stage_controllers();
  work.has_staged = contents.finite;
}

// The steps of compressors/low_rank.h, with the two sums between them.
Task<void> BucketRun::reduce_low_rank(Comm comm, BucketRun* run) {
  SparseResult::Contents& contents = run->result.contents();
  // Step 1
  auto begin = [run, &comm] {
    run->begin_low_rank();
    return run->low_rank->begin_seconds(comm.kernels(), !run->state->residual().empty());
  };
  co_await comm.compute(begin);
  const Dense first = run->low_rank->first_sum();
  co_await sum_factors(comm, run, first);
  // Step 2
  bool finite = false;
  auto project = [run, &comm, &contents, &finite] {
    const Stopwatch watch(contents.select_seconds);
    finite = run->low_rank->project(run->state->work().staged);
    return run->low_rank->project_seconds(comm.kernels());
  };
  co_await comm.compute(project);
  if (finite) {
    const Comm apart = comm.hops_from(second_hop(comm.size()));
    const Dense second = run->low_rank->second_sum();
    if (second.count > 0) co_await sum_factors(apart, run, second);
    // Step 3
    auto finish = [run, &comm] {
      run->finish_low_rank(comm.size());
      return run->low_rank->finish_seconds(comm.kernels());
    };
    co_await comm.compute(finish);
  }
  if (contents.finite) co_return;
  contents.is_dense = false;
  co_await name_blamed(comm, run);
}

}  // namespace weft
