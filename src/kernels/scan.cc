// The plain scan, which is the definition, and the choice between it and Highway's.
#include "kernels/scan.h"

#include <algorithm>

namespace weft::kernels {

void scan_plain(std::span<const Deal::Run> runs, ScanState& state) {
  for (const Deal::Run& run : runs) {
    ScanBlock& block = state.blocks[run.block];
    for (std::int64_t i = 0; i < run.length; i += kScanChunk) {
      const std::int64_t chunk = std::min(kScanChunk, run.length - i);
      std::uint64_t bits = 0;
      for (std::int64_t j = 0; j < chunk; ++j) {
        const std::int64_t at = run.first + i + j;
        const float sum =
            state.residual != nullptr ? state.gradient[at] + state.residual[at] : state.gradient[at];
        const std::uint32_t key = std::bit_cast<std::uint32_t>(sum) & 0x7fff'ffffu;
        state.staged[at] = sum;
        state.largest = std::max(state.largest, key);
        bits |= std::uint64_t{key >= block.threshold} << j;
      }
      if (bits != 0) note(bits, static_cast<std::uint32_t>(run.local + i), block);
    }
  }
}

#if WEFT_HAVE_HIGHWAY
Scan fastest_scan() { return scan_simd; }
#else
Scan fastest_scan() { return scan_plain; }
#endif

}  // namespace weft::kernels
