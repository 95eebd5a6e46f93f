// A vector whose memory asks for large pages once it is long: passes that touch one element in a hundred are
// bound by address translation where pages are small (and the kernel gives large ones on request only).
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>
#include <vector>

namespace weft {

template <class T>
class LargePages {
 public:
  using value_type = T;
  LargePages() = default;
  template <class U>
  LargePages(const LargePages<U>&) {}  // NOLINT(google-explicit-constructor)

  T* allocate(std::size_t count) {
    const std::size_t bytes = count * sizeof(T);
    if (bytes < kPage) return std::allocator<T>().allocate(count);
    void* const piece = ::operator new(bytes, std::align_val_t{kPage});
    ::madvise(piece, bytes / kPage * kPage, MADV_HUGEPAGE);  // a wish: nothing depends on its being granted
    return static_cast<T*>(piece);
  }
  void deallocate(T* piece, std::size_t count) noexcept {
    if (count * sizeof(T) < kPage)
      std::allocator<T>().deallocate(piece, count);
    else
      ::operator delete(piece, std::align_val_t{kPage});
  }
  template <class U>
  bool operator==(const LargePages<U>&) const {
    return true;
  }

 private:
  static constexpr std::size_t kPage = std::size_t{2} << 20;
};

template <class T>
using LargeVector = std::vector<T, LargePages<T>>;

}  // namespace weft
