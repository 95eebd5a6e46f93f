// PowerSGD: a matrix gradient travels as two thin factors. What a rank computes; the sums between the steps
// are the caller's (data_parallel/bucket_run.cc).
//
//   A vector of tensors laid end to end; of rank w, x_w = gradient + residual. A matrix of n x m is compressed
//   where (n + m) r min_compression < n m, r = min(n, m, rank); the other tensors are sent as they are.
//   Step 1  Q: of the step before, orthonormal; where there is none yet, or a column is zero or depends on
//           others, a Gaussian one. P_w = M_w Q of all matrices, end to end with the other tensors: first()
//           the caller sums first() over the ranks
//   Step 2  P = orthonormal columns of the sum; Q_w = M_w^T P of all matrices, end to end: second()
//           the caller sums second() over the ranks
//   Step 3  y = P Q^T, the sum; residual_w = M_w - y / W; Q is kept for the next step
// Bytes, with the caller's sums by a ring: 2 (W-1)/W of 4 (sum of r (n + m), and the other tensors'
// elements); with `bf16` of 2.
//
// The mass: sum of x_w = y + sum of residual_w, up to rounding. y, P and Q are the same bits on all ranks.
//
// With `bf16` both sums are of bfloat16: each rank's values are rounded to nearest even, and every addition rounds
// again (kernels/fold.h). P is made of the sum as all ranks have it, and so are y and the Q that is kept. What a rank
// leaves behind is then M_w less its own share of y, P times its own Q_w as it was rounded; of the other tensors, what its
// rounding took away. The sum of all that, and of the shares, is that of x_w, up to rounding in float32: only what the
// additions round away is lost, as by dense-bf16. (M_w - y / W would have that, too. But it keeps all by which a rank's
// gradients ever differed from the mean: it grows without end where they differ for good, and what is rounded is a part
// of it.)
//
// What is not finite, on any rank, is in the sum of first() on all of them; so is a value above a quarter of
// the largest float, whose residual might not be finite on one rank only.
//
// Why Q is made orthonormal first: P's span and, in exact arithmetic, its columns are the same; but a column
// that once was zero (a parameter without a gradient) would stay so for ever, and columns of very different
// length lose digits. "Gaussian" is a sum of twelve uniform numbers: additions only, so that ranks with
// different libraries draw the same bits.
//
// Vogels, Karimireddy and Jaggi, "PowerSGD", NeurIPS 2019. Thread: one at a time.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/low_rank.h"
#include "weft/dtype.h"
#include "weft/kernel_costs.h"

namespace weft {

struct LowRankOptions {
  // affects results; equal on all ranks
  int rank = 4;
  double min_compression = 2;  // by which factors must be shorter than the matrix; 0: always compressed
  std::uint64_t seed = 0;      // of the first factors
  bool bf16 = false;           // what the caller sums are bfloat16
};

// Columns of the factors, or 0: the tensor is sent as it is. rows 0: a vector.
int low_rank_of(std::int64_t rows, std::int64_t count, const LowRankOptions& options);

// Q between the steps, column after column, as the sum over the ranks. Empty: none yet.
struct WarmFactor {
  std::vector<float> columns;
  std::vector<float> staged;
  bool has_staged = false;

  void commit() {
    if (has_staged) columns.swap(staged);
    has_staged = false;
  }
  void roll_back() { has_staged = false; }
};

class LowRank {
 public:
  explicit LowRank(const LowRankOptions& options) : options_(options) {}
  // The next tensor of the vector. `factor` outlives this; it is read in step 1 and staged in step 3.
  void add(std::string_view name, std::int64_t rows, std::int64_t count, WarmFactor* factor);

  // Step 1. `matrix` = gradient + residual (empty: zeros). `step`: a key of the numbers that are drawn.
  void begin(std::span<const float> gradient, std::span<const float> residual, std::span<float> matrix,
             std::uint32_t step);
  std::span<float> first() { return first_; }
  // What the caller sums in its place, and step 2 goes on with: first() itself, or its values rounded.
  Dense first_sum() { return sum_of(first_); }
  // Step 2. False, on all ranks alike: the sum is not finite, and the step ends here.
  bool project(std::span<const float> matrix);
  std::span<float> second() { return second_; }  // empty where nothing is compressed
  Dense second_sum() { return sum_of(second_); }
  // Step 3: the residual replaces `matrix`. False, on all ranks alike: the sum is not finite.
  bool finish(std::span<float> matrix, std::span<float> sum, int size);

  // What the steps cost in virtual time.
  double begin_seconds(const KernelCosts& kernels, bool has_residual) const;
  double project_seconds(const KernelCosts& kernels) const;
  double finish_seconds(const KernelCosts& kernels) const;

  // Floats that are summed over the ranks in a step.
  std::int64_t first_count() const { return first_count_; }
  std::int64_t second_count() const { return second_count_; }
  std::int64_t elements() const { return first_count_ + second_count_; }
  // Bytes that each of `size` ranks sends in a step, where both sums have the bytes of a ring.
  double bytes(int size) const {
    return 2.0 * (size - 1) / size * static_cast<double>(size_of(wire())) * static_cast<double>(elements());
  }
  DType wire() const { return options_.bf16 ? DType::bfloat16 : DType::float32; }

 private:
  struct Piece {
    MatrixShape shape;        // rank 0: sent as it is, `rows` elements
    std::int64_t at = 0;      // in the vector
    std::int64_t first = 0;   // in first()
    std::int64_t second = 0;  // in second()
    std::uint64_t key = 0;    // of its name
    WarmFactor* factor = nullptr;
  };
  void prepare(const Piece& piece, std::span<float> q, std::uint32_t step);
  void draw(const Piece& piece, int column, std::span<float> q, std::uint32_t step) const;
  // With `bf16`: what goes into a sum, and what came out of it. Else nothing.
  void narrow(std::span<const float> values);
  void widen(std::span<float> values) const;
  Dense sum_of(std::vector<float>& values);
  double rounding_seconds(const KernelCosts& kernels, double narrowed, double widened) const;

  LowRankOptions options_;
  std::vector<Piece> pieces_;
  std::int64_t count_ = 0;
  std::int64_t first_count_ = 0;
  std::int64_t second_count_ = 0;
  std::vector<float> first_, second_;
  std::vector<bfloat16> rounded_;      // of the sum that is next, or was last
  std::vector<float> share_, unused_;  // with `bf16`: of second(), what this rank put in
  std::vector<int> zeroed_;
};

}  // namespace weft
