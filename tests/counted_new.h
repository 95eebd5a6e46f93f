// Counts what this process asks the system for: linked into a test, counted_new.cc replaces operator new.
#pragma once

#include <cstdint>

// ThreadSanitizer brings an operator new of its own, which cannot be replaced.
#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define WEFT_COUNTS_ALLOCATIONS 0
#endif
#endif
#if defined(__SANITIZE_THREAD__)
#define WEFT_COUNTS_ALLOCATIONS 0
#endif
#ifndef WEFT_COUNTS_ALLOCATIONS
#define WEFT_COUNTS_ALLOCATIONS 1
#endif

namespace weft::testing {

inline constexpr bool kCountsAllocations = WEFT_COUNTS_ALLOCATIONS != 0;
std::uint64_t allocations();  // so far, by all threads

}  // namespace weft::testing
