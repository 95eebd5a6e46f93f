// The ring: every rank sends to rank + 1. A block travels once around and collects the sum (hops 0 .. size-2,
// it ends at its owner, rank b for block b), then once more and is copied (hops size-1 .. 2 size-3).
//
// At every hop, of both phases, rank r sends block r-1-hop and receives block r-2-hop: what is received at a
// hop is sent on at the next.
#pragma once

namespace weft {

constexpr int ring_hops(int size) { return 2 * (size - 1); }
constexpr bool ring_folds(int size, int hop) { return hop < size - 1; }
constexpr int ring_sent_block(int rank, int size, int hop) { return (rank + 2 * size - 1 - hop) % size; }
constexpr int ring_received_block(int rank, int size, int hop) { return (rank + 2 * size - 2 - hop) % size; }

namespace detail {
// Follows who has contributed to each block (a bit for each rank): the owners are complete at half-way, all
// ranks at the end, and nothing is added twice.
constexpr bool ring_is_complete(int size) {
  unsigned held[16][16] = {};
  const unsigned all = (1u << size) - 1;
  for (int r = 0; r < size; ++r) {
    for (int b = 0; b < size; ++b) held[r][b] = 1u << r;
  }
  for (int hop = 0; hop < ring_hops(size); ++hop) {
    unsigned sent[16] = {};
    for (int r = 0; r < size; ++r) sent[r] = held[r][ring_sent_block(r, size, hop)];
    for (int r = 0; r < size; ++r) {
      const int from = (r + size - 1) % size;
      const int block = ring_received_block(r, size, hop);
      if (block != ring_sent_block(from, size, hop)) return false;
      if (ring_folds(size, hop) && (held[r][block] & sent[from]) != 0) return false;
      held[r][block] = ring_folds(size, hop) ? held[r][block] | sent[from] : sent[from];
    }
    for (int r = 0; r < size && hop == size - 2; ++r) {
      if (held[r][r] != all) return false;
    }
  }
  for (int r = 0; r < size; ++r) {
    for (int b = 0; b < size; ++b) {
      if (held[r][b] != all) return false;
    }
  }
  return true;
}
}  // namespace detail
static_assert(detail::ring_is_complete(1) && detail::ring_is_complete(2) && detail::ring_is_complete(3));
static_assert(detail::ring_is_complete(5) && detail::ring_is_complete(8) && detail::ring_is_complete(13));

}  // namespace weft
