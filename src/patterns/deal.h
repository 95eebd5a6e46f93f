// How the elements of a vector are given to blocks.
//
// dealt       Runs of 64 elements go round the blocks like cards. A row is one round: a run for each of the m
// blocks, and
//             each row begins at another block, by a fixed hash of its number. So every block is a fair
//             sample of every layer (quotas of equal size then lose nothing on layers that differ in scale),
//             a matrix whose row length is a multiple of 64 m puts no whole column into one block, and a
//             block still comes in whole cache lines.
//               run = index / 64,  row = run / m,  block = (run mod m + rotation(row)) mod m
// contiguous  Block b is one range (patterns/blocks.h), as in the paper.
//
// In both, the elements of a block are numbered from 0 in the order of the vector: `local` indices. Every row
// but the last gives each block exactly 64 elements, so all of this is arithmetic without tables.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/identity.h"
#include "patterns/blocks.h"

namespace weft {

class Deal {
 public:
  enum class Kind : std::uint8_t { dealt, contiguous };
  static constexpr std::int64_t kRun = 64;

  struct Place {
    int block = 0;
    std::int64_t local = 0;
    friend constexpr bool operator==(const Place&, const Place&) = default;
  };
  // Elements [first, first + length) of the vector are elements [local, local + length) of `block`.
  struct Run {
    std::int64_t first = 0;
    std::int64_t length = 0;
    std::int64_t local = 0;
    int block = 0;
  };

  // REQUIRES: blocks >= 1, 0 <= total < 2^61.
  constexpr Deal(Kind kind, int blocks, std::int64_t total)
      : contiguous_(kind == Kind::contiguous || blocks == 1),
        kind_(kind),
        even_(blocks, total),
        rows_(total / (kRun * blocks)),
        rest_(total % (kRun * blocks)),
        turn_(rotation(rows_)) {}

  constexpr Kind kind() const { return kind_; }
  constexpr int blocks() const { return even_.size(); }
  constexpr std::int64_t total() const { return even_.total(); }

  constexpr std::int64_t count(int block) const {
    if (contiguous_) return even_.count(block);
    return rows_ * kRun + std::clamp(rest_ - column(block, turn_) * kRun, std::int64_t{0}, kRun);
  }
  constexpr std::int64_t longest() const {
    return contiguous_ ? even_.count(0) : rows_ * kRun + std::min(rest_, kRun);
  }

  // Where block b begins when the blocks are laid end to end; first(blocks()) is the total.
  constexpr std::int64_t first(int block) const {
    if (contiguous_) return even_.begin(block);
    // The last row gives whole runs to `full` blocks from turn_ on (cyclically), and what is left to the one
    // after them.
    const int full = static_cast<int>(rest_ / kRun);
    const int straight = std::clamp(std::min(turn_ + full, blocks()), 0, block) - std::min(turn_, block);
    const int wrapped = std::clamp(turn_ + full - blocks(), 0, block);
    const std::int64_t part = (turn_ + full) % blocks() < block ? rest_ % kRun : 0;
    return block * rows_ * kRun + (straight + wrapped) * kRun + part;
  }

  // The index in the vector. REQUIRES: 0 <= local < count(block).
  constexpr std::int64_t global(int block, std::int64_t local) const {
    if (contiguous_) return even_.begin(block) + local;
    const std::int64_t row = local / kRun;
    return (row * blocks() + column(block, rotation(row))) * kRun + local % kRun;
  }

  // REQUIRES: 0 <= index < total().
  constexpr Place place(std::int64_t index) const {
    if (contiguous_) {
      const int block = block_around(index);
      return {block, index - even_.begin(block)};
    }
    const std::int64_t run = index / kRun;
    const std::int64_t row = run / blocks();
    return {block_at(static_cast<int>(run % blocks()), rotation(row)), row * kRun + index % kRun};
  }

  // How many of `k` entries block b may hold: floor(k e / n) - floor(k s / n) with [s, e) its range end to
  // end, so that they sum to k; but at least 1 unless the block is empty (or k < 1), and never more than its
  // elements.
  constexpr std::int64_t quota(int block, std::int64_t k) const {
    const std::int64_t mine = count(block);
    if (k <= 0 || mine == 0) return 0;
    if (k >= total()) return mine;
    const std::int64_t begin = first(block);
    const std::int64_t share = share_of(k, begin + mine) - share_of(k, begin);
    return std::clamp(share, std::int64_t{1}, mine);
  }

  // Calls visit(Run) for the runs of elements [begin, end), in the order of the vector. REQUIRES: 0 <= begin,
  // end <= total().
  template <class Visit>
  constexpr void for_each_run(std::int64_t begin, std::int64_t end, Visit&& visit) const {
    if (contiguous_) return for_each_range(begin, end, visit);
    std::int64_t row = begin / (kRun * blocks());
    int turn = rotation(row);
    int position = static_cast<int>(begin / kRun % blocks());
    for (std::int64_t at = begin; at < end;) {
      const std::int64_t next = std::min(end, (at / kRun + 1) * kRun);
      visit(Run{at, next - at, row * kRun + at % kRun, block_at(position, turn)});
      at = next;
      if (++position < blocks()) continue;
      position = 0;
      turn = rotation(++row);
    }
  }

