#include "workload/measure_kernels.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "base/statistics.h"
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
constexpr std::size_t kBlocks = 4;
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

// What a rank has of a bucket.
struct Rank {
  Rank(const Deal& deal, std::span<const std::int64_t> quotas, std::span<const float> mine,
       std::span<const float> other)
      : work(deal.total()), gradient(mine.begin(), mine.end()), theirs(kBlocks), merged(kBlocks) {
    const auto n = mine.size();
    work.residual.assign(n, 0.0F);
    work.staged.assign(n, 0.0F);
    work.selected.resize(kBlocks);
    select_topk({other, {}, work.staged}, deal, quotas, work.candidates, theirs);
    work.residual.swap(work.staged);
    result.contents().deal = deal;
    sum.assign(n, 0.0F);
    halves.assign(n, bfloat16{});
    const auto side = static_cast<std::size_t>(std::sqrt(static_cast<double>(n)));
    p.assign(mine.begin(), mine.begin() + static_cast<std::ptrdiff_t>(side * kMany));
    q.assign(other.begin(), other.begin() + static_cast<std::ptrdiff_t>(side * kMany));
  }

  SparseWork work;
  std::vector<float> gradient;
  std::vector<Entries> theirs, merged;  // what another rank has selected, and the sum
  Entries joined;
  SparseResult result;
  std::vector<float> sum, p, q;
  std::vector<bfloat16> halves;
  std::vector<std::byte> coded;
};

class Meter {
 public:
  explicit Meter(const MeasureKernelsOptions& options)
      : n_(static_cast<std::size_t>(options.elements)),
        deal_(Deal::Kind::dealt, static_cast<int>(kBlocks), options.elements) {
    const auto k = static_cast<std::int64_t>(options.density * static_cast<double>(options.elements));
    for (std::size_t b = 0; b < kBlocks; ++b)
      quotas_.push_back(deal_.quota(static_cast<int>(b), std::max<std::int64_t>(kBlocks, k)));
    const std::vector<float> mine = drawn(options.elements, 0);
    const std::vector<float> other = drawn(options.elements, 1);
    for (int r = 0; r < options.ranks; ++r)
      ranks_.push_back(std::make_unique<Rank>(deal_, quotas_, mine, other));
    const auto side = static_cast<std::int64_t>(std::sqrt(static_cast<double>(n_)));
    shape_ = {.rows = side, .columns = side, .rank = kMany};
  }

  // The ranks take turns where they would in an operation, with a message between, each on a thread of its own:
  // what a phase finds in the caches, of whichever core it gets, is what the phases of others have left there.
  void repeat() {
    each(&Meter::selection);
    each(&Meter::arrivals);
    each(&Meter::cuts);
    each(&Meter::codes);
    each(&Meter::lists);
    each(&Meter::settle);
    each(&Meter::sum);
    each(&Meter::dense);
    each(&Meter::halves);
    for (shape_.rank = kFew; shape_.rank <= kMany; shape_.rank += kMany - kFew) {
      each(&Meter::first_product);
      each(&Meter::second_product);
      each(&Meter::third_product);
    }
  }

  KernelCosts costs() {
    for (const auto& [figure, seconds] : samples_) *figure = std::max(kLeast, median(seconds));
    costs_.multiply = line(product_[0]);
    costs_.multiply_transposed = line(product_[1]);
    costs_.reconstruct = line(product_[2]);
    // Of r columns: r times the first figure and r (r - 1) / 2 times the second.
    constexpr double kPairs = 0.5 * kMany * (kMany - 1) - 1.0 * kMany / kFew;
    const double pair = (orthonormal_[1] - orthonormal_[0] * kMany / kFew) / kPairs;
    costs_.orthonormalize.multiply_add = std::max(kLeast, pair);
    costs_.orthonormalize.element =
        std::max(kLeast, (orthonormal_[0] - costs_.orthonormalize.multiply_add) / kFew);
    return costs_;
  }

 private:
  void each(void (Meter::*phase)(Rank&)) {
    for (const std::unique_ptr<Rank>& rank : ranks_) {
      std::thread thread([&] { (this->*phase)(*rank); });
      thread.join();
    }
  }
  // `work` returns how many units it was.
  template <class Work>
  void time(double& figure, Work&& work) {
    const double before = thread_seconds();
    const std::size_t units = work();
    const double seconds = thread_seconds() - before;
    samples_[&figure].push_back(seconds / static_cast<double>(std::max<std::size_t>(units, 1)));
  }
  // The same for every block, or every other one; work(block) returns its units.
  template <class Work>
  void time_blocks(double& figure, Work&& work, std::size_t every = 1) {
    time(figure, [&] {
      std::size_t units = 0;
      for (std::size_t b = 0; b < kBlocks; b += every) units += work(b);
      return units;
    });
  }
  static ProductCost line(const double (&at)[2]) {
    const double slope = std::max(kLeast, (at[1] - at[0]) / (kMany - kFew));
    return {.element = std::max(kLeast, at[0] - kFew * slope), .multiply_add = slope};
  }

