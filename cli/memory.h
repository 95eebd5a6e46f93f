// Whether so many models fit into this machine, before they are made: the kernel's way of saying no is a
// kill.
#pragma once

#include <cstddef>
#include <cstdint>

namespace weft::cli {

// How often a rank has its parameters, in float32: weights, gradients, buckets, results, two moments,
// residuals, and what the model computes with; without a model: buckets, results and residuals (as
// workload/emulate.h says).
inline constexpr double kCopiesOfTraining = 8, kCopiesOfEmulation = 5;

// Throws UsageError where `schemes` worlds of `ranks` ranks need more than `available_bytes`.
void check_memory(std::size_t schemes, int ranks, std::int64_t parameters, double copies,
                  double available_bytes);
// Bytes, after what this process keeps of freed memory went back; infinite where the system does not say.
double available_memory();

}  // namespace weft::cli
