#include "counted_new.h"

#include <atomic>
#include <cstdlib>
#include <new>

namespace {
std::atomic<std::uint64_t> calls{0};

[[maybe_unused]] void* counted(std::size_t bytes, std::size_t alignment) {
  calls.fetch_add(1, std::memory_order_relaxed);
  void* piece = alignment > 16
                    ? std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment)
                    : std::malloc(bytes);
  if (piece == nullptr) throw std::bad_alloc();
  return piece;
}
}  // namespace

std::uint64_t weft::testing::allocations() { return calls.load(); }

#if WEFT_COUNTS_ALLOCATIONS
// NOLINTBEGIN(misc-new-delete-overloads): all forms that the library uses
void* operator new(std::size_t bytes) { return counted(bytes, 0); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return counted(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* piece) noexcept { std::free(piece); }
void operator delete(void* piece, std::size_t) noexcept { std::free(piece); }
void operator delete(void* piece, std::align_val_t) noexcept { std::free(piece); }
void operator delete(void* piece, std::size_t, std::align_val_t) noexcept { std::free(piece); }
// NOLINTEND(misc-new-delete-overloads)
#endif
