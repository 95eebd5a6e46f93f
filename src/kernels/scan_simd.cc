// The scan for every instruction set that Highway knows on this architecture; the widest that the processor
// has is taken at run time. This file is compiled once for each of them (foreach_target.h includes it again).
// Empty without Highway.
#if WEFT_HAVE_HIGHWAY

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/scan_simd.cc"
#include <hwy/foreach_target.h>
// foreach_target.h comes first
#include <hwy/highway.h>

#include "kernels/scan.h"

HWY_BEFORE_NAMESPACE();
namespace weft::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Sixteen lanes at most: all chunks are whole vectors, and a mask fits in a word everywhere.
using Floats = hn::CappedTag<float, 16>;
using Ints = hn::RebindToSigned<Floats>;
using IntVec = hn::Vec<Ints>;

// One vector: adds, stores, and returns a bit for each element that reaches the threshold. Keys are below
// 2^31, so signed comparisons do, which every instruction set has.
template <bool kResidual>
HWY_INLINE std::uint64_t add_and_compare(const ScanState& state, std::int64_t at, IntVec below,
                                         IntVec& largest) {
  const Floats f;
  const Ints d;
  auto sum = hn::LoadU(f, state.gradient + at);
  if constexpr (kResidual) sum = hn::Add(sum, hn::LoadU(f, state.residual + at));
  hn::StoreU(sum, f, state.staged + at);
  const IntVec key = hn::And(hn::BitCast(d, sum), hn::Set(d, 0x7fff'ffff));
  largest = hn::Max(largest, key);
  alignas(8) std::uint8_t bytes[8] = {};
  hn::StoreMaskBits(d, hn::Gt(key, below), bytes);
  std::uint64_t bits;
  hwy::CopyBytes<8>(bytes, &bits);
  return bits;
}

template <bool kResidual>
HWY_INLINE std::uint64_t add_and_compare_one(const ScanState& state, std::int64_t at, std::uint32_t threshold,
                                             std::int32_t& largest) {
  const float sum = kResidual ? state.gradient[at] + state.residual[at] : state.gradient[at];
  state.staged[at] = sum;
  const std::uint32_t key = std::bit_cast<std::uint32_t>(sum) & 0x7fff'ffffu;
  largest = HWY_MAX(largest, static_cast<std::int32_t>(key));
  return key >= threshold ? 1 : 0;
}

template <bool kResidual>
HWY_INLINE void scan_runs(std::span<const Deal::Run> runs, ScanState& state) {
  const Ints d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  IntVec largest = hn::Zero(d);
  std::int32_t largest_of_rest = 0;
  for (const Deal::Run& run : runs) {
    ScanBlock& block = state.blocks[run.block];
    const IntVec below = hn::Set(d, static_cast<std::int32_t>(block.threshold - 1));
    const std::int64_t whole = run.length & ~(kScanChunk - 1);
    for (std::int64_t i = 0; i < whole; i += kScanChunk) {
      std::uint64_t bits = 0;
      for (std::int64_t j = 0; j < kScanChunk; j += lanes) {
        bits |= add_and_compare<kResidual>(state, run.first + i + j, below, largest) << j;
      }
      if (bits != 0) note(bits, static_cast<std::uint32_t>(run.local + i), block);
    }
    std::uint64_t bits = 0;
    for (std::int64_t i = whole; i < run.length; ++i) {
      bits |= add_and_compare_one<kResidual>(state, run.first + i, block.threshold, largest_of_rest)
              << (i - whole);
    }
    if (bits != 0) note(bits, static_cast<std::uint32_t>(run.local + whole), block);
  }
  const std::int32_t found = HWY_MAX(hn::GetLane(hn::MaxOfLanes(d, largest)), largest_of_rest);
  state.largest = HWY_MAX(state.largest, static_cast<std::uint32_t>(found));
}

void scan(std::span<const Deal::Run> runs, ScanState& state) {
  if (state.residual != nullptr)
    scan_runs<true>(runs, state);
  else
    scan_runs<false>(runs, state);
}

}  // namespace weft::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace weft::kernels {
HWY_EXPORT(scan);
void scan_simd(std::span<const Deal::Run> runs, ScanState& state) { HWY_DYNAMIC_DISPATCH(scan)(runs, state); }
}  // namespace weft::kernels
#endif

#endif  // WEFT_HAVE_HIGHWAY
