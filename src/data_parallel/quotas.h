// How many of k entries each sparse bucket gets.
//
// One selection over all buckets would take what exceeds one common threshold. Buckets are selected apart, so
// their quotas imitate that: equal density everywhere would spend most entries on layers whose gradients are
// small. What the ranks share is the committed result, the same bits on all of them, and quotas are a
// function of it alone:
//   Step 1  of a bucket's result, the magnitude x that three quarters of its entries (c of them) reach: it
//           lies near the bucket's own threshold and few accidents move it
//   Step 2  its scale s, so that a tail of exponential shape has c of the bucket's n elements above x:
//           n tail(x / s) = c. Half old and half new scale is kept (kept by parameter: state.h)
//   Step 3  the common threshold t at which the buckets would select k in all: sum of n tail(t / s) = k, each
//           between its floor and its length; then whole numbers, the largest remainders first
// At rest every bucket's x lies where the shape puts it for one common threshold, whatever the scales; the
// shape only says how far a step of the adaption goes. The floor (1/16 of the proportional quota) lets a
// bucket that gets nothing be seen when it grows.
//
// Arithmetic is +, *, / and sqrt only, which IEEE 754 fixes: libm may differ from one machine to the next.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "weft/train/scheme_options.h"

namespace weft {

// A scale that nothing was measured of yet: such elements count as their proportional share.
inline constexpr double kUnmeasured = -1;

// Elements of one bucket with one scale (those of a parameter).
struct QuotaPart {
  int bucket = 0;
  std::int64_t count = 0;
  double scale = kUnmeasured;
};

// Quotas that sum to k, or to the number of buckets with elements where that is more (an operation has at
// least one entry), or to all elements where that is less. 1 <= quota <= lengths[b]; 0 where a bucket is
// empty. The parts of a bucket sum to its length.
std::vector<std::int64_t> adaptive_quotas(std::span<const std::int64_t> lengths,
                                          std::span<const QuotaPart> parts, std::int64_t k);
std::vector<std::int64_t> proportional_quotas(std::span<const std::int64_t> lengths, std::int64_t k);

// Step 2 for the entries of a bucket's result; 0 where there are none. Reorders `magnitudes`.
double scale_of(std::span<float> magnitudes, std::int64_t length);
// Half of each; the first measurement counts whole.
double blend_scales(double old_scale, double measured);

}  // namespace weft
