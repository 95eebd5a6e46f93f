// Whether so many models fit into this machine, before they are made: the kernel's way of saying no is a
// kill. And memory that a step frees is kept for the next.
#pragma once

#include <cstddef>
#include <cstdint>

namespace weft {

// How often a rank has its parameters, in float32: weights, gradients, buckets, results, two moments,
// residuals, and what the model computes with; without a model: buckets, results and residuals (as
// workload/emulate.h says).
inline constexpr double kCopiesOfTraining = 8, kCopiesOfEmulation = 5;
inline constexpr double kCopiesOfRows = 3;  // of tables whose rows travel: values and at most two moments

struct MemoryNeed {
  int ranks = 1;
  std::int64_t parameters = 0;  // of all of these ranks together, but for
  std::int64_t held = 0;        // elements of such tables
  double copies = kCopiesOfTraining;

  double bytes() const {
    return sizeof(float) *
           (copies * static_cast<double>(parameters) + kCopiesOfRows * static_cast<double>(held));
  }
};

// Throws UsageError where it is more than `available_bytes`.
void check_memory(const MemoryNeed& need, double available_bytes);
// Bytes, after what this process keeps of freed memory went back; infinite where the system does not say.
double available_memory();

// A step frees and takes the same large tensors again and again. glibc gives blocks of more than 32 MiB back
// to the kernel at once, which then clears their pages anew: a fifth of a step of the default gpt. For the
// rest of the process.
void keep_freed_memory();

}  // namespace weft