  void selection(Rank& r) {
    const StagedStep step{r.gradient, r.work.residual, r.work.staged};
    time(costs_.sample_element, [&] {
      estimate_thresholds(step, deal_, quotas_, r.work.candidates);
      return static_cast<std::size_t>(r.work.candidates.sampled);
    });
    time(costs_.scan_element, [&] {
      accumulate(step, deal_, r.work.candidates);
      return n_;
    });
  }

  // Something arrives for half of the blocks before they are cut.
  void arrivals(Rank& r) {
    time_blocks(
        costs_.scatter_entry,
        [&](std::size_t b) {
          scatter_add(r.theirs[b], deal_, static_cast<int>(b), r.work.staged);
          return r.theirs[b].size();
        },
        2);
    time_blocks(
        costs_.unite_index,
        [&](std::size_t b) {
          arrived(r.theirs[b].indices, static_cast<int>(b), r.work.candidates);
          const std::span<const std::uint32_t> all = r.work.candidates.blocks[b].indices();
          std::vector<std::uint32_t> united(all.size() + r.theirs[b].size());
          std::ranges::set_union(r.theirs[b].indices, all, united.begin());
          return 2 * all.size() + r.theirs[b].size();
        },
        2);
  }

  void cuts(Rank& r) {
    time_blocks(costs_.cut_candidate, [&](std::size_t b) {
      cut(r.work.staged, deal_, static_cast<int>(b), quotas_[b], r.work.candidates, r.work.selected[b]);
      return r.work.candidates.blocks[b].count;
    });
    time(costs_.read_element, [&] {
      r.work.candidates.blocks[0].complete = false;
      Entries again;
      cut(r.work.staged, deal_, 0, quotas_[0], r.work.candidates, again);
      return static_cast<std::size_t>(deal_.count(0));
    });
  }

  void codes(Rank& r) {
    for (const wire::SparseCodec codec : kCodecs) code(r, codec);
  }

  void code(Rank& r, wire::SparseCodec codec) {
    const auto c = static_cast<std::size_t>(codec);
    time(costs_.encode_entry[c], [&] {
      r.coded.clear();
      for (std::size_t b = 0; b < kBlocks; ++b)
        wire::encode(codec, r.work.selected[b], deal_.count(static_cast<int>(b)), false, r.coded);
      return count_of(r.work.selected);
    });
    time(costs_.decode_entry[c], [&] {
      Entries entries;
      std::span<const std::byte> rest = r.coded;
      for (std::size_t b = 0; b < kBlocks; ++b) {
        const wire::ExpectedBlock expected{.length = deal_.count(static_cast<int>(b)),
                                           .max_count = quotas_[b]};
        rest = rest.subspan(wire::decode(codec, rest, expected, entries).bytes);
      }
      return count_of(r.work.selected);
    });
  }

  void lists(Rank& r) {
    time_blocks(costs_.merge_entry, [&](std::size_t b) {
      r.merged[b] = Entries();
      merge_add(r.work.selected[b], r.theirs[b], r.merged[b]);
      return r.work.selected[b].size() + r.theirs[b].size();
    });
    time_blocks(costs_.keep_entry, [&](std::size_t b) {
      const std::size_t all = r.merged[b].size();
      Entries discards;
      keep_largest(r.merged[b], quotas_[b], discards);
      return all;
    });
    time(costs_.sum_entry, [&] {  // as if all blocks were one
      sum_lists(r.theirs, deal_.longest(), r.joined);
      return count_of(r.theirs);
    });
    time_blocks(costs_.move_entry, [&](std::size_t b) {
      Entries moved;
      const Entries& list = r.work.selected[b];
      for (std::size_t i = 0; i < list.size(); ++i) moved.push_back(list.indices[i] + 1, list.values[i]);
      return moved.size();
    });
    r.result.contents().blocks = r.merged;
    time(costs_.measure_entry, [&] {
      std::vector<float> magnitudes;
      r.result.for_each([&](std::int64_t, float value) { magnitudes.push_back(std::abs(value)); });
      scale_of(magnitudes, deal_.total());
      return magnitudes.size();
    });
  }

