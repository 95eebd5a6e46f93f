#include "compressors/low_rank.h"

#include <algorithm>
#include <limits>

#include "base/identity.h"
#include "kernels/select.h"
#include "weft/random.h"
#include "wire/bfloat16.h"

namespace weft {

namespace {

constexpr std::uint32_t kPurpose = 0x7073'6764u;  // "psgd"
constexpr float kLargest = std::numeric_limits<float>::max() / 4;
// Times a row of P, which is no longer than the root of the rank, below kLargest.
constexpr float kLargestShare = kLargest / 64;

std::uint32_t largest_key(std::span<const float> values) {
  std::uint32_t largest = 0;
  for (const float v : values) largest = std::max(largest, magnitude_key(v));
  return largest;
}

std::uint64_t hash_of(std::string_view name) {
  std::uint64_t hash = mix(name.size());
  for (const char c : name) hash = mix(hash ^ static_cast<unsigned char>(c));
  return hash;
}

template <class T>
std::span<T> part(std::span<T> all, std::int64_t first, std::int64_t count) {
  return all.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count));
}

std::int64_t floats_of_p(const MatrixShape& s) { return s.rank == 0 ? s.rows : s.rows * s.rank; }
std::int64_t floats_of_q(const MatrixShape& s) { return s.columns * s.rank; }

double product(const ProductCost& cost, const MatrixShape& s) {
  const std::int64_t elements = s.rows * s.columns;
  return cost.of(elements, static_cast<double>(elements) * s.rank);
}

}  // namespace

int low_rank_of(std::int64_t rows, std::int64_t count, const LowRankOptions& options) {
  if (rows < 1 || count < 1) return 0;
  const std::int64_t columns = count / rows;
  const std::int64_t rank = std::min<std::int64_t>({rows, columns, options.rank});
  const double factors = static_cast<double>(rows + columns) * static_cast<double>(rank);
  return factors * options.min_compression < static_cast<double>(count) ? static_cast<int>(rank) : 0;
}

void LowRank::add(std::string_view name, std::int64_t rows, std::int64_t count, WarmFactor* factor) {
  Piece piece;
  piece.shape = {.rows = count, .columns = 1, .rank = low_rank_of(rows, count, options_)};
  if (piece.shape.rank > 0) {
    piece.shape.rows = rows;
    piece.shape.columns = count / rows;
  }
  piece.at = count_;
  piece.first = first_count_;
  piece.second = second_count_;
  piece.key = mix(options_.seed) ^ hash_of(name);
  piece.factor = factor;
  count_ += count;
  first_count_ += floats_of_p(piece.shape);
  second_count_ += floats_of_q(piece.shape);
  pieces_.push_back(piece);
}

void LowRank::draw(const Piece& piece, int column, std::span<float> q, std::uint32_t step) const {
  Random random(piece.key, kPurpose, step, static_cast<std::uint32_t>(column));
  for (float& v : part(q, column * piece.shape.columns, piece.shape.columns)) {
    double sum = -6;
    for (int i = 0; i < 12; ++i) sum += random.uniform();
    v = static_cast<float>(sum);
  }
}

void LowRank::prepare(const Piece& piece, std::span<float> q, std::uint32_t step) {
  const MatrixShape& shape = piece.shape;
  if (piece.factor->columns.size() == q.size()) {
    std::ranges::copy(piece.factor->columns, q.begin());
  } else {
    std::ranges::fill(q, 0.0F);
  }
  // All that is known comes first: a drawn column must not take away from one that is not.
  orthonormalize(shape.columns, shape.rank, q, zeroed_);
  for (const int k : zeroed_) {
    draw(piece, k, q, step);
    // The others' directions are taken out by moving the drawn one behind them.
    const auto column = [&](int c) { return part(q, c * shape.columns, shape.columns); };
    std::ranges::swap_ranges(column(k), column(shape.rank - 1));
    orthonormalize_column(shape.columns, shape.rank - 1, q);
    std::ranges::swap_ranges(column(k), column(shape.rank - 1));
  }
}

void LowRank::narrow(std::span<const float> values) {
  if (!options_.bf16) return;
  rounded_.resize(values.size());
  wire::narrow(values, rounded_);
}

void LowRank::widen(std::span<float> values) const {
  if (options_.bf16) wire::widen(rounded_, values);
}

Dense LowRank::sum_of(std::vector<float>& values) {
  return options_.bf16 ? Dense(std::span(rounded_)) : Dense(std::span(values));
}

double LowRank::rounding_seconds(const KernelCosts& kernels, double narrowed, double widened) const {
  return options_.bf16 ? kernels.round_element * narrowed + kernels.widen_element * widened : 0;
}

