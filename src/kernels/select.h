// Exact selection of the largest entries of gradient + residual, block by block, with error feedback in the
// same pass.
//
//   1  estimate_thresholds  from a sample, for each block a magnitude that a little more than its quota of
//                           elements reaches
//   2  accumulate           the one pass: staged = gradient + residual; elements that reach their block's
//                           threshold are noted as candidates (indices only); whatever is not finite is
//                           noticed
//   3  arrived              entries that a peer sent were added to `staged`: their indices become candidates
//                           too
//   4  cut                  just before block b is sent: its largest `quota` entries are taken out of
//                           `staged`
//
// Cutting is exact, whatever the thresholds: an element that is no candidate has not changed since the pass
// and is below the threshold, so if `quota` candidates still reach it, the largest are among them; if not (a
// bad sample, equal values, arrivals that cancelled), the block is read again. A threshold decides about
// time, never about the result.
//
// Order: |value| descending, then lower index. Zeros are never selected. Results are the same bits for any
// number of threads and in every build; kernels/scalar_sparse.h is the definition. Time: about one
// read-add-write pass over n plus a few nanoseconds for each candidate. `residual` is only read: a step that
// fails is rolled back by forgetting `staged`.
//
// NaN and infinity: accumulate() says so; do not cut what it condemned (nothing crashes, but the choice is
// arbitrary).
#pragma once

#include <bit>
#include <cstdint>
#include <span>
#include <vector>

#include "base/entries.h"
#include "kernels/scan.h"
#include "patterns/deal.h"

namespace weft {

// |x| as an integer: keys compare as magnitudes do, NaN above infinity. Key 0 is zero, 1 the smallest
// subnormal.
inline std::uint32_t magnitude_key(float x) { return std::bit_cast<std::uint32_t>(x) & 0x7fff'ffffu; }
inline constexpr std::uint32_t kInfinityKey = 0x7f80'0000u;

// The three vectors of a step, all of the deal's length. `staged` may be the memory of one of the others, or
// of none; an empty residual counts as zeros.
struct StagedStep {
  std::span<const float> gradient;
  std::span<const float> residual;
  std::span<float> staged;
};

// What is known of one block between the pass and its cut.
struct BlockCandidates {
  std::uint32_t threshold = 1;  // a magnitude_key, at least 1
  std::int64_t quota = 0;       // as estimated for
  // What the cuts of earlier steps have taught: of this many times its quota the block needs candidates. A
  // residual is not the same in all blocks, as one of them is owned and the others are sent.
  double aim = 1;
  std::int64_t read_again = 0;  // cuts that candidates were not enough for
  bool complete = false;        // every element that reaches the threshold is in indices()
  std::size_t count = 0;
  // The first `count` are the candidates, local, increasing; the rest is room.
  std::vector<std::uint32_t> room;
  std::vector<std::uint32_t> scratch;  // of arrived() and cut()
  std::vector<float> values;           // of cut()

  std::span<const std::uint32_t> indices() const { return {room.data(), count}; }
};

// The state of a step, one per vector in flight. Kept between steps, it asks for no memory once it is warm.
struct Candidates {
  std::vector<BlockCandidates> blocks;
  std::vector<std::vector<BlockCandidates>> of_thread;  // of accumulate() with more than one thread
  std::vector<std::vector<kernels::ScanBlock>> scans;   // of accumulate()
  std::vector<std::uint32_t> sample;                    // of estimate_thresholds()
  std::int64_t sampled = 0;                             // elements that the last one looked at
};

struct Verdict {
  bool finite = true;
  std::int64_t first_non_finite = -1;  // index in the vector
};

// quotas[b] for each block of the deal. Reads a few hundred thousand elements at most. Throws UsageError for
// vectors or quotas of another length than the deal's, and for blocks of 2^32 elements and more.
void estimate_thresholds(const StagedStep& step, const Deal& deal, std::span<const std::int64_t> quotas,
                         Candidates& candidates);

// REQUIRES: estimate_thresholds() for this deal; it may be an earlier step's, which costs time where the data
// has changed.
Verdict accumulate(const StagedStep& step, const Deal& deal, Candidates& candidates, int threads = 1);

// Notes that entries were added to block `block` of staged at these local indices (strictly increasing, each
// below the block's count). Before or after they are added; different blocks may be noted and cut by
// different threads at once.
void arrived(std::span<const std::uint32_t> indices, int block, Candidates& candidates);

// Moves the largest `quota` entries of the block out of `staged` (they become zero there) into `out`, sorted
// by index. False if one of them is not finite (finite values may overflow as they are added up). A block is
// cut once per step; what is added to it afterwards stays. REQUIRES: accumulate() into `staged`; changes
// since then only by scatter_add() and arrived().
bool cut(std::span<float> staged, const Deal& deal, int block, std::int64_t quota, Candidates& candidates,
         Entries& out);

// All of it, for methods that want the local top-k: out[b] gets block b's quotas[b] largest entries. With one
// block, local indices are indices of the vector. If the verdict is not finite, nothing was cut.
Verdict select_topk(const StagedStep& step, const Deal& deal, std::span<const std::int64_t> quotas,
                    Candidates& candidates, std::span<Entries> out, int threads = 1);

}  // namespace weft