  // Where nothing that was sent is in the result: every place is settled.
  void settle(Rank& r) {
    SparseCall call;
    call.gradient = r.gradient;
    call.work = &r.work;
    call.kernels = &none_;
    time_blocks(costs_.settle_place, [&](std::size_t b) {
      const EntriesView touched = r.theirs[b];
      apply_residual_rule(call, deal_, static_cast<int>(b), r.work.selected[b], touched, {});
      return r.work.selected[b].size() + touched.size();
    });
  }

  void sum(Rank& r) {
    time(costs_.copy_byte, [&] {
      std::ranges::copy(r.gradient, r.sum.begin());
      return 4 * n_;
    });
    time(costs_.add_element, [&] {
      for (std::size_t i = 0; i < n_; ++i) r.sum[i] += r.work.residual[i];
      return n_;
    });
  }

  void dense(Rank& r) {
    time(costs_.check_element, [&] {
      std::uint32_t largest = 0;
      for (const float v : r.sum) largest = std::max(largest, magnitude_key(v));
      r.result.contents().finite = largest < kInfinityKey;
      return n_;
    });
    // What is folded has just arrived, so it is in the cache; what it is folded into need not be.
    const std::size_t block = n_ / kBlocks;
    arrived_.resize(block);
    for (std::size_t b = 0; b < kBlocks; ++b) {
      std::ranges::copy(std::span(r.gradient).subspan(b * block, block), arrived_.begin());
      time(costs_.fold_byte, [&] {
        fold_into(Dense(std::span(r.sum).subspan(b * block, block)), std::as_bytes(std::span(arrived_)),
                  Reduction::sum);
        return 4 * block;
      });
    }
    time(costs_.velocity_element, [&] {
      accumulate_velocity(0.9F, r.work.residual, r.gradient, r.sum);
      return n_;
    });
  }

  void halves(Rank& r) {
    time(costs_.round_element, [&] {
      wire::round_to_bfloat16(r.sum, std::span<float>(r.work.staged));
      return n_;
    });
    time(costs_.narrow_element, [&] {
      std::ranges::transform(r.sum, r.halves.begin(), [](float x) {
        return bfloat16{static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(x) >> 16)};
      });
      return n_;
    });
    time(costs_.fold_half_byte, [&] {
      const std::span<bfloat16> all = r.halves;
      fold_into(Dense(all.first(n_ / 2)), std::as_bytes(all.last(n_ / 2)), Reduction::sum);
      return n_ / 2 * sizeof(bfloat16);
    });
    time(costs_.widen_element, [&] {
      std::ranges::transform(r.halves, r.sum.begin(), [](bfloat16 x) { return to_float(x); });
      return n_;
    });
  }

  // The steps of compressors/low_rank.h, with factors of few and of many columns.
  int point() const { return shape_.rank == kFew ? 0 : 1; }
  std::size_t side() const { return static_cast<std::size_t>(shape_.rows); }
  std::span<float> matrix(Rank& r) const { return std::span<float>(r.work.staged).first(side() * side()); }
  void first_product(Rank& r) {
    time(product_[0][point()], [&] {
      multiply(shape_, matrix(r), r.q, r.p);
      return side() * side();
    });
  }
  void second_product(Rank& r) {
    time(orthonormal_[point()], [&] {
      orthonormalize(shape_.rows, shape_.rank, r.p, zeroed_);
      return side();
    });
    time(product_[1][point()], [&] {
      multiply_transposed(shape_, matrix(r), r.p, r.q);
      return side() * side();
    });
  }
  void third_product(Rank& r) {
    time(product_[2][point()], [&] {
      reconstruct(shape_, r.p, r.q, 4, std::span(r.sum).first(side() * side()), matrix(r));
      return side() * side();
    });
  }

  std::size_t n_;
  Deal deal_;
  std::vector<std::int64_t> quotas_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  MatrixShape shape_;
  std::vector<int> zeroed_;
  std::vector<float> arrived_;
  const KernelCosts none_{};
  KernelCosts costs_;
  double product_[3][2] = {};   // of an element, with few and many columns
  double orthonormal_[2] = {};  // of an element of one column
  std::map<double*, std::vector<double>> samples_;
};

}  // namespace

KernelCosts measure_kernels(const MeasureKernelsOptions& options) {
  if (options.elements < 4096 || !(options.density > 0 && options.density <= 1) || options.ranks < 1 ||
      options.repetitions < 1)
    throw UsageError(
        "kernels are measured with at least 4096 elements, a density in (0, 1], ranks and repetitions");
  Meter meter(options);
  for (int i = 0; i < options.repetitions; ++i) meter.repeat();
  return meter.costs();
}

}  // namespace weft
