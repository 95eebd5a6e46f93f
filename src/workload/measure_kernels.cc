#include "workload/measure_kernels.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>
#include <map>
#include <span>
#include <vector>

#include "base/median.h"
#include "base/thread_time.h"
#include "collectives/sparse_allreduce/lists.h"
#include "collectives/sparse_allreduce/residual_rules.h"
#include "data_parallel/quotas.h"
#include "kernels/fold.h"
#include "kernels/low_rank.h"
#include "kernels/optimize.h"
#include "kernels/select.h"
#include "kernels/sparse.h"
#include "weft/error.h"
#include "wire/codec.h"
#include "workload/distributions.h"

namespace weft {

namespace {

constexpr double kLeast = 1e-14;
constexpr int kBlocks = 4;
constexpr int kFew = 2;   // columns of factors: two points
constexpr int kMany = 8;  // of a line
constexpr wire::SparseCodec kCodecs[] = {wire::SparseCodec::coo, wire::SparseCodec::packed,
                                         wire::SparseCodec::packed_bf16};

std::vector<float> drawn(std::int64_t elements, std::uint32_t rank) {
  std::vector<float> out(static_cast<std::size_t>(elements));
  draw({.distribution = Distribution::heavy, .seed = 1, .rank = rank}, out);
  return out;
}

std::size_t count_of(std::span<const Entries> lists) {
  std::size_t sum = 0;
  for (const Entries& list : lists) sum += list.size();
  return sum;
}

class Meter {
 public:
  explicit Meter(const MeasureKernelsOptions& options)
      : n_(static_cast<std::size_t>(options.elements)),
        k_(std::max<std::int64_t>(
            kBlocks, static_cast<std::int64_t>(options.density * static_cast<double>(options.elements)))),
        deal_(Deal::Kind::dealt, kBlocks, options.elements),
        work_(options.elements),
        gradient_(drawn(options.elements, 0)),
        theirs_(kBlocks),
        merged_(kBlocks) {
    for (int b = 0; b < kBlocks; ++b) quotas_.push_back(deal_.quota(b, k_));
    work_.residual.assign(n_, 0.0F);
    work_.staged.resize(n_);
    work_.selected.resize(kBlocks);
    work_.touched.resize(kBlocks);
    const std::vector<float> other = drawn(options.elements, 1);
    select_topk({other, {}, work_.staged}, deal_, quotas_, work_.candidates, theirs_);
    work_.residual.swap(work_.staged);
    const auto side = static_cast<std::int64_t>(std::sqrt(static_cast<double>(n_)));
    shape_ = {.rows = side, .columns = side, .rank = kMany};
    p_ = drawn(side * kMany, 2);
    q_ = drawn(side * kMany, 3);
    sum_.resize(n_);
    halves_.resize(n_);
  }

  void repeat() {
    selection();
    entries();
    vectors();
    low_rank();
  }

  KernelCosts costs() {
    for (const auto& [figure, seconds] : samples_) *figure = std::max(kLeast, median(seconds));
    costs_.multiply = line(product_[0]);
    costs_.multiply_transposed = line(product_[1]);
    costs_.reconstruct = line(product_[2]);
    // Of r columns: r times the first figure and r (r - 1) / 2 times the second.
    constexpr double kPairs = kMany * (kMany - 1) / 2 - kMany / kFew;
    const double pair = (orthonormal_[1] - orthonormal_[0] * kMany / kFew) / kPairs;
    costs_.orthonormalize.multiply_add = std::max(kLeast, pair);
    costs_.orthonormalize.element =
        std::max(kLeast, (orthonormal_[0] - costs_.orthonormalize.multiply_add) / kFew);
    return costs_;
  }