  // Calls visit(Run) for the runs of one block, in the order of the vector.
  template <class Visit>
  constexpr void for_each_run_of(int block, Visit&& visit) const {
    const std::int64_t mine = count(block);
    const std::int64_t step = contiguous_ ? mine : kRun;
    for (std::int64_t local = 0; local < mine; local += step) {
      visit(Run{global(block, local), std::min(step, mine - local), local, block});
    }
  }

 private:
  // A row's first block.
  constexpr int rotation(std::int64_t row) const {
    const std::uint64_t hash = mix(static_cast<std::uint64_t>(row)) >> 32;
    return static_cast<int>((hash * static_cast<std::uint64_t>(even_.size())) >> 32);
  }
  constexpr int block_at(int column, int turn) const {
    return column + turn - (column + turn >= blocks() ? blocks() : 0);
  }
  constexpr int column(int block, int turn) const { return block - turn + (block < turn ? blocks() : 0); }

  constexpr int block_around(std::int64_t index) const {
    const std::int64_t shorter = total() / blocks();
    const std::int64_t longer = total() % blocks();  // blocks that have one more
    const std::int64_t split = longer * (shorter + 1);
    if (index < split) return static_cast<int>(index / (shorter + 1));
    return static_cast<int>(longer + (index - split) / shorter);
  }
  template <class Visit>
  constexpr void for_each_range(std::int64_t begin, std::int64_t end, Visit& visit) const {
    while (begin < end) {
      const int block = block_around(begin);
      const std::int64_t last = std::min(end, even_.begin(block + 1));
      visit(Run{begin, last - begin, begin - even_.begin(block), block});
      begin = last;
    }
  }

  // floor(k x / total) for k < total, x <= total: long division, bit by bit of x, as the product may need
  // more than 64 bits.
  constexpr std::int64_t share_of(std::int64_t k, std::int64_t x) const {
    std::int64_t quotient = 0;
    std::int64_t remainder = 0;
    for (int bit = 61; bit >= 0; --bit) {
      quotient *= 2;
      remainder = 2 * remainder + ((x >> bit & 1) != 0 ? k : 0);  // below 3 total
      for (; remainder >= total(); remainder -= total()) ++quotient;
    }
    return quotient;
  }

  bool contiguous_;  // one range a block; so is the deal to one block
  Kind kind_;
  Blocks even_;
  std::int64_t rows_;  // whole ones
  std::int64_t rest_;  // elements in the last row, if it is not whole
  int turn_;           // its rotation
};

namespace detail {
// Every element has one place and comes back from it; blocks lie end to end; both visitors agree with
// place().
constexpr bool deal_is_right(Deal::Kind kind, int blocks, std::int64_t total) {
  const Deal deal(kind, blocks, total);
  std::int64_t sum = 0;
  for (int b = 0; b < blocks; ++b) {
    if (deal.first(b) != sum || deal.count(b) > deal.longest()) return false;
    std::int64_t seen = 0;
    bool right = true;
    deal.for_each_run_of(b, [&](const Deal::Run& run) {
      right = right && run.local == seen && deal.place(run.first) == Deal::Place{b, seen};
      seen += run.length;
      right = right && deal.place(run.first + run.length - 1) == Deal::Place{b, seen - 1};
    });
    if (!right || seen != deal.count(b)) return false;
    sum += seen;
  }
  std::int64_t at = 0;
  bool right = deal.first(blocks) == total;
  deal.for_each_run(0, total, [&](const Deal::Run& run) {
    right = right && run.first == at && deal.place(at) == Deal::Place{run.block, run.local};
    right = right && deal.global(run.block, run.local + run.length - 1) == at + run.length - 1;
    at += run.length;
  });
  return right && at == total && sum == total;
}
}  // namespace detail
static_assert(detail::deal_is_right(Deal::Kind::dealt, 1, 0) &&
              detail::deal_is_right(Deal::Kind::dealt, 1, 100));
static_assert(detail::deal_is_right(Deal::Kind::dealt, 3, 1000) &&
              detail::deal_is_right(Deal::Kind::dealt, 8, 5));
static_assert(detail::deal_is_right(Deal::Kind::dealt, 7, 64 * 7 * 3) &&
              detail::deal_is_right(Deal::Kind::dealt, 5, 64 * 13));
static_assert(detail::deal_is_right(Deal::Kind::contiguous, 5, 3) &&
              detail::deal_is_right(Deal::Kind::contiguous, 7, 1000));
static_assert(Deal(Deal::Kind::contiguous, 4, 1ll << 40).quota(3, 1ll << 39) == 1ll << 37, "no overflow");

}  // namespace weft
