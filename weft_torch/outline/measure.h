// The outline of a model, from LibTorch: blocks' seconds measured on this machine. (Those that are counted in
// FLOPs need no torch: workload/outline.h.) No torch is reachable from here.
//
// Forward, backward and update of some steps on the data's tokens, after a warm-up; medians over the steps
// and means over the ranks.
//   forward   all parts of the block; the last block's ends with the loss
//   backward  a block's ends when its first input's gradient is known, that is when backward enters the block
//             before it; the first one's with the end of backward. A tensor's `ready` is where inside of that
//             torch told of its gradient
//   update    takes a result out of memory, changes the parameters (the fused optimizers) and clears the
//             gradients, as Replica does
//   experts   are timed apart from their blocks: the gate, what all tokens share, the slices, the merge. What a
//             slice takes, a + b * rows, follows from steps with one slice and steps with kMeasuredSlices
//   other     making the batch's tensors and what else a step has around these
// With side_by_side ranks above 1 as many threads compute at the same time, each its own model: what they
// take from each other (memory, caches, cores) is then in the seconds.
#pragma once

#include <cstdint>

#include "workload/outline.h"
#include "workload/train_options.h"

namespace weft {

inline constexpr int kMeasuredSlices = 4;

struct OutlineOptions {
  TrainOptions train;          // model, sizes, length, accumulate, optimizer, seed, threads
  std::int64_t sequences = 4;  // of one rank, in a step
  int side_by_side = 1;        // ranks that compute at the same time
  int steps = 10, warmup = 3;  // measured, before them
};

// Throws UsageError.
Outline measure_outline(const OutlineOptions& options);

}  // namespace weft