void LowRank::begin(std::span<const float> gradient, std::span<const float> residual, std::span<float> matrix,
                    std::uint32_t step) {
  first_.resize(static_cast<std::size_t>(first_count_));
  second_.resize(static_cast<std::size_t>(second_count_));
  if (residual.empty()) {
    std::ranges::copy(gradient, matrix.begin());
  } else {
    // (A transform of two ranges asks for two ends, and is not turned into vectors.)
    for (std::size_t i = 0; i < gradient.size(); ++i) matrix[i] = gradient[i] + residual[i];
  }
  for (const Piece& piece : pieces_) {
    const MatrixShape& shape = piece.shape;
    const std::span<float> p = part(std::span(first_), piece.first, floats_of_p(shape));
    const std::span<const float> m =
        part(std::span<const float>(matrix), piece.at, shape.rows * shape.columns);
    if (shape.rank == 0) {
      std::ranges::copy(m, p.begin());
      continue;
    }
    const std::span<float> q = part(std::span(second_), piece.second, floats_of_q(shape));
    prepare(piece, q, step);
    multiply(shape, m, q, p);
  }
  if (!first_.empty() && largest_key(matrix) > magnitude_key(kLargest)) {
    first_[0] = std::numeric_limits<float>::quiet_NaN();
  }
  narrow(first_);
}

bool LowRank::project(std::span<const float> matrix) {
  widen(first_);
  if (largest_key(first_) >= kInfinityKey) return false;
  for (const Piece& piece : pieces_) {
    const MatrixShape& shape = piece.shape;
    if (shape.rank == 0) continue;
    const std::span<float> p = part(std::span(first_), piece.first, floats_of_p(shape));
    orthonormalize(shape.rows, shape.rank, p, zeroed_);
    multiply_transposed(shape, part(matrix, piece.at, shape.rows * shape.columns), p,
                        part(std::span(second_), piece.second, floats_of_q(shape)));
  }
  if (!options_.bf16) return true;
  if (largest_key(second_) > magnitude_key(kLargestShare))
    second_[0] = std::numeric_limits<float>::quiet_NaN();
  narrow(second_);
  share_.resize(second_.size());
  widen(share_);
  return true;
}

bool LowRank::finish(std::span<float> matrix, std::span<float> sum, int size) {
  widen(second_);
  if (largest_key(second_) >= kInfinityKey) return false;
  for (const Piece& piece : pieces_) {
    const MatrixShape& shape = piece.shape;
    const std::span<float> p = part(std::span(first_), piece.first, floats_of_p(shape));
    const std::span<float> m = part(matrix, piece.at, shape.rows * shape.columns);
    const std::span<float> y = part(sum, piece.at, shape.rows * shape.columns);
    if (shape.rank == 0) {
      std::ranges::copy(p, y.begin());
      if (options_.bf16)
        for (float& v : m) v -= half::widen(half::narrow_bfloat16(v));
      else
        std::ranges::fill(m, 0.0F);
      continue;
    }
    const std::span<const float> q = part(std::span<const float>(second_), piece.second, floats_of_q(shape));
    if (options_.bf16) {
      reconstruct(shape, p, part(std::span<const float>(share_), piece.second, floats_of_q(shape)), 1, y, m);
      unused_.resize(m.size());
      reconstruct(shape, p, q, 1, y, unused_);
    } else {
      reconstruct(shape, p, q, static_cast<float>(size), y, m);
    }
    // (So that what is left behind is finite on every rank.)
    if (largest_key(y) > magnitude_key(2 * kLargest)) return false;
    piece.factor->staged.assign(q.begin(), q.end());
  }
  for (const Piece& piece : pieces_) {
    if (piece.shape.rank > 0) piece.factor->has_staged = true;
  }
  return true;
}

double LowRank::begin_seconds(const KernelCosts& kernels, bool has_residual) const {
  const auto all = static_cast<double>(count_);
  double sum =
      all * (4 * kernels.copy_byte + (has_residual ? kernels.add_element : 0) + kernels.check_element);
  for (const Piece& piece : pieces_) {
    const MatrixShape& shape = piece.shape;
    sum += shape.rank == 0
               ? 4 * kernels.copy_byte * static_cast<double>(shape.rows)
               : product(kernels.multiply, shape) + kernels.orthonormal(shape.columns, shape.rank);
  }
  return sum + rounding_seconds(kernels, static_cast<double>(first_count_), 0);
}

double LowRank::project_seconds(const KernelCosts& kernels) const {
  double sum = kernels.check_element * static_cast<double>(first_count_);
  for (const Piece& piece : pieces_) {
    const MatrixShape& shape = piece.shape;
    if (shape.rank == 0) continue;
    sum += kernels.orthonormal(shape.rows, shape.rank) + product(kernels.multiply_transposed, shape);
  }
  return sum +
         rounding_seconds(kernels, static_cast<double>(second_count_), static_cast<double>(first_count_));
}

double LowRank::finish_seconds(const KernelCosts& kernels) const {
  double sum = kernels.check_element * static_cast<double>(second_count_);
  for (const Piece& piece : pieces_) {
    const MatrixShape& shape = piece.shape;
    const auto elements = static_cast<double>(shape.rows * shape.columns);
    sum += shape.rank == 0 ? 8 * kernels.copy_byte * elements
                           : product(kernels.reconstruct, shape) + kernels.check_element * elements;
    if (options_.bf16)
      sum += shape.rank == 0 ? kernels.round_element * elements : product(kernels.reconstruct, shape);
  }
  return sum + rounding_seconds(kernels, 0, static_cast<double>(second_count_));
}

}  // namespace weft
