// Lists of entries between ranks, for the methods that send whole lists: everybody's to everybody, one
// straight to each, and their sum. Bytes and entries are counted as sent.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "collectives/sparse_allreduce/call.h"
#include "weft/comm.h"

namespace weft {

// What is known of a list before it comes.
struct ListBounds {
  static constexpr std::int64_t kNone = -1;
  std::int64_t length = 0;     // its indices are below this; kNone: there is no such message
  std::int64_t max_count = 0;  // entries
};

// Ranks that gather from each other: first, first + stride, ... This rank is number `me` of them.
struct GatherRing {
  int size = 1;
  int me = 0;
  int first = 0;
  int stride = 1;
  int rank_at(int distance) const { return first + stride * ((me + distance + size) % size); }
};

// Bruck all-gather. lists[i] of the ring's number i goes to all of it; everybody decodes the same bytes.
// `non_finite` goes out in the head of the own list (which is then empty) and comes back true if it was so
// anywhere. Coding and decoding are the worker pool's business.
struct ListGather {
  std::span<Entries> lists;  // one for each of the ring
  std::vector<ListBounds> bounds;
  bool non_finite = false;
  GatherRing ring{.size = 0};  // 0: all ranks
};
// Rounds: ceil(log2 size). Sent: size-1 lists, the own one at every hop.
// REQUIRES: awaited in the expression that calls it, as all of these.
Task<void> gather_lists(Comm comm, const SparseCall& call, ListGather& gather);

// outgoing[j] goes straight to rank j, incoming[j] comes from it (j other than this rank). Destinations are
// rotated, so that no port is shared: at hop h rank r sends to r+h+1. `non_finite` as above.
struct ListExchange {
  explicit ListExchange(int size)
      : outgoing(static_cast<std::size_t>(size)),
        sent(static_cast<std::size_t>(size)),
        received(static_cast<std::size_t>(size)) {}
  std::vector<Entries> outgoing;
  std::span<Entries> incoming;
  std::vector<ListBounds> sent;
  std::vector<ListBounds> received;
  bool non_finite = false;
};
Task<void> exchange_lists(Comm comm, const SparseCall& call, ListExchange& exchange);

// Bruck all-gather of 63-bit numbers: values[r] is rank r's. 8 (size-1) bytes.
Task<void> gather_numbers(Comm comm, const SparseCall& call, std::vector<std::int64_t>& values);

// The sum of lists of a block of `length` elements, added in the order of the lists whatever they overlap:
// out[i] = ((x0 + x1) + x2) + ...; sums of zero are left out. False if one is not finite.
bool sum_lists(std::span<const Entries> lists, std::int64_t length, Entries& out);
// And what that costs in virtual time.
void spend_sum(const SparseCall& call, std::span<const Entries> lists);

}  // namespace weft
