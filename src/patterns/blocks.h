// How a vector is cut into blocks, one for each rank.
//
// Even blocks differ by at most one element: of n elements in `size` blocks the first n mod size blocks have
// one more. (Not [b*n/size, (b+1)*n/size): that product overflows, and which blocks are longer is harder to
// see.) Uneven blocks are given by their offsets.
#pragma once

#include <cstdint>

namespace weft {

class Blocks {
 public:
  constexpr Blocks(int size, std::int64_t total) : size_(size), total_(total) {}
  // offsets[b] is where block b begins, offsets[size] the total; they must outlive this.
  constexpr Blocks(int size, const std::int64_t* offsets)
      : size_(size), total_(offsets[size]), offsets_(offsets) {}

  constexpr int size() const { return size_; }
  constexpr std::int64_t total() const { return total_; }
  constexpr std::int64_t begin(int block) const {
    if (offsets_ != nullptr) return offsets_[block];
    const std::int64_t longer = total_ % size_;
    return block * (total_ / size_) + (block < longer ? block : longer);
  }
  constexpr std::int64_t count(int block) const { return begin(block + 1) - begin(block); }
  // Elements of blocks first, first+1, ... (cyclically), `num` of them.
  constexpr std::int64_t count(int first, int num) const {
    const int last = first + num;
    if (last <= size_) return begin(last) - begin(first);
    return begin(size_) - begin(first) + begin(last - size_);
  }

 private:
  int size_;
  std::int64_t total_;
  const std::int64_t* offsets_ = nullptr;
};

namespace detail {
constexpr bool blocks_cover(int size, std::int64_t total) {
  const Blocks blocks(size, total);
  std::int64_t sum = 0;
  for (int b = 0; b < size; ++b) {
    if (blocks.begin(b) != sum || blocks.count(b) < total / size || blocks.count(b) > total / size + 1)
      return false;
    sum += blocks.count(b);
  }
  return sum == total;
}
}  // namespace detail
static_assert(detail::blocks_cover(1, 0) && detail::blocks_cover(1, 7) && detail::blocks_cover(5, 3));
static_assert(detail::blocks_cover(8, 64) && detail::blocks_cover(7, 1000) && detail::blocks_cover(33, 0));
static_assert(Blocks(3, 1ll << 62).count(0) == (1ll << 62) / 3 + 1, "no overflow");

}  // namespace weft