 private:
  template <class Work>
  void time(double& figure, std::size_t units, Work&& work) {
    const double before = thread_seconds();
    work();
    const double seconds = thread_seconds() - before;
    samples_[&figure].push_back(seconds / static_cast<double>(std::max<std::size_t>(units, 1)));
  }
  // As above; `work` returns how many units it was.
  template <class Work>
  void count(double& figure, Work&& work) {
    const double before = thread_seconds();
    const std::size_t units = work();
    const double seconds = thread_seconds() - before;
    samples_[&figure].push_back(seconds / static_cast<double>(std::max<std::size_t>(units, 1)));
  }
  static ProductCost line(const double (&at)[2]) {
    const double slope = std::max(kLeast, (at[1] - at[0]) / (kMany - kFew));
    return {.element = std::max(kLeast, at[0] - kFew * slope), .multiply_add = slope};
  }
  template <class F>
  void each_block(F&& f) {
    for (int b = 0; b < kBlocks; ++b) f(b, static_cast<std::size_t>(b));
  }

  void selection() {
    const StagedStep step{gradient_, work_.residual, work_.staged};
    Candidates& found = work_.candidates;
    count(costs_.sample_element, [&] {
      estimate_thresholds(step, deal_, quotas_, found);
      return static_cast<std::size_t>(found.sampled);
    });
    time(costs_.scan_element, n_, [&] { accumulate(step, deal_, found); });
    time(costs_.scatter_entry, count_of(theirs_),
         [&] { each_block([&](int b, std::size_t i) { scatter_add(theirs_[i], deal_, b, work_.staged); }); });
    count(costs_.unite_index, [&] {
      std::size_t units = 0;
      each_block([&](int b, std::size_t i) {
        arrived(theirs_[i].indices, b, found);
        const std::span<const std::uint32_t> all = found.blocks[i].indices();
        united_.clear();
        std::ranges::set_union(theirs_[i].indices, all, std::back_inserter(united_));
        units += 2 * all.size() + theirs_[i].size();
      });
      return units;
    });
    count(costs_.cut_candidate, [&] {
      std::size_t units = 0;
      each_block([&](int b, std::size_t i) {
        units += found.blocks[i].count;
        cut(work_.staged, deal_, b, quotas_[i], found, work_.selected[i]);
      });
      return units;
    });
    Entries again;
    found.blocks[0].complete = false;
    time(costs_.read_element, static_cast<std::size_t>(deal_.count(0)),
         [&] { cut(work_.staged, deal_, 0, quotas_[0], found, again); });
    scatter_add(again, deal_, 0, work_.staged);
  }

  void entries() {
    const std::span<const Entries> mine = work_.selected;
    const std::size_t own = count_of(mine);
    const std::size_t both = own + count_of(theirs_);
    for (const wire::SparseCodec codec : kCodecs) code(codec);
    time(costs_.merge_entry, both,
         [&] { each_block([&](int, std::size_t i) { merge_add(mine[i], theirs_[i], merged_[i]); }); });
    const std::vector<Entries> lists{mine[0], theirs_[1], mine[2], theirs_[3]};  // as if of one block
    time(costs_.sum_entry, count_of(lists), [&] { sum_lists(lists, deal_.longest(), joined_); });
    time(costs_.keep_entry, count_of(merged_),
         [&] { each_block([&](int, std::size_t i) { keep_largest(merged_[i], quotas_[i], discards_); }); });
    time(costs_.move_entry, own, [&] {
      Entries moved;
      for (const Entries& list : mine) {
        for (std::size_t i = 0; i < list.size(); ++i) moved.push_back(list.indices[i] + 1, list.values[i]);
      }
      discards_ = moved;
    });
    result_.contents().deal = deal_;
    result_.contents().blocks.assign(mine.begin(), mine.end());
    time(costs_.measure_entry, own, [&] {
      magnitudes_.clear();
      result_.for_each([this](std::int64_t, float value) { magnitudes_.push_back(std::abs(value)); });
      scale_of(magnitudes_, static_cast<std::int64_t>(n_));
    });
    SparseCall call;
    call.gradient = gradient_;
    call.work = &work_;
    call.kernels = &none_;
    time(costs_.settle_place, both, [&] {
      each_block([&](int b, std::size_t i) {
        apply_residual_rule(call, deal_, b, mine[i], theirs_[i].indices, merged_[i]);
      });
    });
  }

