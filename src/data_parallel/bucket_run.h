// A bucket in a step: what its operation reads and writes. Nobody else does between submit and the ticket's
// end.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "collectives/sparse_allreduce/call.h"
#include "compressors/low_rank.h"
#include "data_parallel/buckets.h"
#include "data_parallel/velocity.h"
#include "step/strategy.h"
#include "weft/comm.h"
#include "weft/sparse.h"
#include "weft/task.h"

namespace weft {

// Where the gradients of a bucket are gathered: the caller's memory where he gave some, else its own, which
// is made when it is needed first.
template <class T>
class BucketMemory {
 public:
  void give(std::span<T> memory) { given_ = memory; }
  bool is_given() const { return given_.data() != nullptr; }
  std::span<T> all(std::int64_t count) {
    if (is_given()) return given_;
    own_.resize(static_cast<std::size_t>(count));
    return own_;
  }
  std::span<const T> all() const {
    return is_given() ? std::span<const T>(given_) : std::span<const T>(own_);
  }

 private:
  std::vector<T> own_;
  std::span<T> given_;
};

struct BucketRun {
  const BucketPlan* plan = nullptr;
  const Bucket* bucket = nullptr;
  SparseState* state = nullptr;
  SparseOptions options;
  bool measures = false;
  bool wide = false;      // float64: the gradient is in `values`
  bool in_place = false;  // what was gathered is replaced by its average over the ranks
  double divisor = 1;     // of that average
  BucketMemory<double> values;
  std::unique_ptr<LowRank> low_rank;  // of the scheme "powersgd"; else none
  std::string_view order = "auto";    // of additions: the all-reduce of what is summed as it is
  Comm row, column;                   // of a sum in two steps; else not valid
  bool forgets = false;               // of low rank: what is left behind is lost
  std::uint32_t step = 0;             // committed ones: a key of what is drawn
  Velocity* velocity = nullptr;       // with momentum correction: sent in place of the gradient; else none
  float momentum = 0;                 // of it
  bool masks = false;                 // the operation selects: what it sent has no velocity any more
  std::size_t ticket = 0;             // its place among the step's tickets
  std::size_t pending = 0;            // gradients that are not here yet
  std::span<const float> gradient;    // the caller's memory, or the buffer
  BucketMemory<float> buffer;
  SparseResult result;
  double computed_seconds = 0;    // processor time, once its step is finished
  double measured = 0;            // scale of the result
  std::vector<float> magnitudes;  // of its entries
  std::vector<std::byte> blamed;  // rank after rank, one for each piece; only where the result is not finite

  bool finite() const { return result.finite(); }
  std::int64_t count_of(const BucketPiece& piece) const { return plan->parameter(piece.parameter).count; }
  template <class T>
  BucketMemory<T>& memory();
  template <class T>
  std::span<T> part(const BucketPiece& piece) {
    return memory<T>()
        .all(bucket->count)
        .subspan(static_cast<std::size_t>(piece.first), static_cast<std::size_t>(count_of(piece)));
  }
  const BucketPiece& piece_around(std::int64_t index) const {
    const auto after = std::upper_bound(bucket->pieces.begin(), bucket->pieces.end(), index,
                                        [](std::int64_t i, const BucketPiece& p) { return i < p.first; });
    return *(after - 1);
  }
  // f(piece, index inside its parameter, value) for the entries of the result.
  template <class F>
  void visit(F&& f) const {
    const BucketPiece* at = nullptr;
    std::int64_t end = 0;
    result.for_each([&](std::int64_t index, float value) {
      if (at == nullptr || index < at->first || index >= end) {
        at = &piece_around(index);
        end = at->first + count_of(*at);
      }
      f(*at, index - at->first, value);
    });
  }

  void scale_by(double factor);  // the gradient; REQUIRES: all of it is here
  // These return their seconds in virtual time.
  double accelerate(const KernelCosts& kernels);
  double settle(const KernelCosts& kernels);
  double find_blame(const Comm& comm);
  void measure();
  template <class T>
  void begin_in_place();
  void begin_low_rank();
  void finish_low_rank(int size);
  static Task<void> reduce(Comm comm, BucketRun* run);
  template <class T>
  static Task<void> reduce_in_place(Comm comm, BucketRun* run);
  static Task<void> reduce_low_rank(Comm comm, BucketRun* run);
};

template <>
inline BucketMemory<float>& BucketRun::memory<float>() {
  return buffer;
}
template <>
inline BucketMemory<double>& BucketRun::memory<double>() {
  return values;
}

}  // namespace weft
