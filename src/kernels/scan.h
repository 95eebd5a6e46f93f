// The inner loop of selection (kernels/select.h): staged = gradient + residual over runs of elements, noting
// the indices of those that reach their block's threshold. Plain, and with Highway for the widest
// instructions of the processor.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "patterns/deal.h"

namespace weft::kernels {

inline constexpr std::int64_t kScanChunk = 64;  // elements whose comparisons fill one word

// Where a block's candidates go. Once more than `limit` were noted nothing more is, and `open` is false.
struct ScanBlock {
  std::uint32_t threshold = 1;       // a magnitude_key, at least 1
  std::uint32_t* indices = nullptr;  // room for limit + kScanChunk
  std::size_t count = 0;
  std::size_t limit = 0;
  bool open = true;
};

struct ScanState {
  const float* gradient = nullptr;
  const float* residual = nullptr;  // or none: zeros
  float* staged = nullptr;
  ScanBlock* blocks = nullptr;
  std::uint32_t largest = 0;  // magnitude_key seen so far
};

using Scan = void (*)(std::span<const Deal::Run> runs, ScanState& state);

void scan_plain(std::span<const Deal::Run> runs, ScanState& state);
void scan_simd(std::span<const Deal::Run> runs, ScanState& state);  // only where Highway was found
Scan fastest_scan();

// Notes the elements `local` + i for each bit i that is set.
[[gnu::always_inline]] inline void note(std::uint64_t bits, std::uint32_t local, ScanBlock& block) {
  if (!block.open) return;
  std::uint32_t* next = block.indices + block.count;
  for (; bits != 0; bits &= bits - 1) *next++ = local + static_cast<std::uint32_t>(std::countr_zero(bits));
  block.count = static_cast<std::size_t>(next - block.indices);
  block.open = block.count <= block.limit;
}

}  // namespace weft::kernels