  void code(wire::SparseCodec codec) {
    const auto c = static_cast<std::size_t>(codec);
    coded_.clear();
    time(costs_.encode_entry[c], count_of(work_.selected), [&] {
      each_block([&](int b, std::size_t i) {
        wire::encode(codec, work_.selected[i], deal_.count(b), false, coded_);
      });
    });
    time(costs_.decode_entry[c], count_of(work_.selected), [&] {
      std::span<const std::byte> rest = coded_;
      each_block([&](int b, std::size_t i) {
        const wire::ExpectedBlock expected{.length = deal_.count(b), .max_count = quotas_[i]};
        rest = rest.subspan(wire::decode(codec, rest, expected, discards_).bytes);
      });
    });
  }

  void vectors() {
    const std::span<float> sum = sum_;
    const std::span<const float> residual = work_.residual;
    time(costs_.copy_byte, 4 * n_, [&] { std::ranges::copy(gradient_, sum.begin()); });
    time(costs_.add_element, n_, [&] {
      for (std::size_t i = 0; i < residual.size(); ++i) sum[i] += residual[i];
    });
    time(costs_.check_element, n_, [&] {
      std::uint32_t largest = 0;
      for (const float v : sum) largest = std::max(largest, magnitude_key(v));
      finite_ = largest < kInfinityKey;
    });
    time(costs_.round_element, n_, [&] { wire::round_to_bfloat16(sum, std::span<float>(work_.staged)); });
    time(costs_.narrow_element, n_, [&] {
      std::ranges::transform(sum, halves_.begin(), [](float x) {
        return bfloat16{static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(x) >> 16)};
      });
    });
    const std::span<bfloat16> halves = halves_;
    time(costs_.fold_half_byte, n_,
         [&] { fold_into(Dense(halves.first(n_ / 2)), std::as_bytes(halves.last(n_ / 2)), Reduction::sum); });
    time(costs_.widen_element, n_,
         [&] { std::ranges::transform(halves_, sum.begin(), [](bfloat16 x) { return to_float(x); }); });
    time(costs_.fold_byte, 4 * n_,
         [&] { fold_into(Dense(sum), std::as_bytes(std::span(gradient_)), Reduction::sum); });
    time(costs_.velocity_element, n_, [&] { accumulate_velocity(0.9F, residual, gradient_, sum); });
  }

  void low_rank() {
    const auto elements = static_cast<std::size_t>(shape_.rows * shape_.columns);
    const std::span<float> y = std::span(sum_).first(elements);
    const std::span<float> m = std::span<float>(work_.staged).first(elements);
    for (int point = 0; point < 2; ++point) {
      shape_.rank = point == 0 ? kFew : kMany;
      const auto side = static_cast<std::size_t>(shape_.rows);
      time(product_[0][point], elements, [&] { multiply(shape_, m, q_, p_); });
      time(orthonormal_[point], side, [&] { orthonormalize(shape_.rows, shape_.rank, p_, zeroed_); });
      time(product_[1][point], elements, [&] { multiply_transposed(shape_, m, p_, q_); });
      time(product_[2][point], elements, [&] { reconstruct(shape_, p_, q_, 4, y, m); });
    }
  }

  std::size_t n_;
  std::int64_t k_;
  Deal deal_;
  SparseWork work_;
  std::vector<float> gradient_;
  std::vector<std::int64_t> quotas_;
  std::vector<Entries> theirs_, merged_;
  Entries joined_, discards_;
  std::vector<std::byte> coded_;
  std::vector<std::uint32_t> united_;
  std::vector<float> magnitudes_, sum_, p_, q_;
  std::vector<bfloat16> halves_;
  std::vector<int> zeroed_;
  MatrixShape shape_;
  SparseResult result_;
  bool finite_ = true;
  const KernelCosts none_{};
  KernelCosts costs_;
  double product_[3][2] = {};   // of an element, with few and many columns
  double orthonormal_[2] = {};  // of an element of one column
  std::map<double*, std::vector<double>> samples_;
};

}  // namespace

KernelCosts measure_kernels(const MeasureKernelsOptions& options) {
  if (options.elements < 4096 || !(options.density > 0 && options.density <= 1) || options.repetitions < 1)
    throw UsageError("kernels are measured with at least 4096 elements, a density in (0, 1] and repetitions");
  Meter meter(options);
  for (int i = 0; i < options.repetitions; ++i) meter.repeat();
  return meter.costs();
}

}  // namespace weft
