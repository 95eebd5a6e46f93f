// The tables. Formulas stand in the rows, in these terms: size P, vector of n bytes, q = n/P the shorter
// block, a a hop's latency, b seconds per byte, g seconds per folded byte. Formulas of bytes are exact, as
// are those of rounds; seconds are a model: one port per rank, hops one after the other, and a node's ranks
// share its port to the other nodes. A hop costs what the level that it crosses costs: where one of its
// messages leaves a node the scale-out figures, else the scale-up ones.
#include "collectives/registry.h"

#include <algorithm>
#include <iterator>
#include <string>

#include "patterns/alltoall.h"
#include "patterns/bruck.h"
#include "patterns/recursive_doubling.h"
#include "patterns/ring.h"
#include "weft/error.h"
#include "wire/frame.h"

namespace weft {

AllReduceRun all_reduce_ring, all_reduce_recursive_doubling, all_reduce_rabenseifner, all_reduce_direct,
    all_reduce_two_level;
ReduceScatterRun reduce_scatter_ring, reduce_scatter_two_level;
AllGatherRun all_gather_ring, all_gather_bruck, all_gather_two_level;
BroadcastRun broadcast_binomial, broadcast_scatter_allgather, broadcast_chain;
BarrierRun barrier_dissemination;
AllToAllRun all_to_all_pairwise, all_to_all_bruck, all_to_all_hierarchical;

namespace {

bool any(const Shape&) { return true; }
bool even(const Shape& s) { return !s.uneven; }
bool with_nodes(const Shape& s) { return s.node_size >= 1 && s.size % s.node_size == 0; }

std::uint64_t in_bytes(const Shape& s, std::int64_t elements) {
  return static_cast<std::uint64_t>(elements) * s.element_bytes;
}
std::int64_t short_block(const Shape& s) { return s.count / s.size; }
std::int64_t long_block(const Shape& s) { return Blocks(s.size, s.count).count(0); }

double n(const Shape& s) { return static_cast<double>(s.bytes()); }
double share(const Shape& s) { return n(s) * (s.size - 1) / s.size; }  // all but one block
double part(const Shape& s) { return n(s) / s.size; }
double message(const LinkCost& link, double bytes) {
  return link.hop_seconds + bytes * link.seconds_per_byte;
}
// Of the slowest hop between two ranks.
LinkCost slowest(const Shape& s, const LinkCost& link) { return s.nodes() == 1 ? link.inside() : link; }
// Everybody sends to rank + gap: so many ranks of a node send out of it at once.
double shift_seconds(const Shape& s, const LinkCost& link, int gap, double bytes) {
  if (s.nodes() == 1) return message(link.inside(), bytes);
  return message(link, bytes * std::min({gap, s.size - gap, s.node_size}));
}
// Everybody exchanges with rank XOR distance (a power of two).
LinkCost partners(const Shape& s, const LinkCost& link, int distance) {
  const bool aligned = s.node_size % (2 * distance) == 0;
  LinkCost out = s.nodes() == 1 || aligned ? link.inside() : link;
  if (s.nodes() > 1 && distance >= s.node_size) out.seconds_per_byte *= s.node_size;
  return out;
}
// A message that passes `hops` ranks of a ring, of whose edges one a node leaves it.
double around_seconds(const Shape& s, const LinkCost& link, int hops) {
  const int trips = (hops + s.size - 1) / s.size;
  const int crossing = s.nodes() == 1 ? 0 : std::min(hops, trips * s.nodes());
  return crossing * link.hop_seconds + (hops - crossing) * link.inside().hop_seconds;
}

// The bags of a Bruck gather, as sent by rank 0: the longer blocks come first, so nobody sends more.
std::int64_t gathered(const Shape& s) {
  std::int64_t elements = 0;
  for (const Hop& hop : gather_hops(s.size)) elements += Blocks(s.size, s.count).count(0, hop.count);
  return elements;
}
double gather_seconds(const Shape& s, const LinkCost& link) {
  double seconds = 0;
  for (const Hop& hop : gather_hops(s.size)) {
    seconds += shift_seconds(s, link, hop.gap, hop.count * part(s));
  }
  return seconds;
}
double doubling_seconds(const Shape& s, const LinkCost& link) {
  const double fold = n(s) * link.fold_seconds_per_byte;
  double seconds = doubling_has_extras(s.size) ? 2 * message(slowest(s, link), n(s)) + fold : 0;
  for (int h = 0; h < doubling_exchanges(s.size); ++h)
    seconds += message(partners(s, link, 1 << h), n(s)) + fold;
  return seconds;
}
double pairwise_seconds(const Shape& s, const LinkCost& link) {
  double seconds = 0;
  for (int gap = 1; gap < s.size; ++gap) seconds += shift_seconds(s, link, gap, part(s));
  return seconds;
}
// A ring's two trips: all blocks twice, less the two neighbours that rank r and r+1 own; the shortest such
// two: both short if two are.
std::int64_t ring_elements(int size, std::int64_t count) {
  const bool one_is_short = size - count % size == 1;
  return size == 1 ? 0 : 2 * count - 2 * (count / size) - (one_is_short ? 1 : 0);
}

// Two levels (dense/two_level.h): one trip around a node's ring, and one along its columns, all of which go
// through the node's port.
double inside_seconds(const Shape& s, const LinkCost& link) {
  return (s.node_size - 1) * link.inside().hop_seconds +
         n(s) * (s.node_size - 1) / s.node_size * link.inside().seconds_per_byte;
}
double columns_seconds(const Shape& s, const LinkCost& link) {
  return (s.nodes() - 1) * link.hop_seconds + n(s) * (s.nodes() - 1) / s.nodes() * link.seconds_per_byte;
}
std::uint64_t two_level_all_reduce_bytes(const Shape& s) {
  const Blocks blocks(s.node_size, s.count);
  std::int64_t most = 0;
  for (int local = 0; local < s.node_size; ++local) {
    const std::int64_t own = blocks.count(local), next = blocks.count((local + 1) % s.node_size);
    most = std::max(most, (s.count - own) + ring_elements(s.nodes(), own) + (s.count - next));
  }
  return in_bytes(s, most);
}
std::uint64_t two_level_gather_bytes(const Shape& s) {
  const NodeGrid grid{s.size, s.node_size};
  const Blocks blocks(s.size, s.count);
  const auto column = [&](int local) {
    std::int64_t elements = 0;
    for (int node = 0; node < s.nodes(); ++node) elements += blocks.count(grid.rank_of(node, local));
    return elements;
  };
  std::int64_t most = 0;
  for (int local = 0; local < s.node_size; ++local) {
    // The last node's blocks are the shortest, and somebody's next node is the last.
    const std::int64_t along = column(local) - blocks.count(grid.rank_of(s.nodes() - 1, local));
    most = std::max(most, along + s.count - column((local + 1) % s.node_size));
  }
  return in_bytes(s, most);
}

// To each neighbour what is for its column, to each other node what the neighbours have for this column, and
// 8-byte counts.
std::uint64_t hierarchical_bytes(const Shape& s, int rank, Counts counts) {
  const NodeGrid grid{s.size, s.node_size};
  const int node = grid.node_of(rank), local = grid.local_of(rank);
  std::int64_t elements = 0;
  for (int to = 0; to < s.size; ++to) elements += grid.local_of(to) == local ? 0 : counts(rank, to);
  for (int other = 0; other < s.nodes(); ++other) {
    for (int from = 0; other != node && from < s.node_size; ++from)
      elements += counts(grid.rank_of(node, from), grid.rank_of(other, local));
  }
  return in_bytes(s, elements) + 8u * static_cast<std::uint64_t>((s.node_size - 1) * s.nodes());
}

std::int64_t bruck_parts(const Shape& s) {
  std::int64_t parts = 0;
  for (int hop = 0; hop < log2_ceil(s.size); ++hop) parts += bruck_slots(s.size, hop);
  return parts;
}

const Algorithm kAllReduce[] = {
    {.name = "ring",
     .summary = "two trips around a ring, pipelined; least bytes, one stream between nodes",
     .supports = any,
     .seconds =
         [](const Shape& s, const LinkCost& link) {
           return around_seconds(s, link, ring_hops(s.size)) +
                  share(s) * (2 * slowest(s, link).seconds_per_byte + link.fold_seconds_per_byte);
         },
     .bytes = [](const Shape& s) { return in_bytes(s, ring_elements(s.size, s.count)); },
     .rounds = [](const Shape& s) { return ring_hops(s.size); },
     .run = &all_reduce_ring},
    {.name = "recursive_doubling",
     .summary = "whole vectors between partners; fewest hops, for short vectors",
     .supports = any,
     .seconds = doubling_seconds,
     .bytes =
         [](const Shape& s) {
           return in_bytes(s, s.count * (doubling_exchanges(s.size) + (doubling_has_extras(s.size) ? 1 : 0)));
         },
     .rounds = [](const Shape& s) { return doubling_hops(s.size); },
     .run = &all_reduce_recursive_doubling},
    {.name = "rabenseifner",
     .summary = "messages halve, then double, on the Bruck pattern; least bytes in 2 log2 P hops",
     .supports = any,
     .seconds =
         [](const Shape& s, const LinkCost& link) {
           // Every hop has another partner and begins anew: 2 % of the link, as measured
           // (docs/results/engine.md).
           constexpr double kNewPartners = 1.02;
           return 2 * kNewPartners * gather_seconds(s, link) + share(s) * link.fold_seconds_per_byte;
         },
     .bytes = [](const Shape& s) { return in_bytes(s, s.count - long_block(s) + gathered(s)); },
     .rounds = [](const Shape& s) { return 2 * log2_ceil(s.size); },
     .run = &all_reduce_rabenseifner},
    {.name = "direct",
     .summary = "each block straight to its owner and back; adds in rank order; where ranks share memory",
     .supports = any,
     .seconds =
         [](const Shape& s, const LinkCost& link) {
           return 2 * pairwise_seconds(s, link) + share(s) * link.fold_seconds_per_byte;
         },
     .bytes =
         [](const Shape& s) { return s.size == 1 ? 0 : in_bytes(s, s.count + (s.size - 2) * long_block(s)); },
     .rounds = [](const Shape& s) { return s.size == 1 ? 0 : 2; },
     .run = &all_reduce_direct},
    {.name = "two_level",
     .summary = "scattered inside the node, summed between nodes, gathered inside; least bytes between nodes",
     .supports = with_nodes,
     .seconds =
         [](const Shape& s, const LinkCost& link) {
           return 2 * (inside_seconds(s, link) + columns_seconds(s, link)) +
                  share(s) * link.fold_seconds_per_byte;
         },
     .bytes = two_level_all_reduce_bytes,
     .rounds = [](const Shape& s) { return 2 * (s.node_size - 1) + ring_hops(s.nodes()); },
     .run = &all_reduce_two_level},
};

const Algorithm kReduceScatter[] = {
    {.name = "ring",
     .summary = "one trip around a ring, pipelined",
     .supports = any,
     .seconds =
         [](const Shape& s, const LinkCost& link) {
           return around_seconds(s, link, s.size - 1) +
                  share(s) * (slowest(s, link).seconds_per_byte + link.fold_seconds_per_byte);
         },
     .bytes = [](const Shape& s) { return in_bytes(s, s.count - short_block(s)); },
     .rounds = [](const Shape& s) { return s.size - 1; },
     .run = &reduce_scatter_ring},
    {.name = "two_level",
     .summary = "inside the node to the owner's column, then between nodes; least bytes between nodes",
     .supports = with_nodes,
     .seconds =
         [](const Shape& s, const LinkCost& link) {
           return inside_seconds(s, link) + columns_seconds(s, link) + share(s) * link.fold_seconds_per_byte;
         },
     .bytes = [](const Shape& s) { return in_bytes(s, s.count - short_block(s)); },
     .rounds = [](const Shape& s) { return s.node_size - 1 + s.nodes() - 1; },
     .run = &reduce_scatter_two_level},
};

const Algorithm kAllGather[] = {
    {.name = "ring",
     .summary = "one trip around a ring, pipelined; one stream between nodes",
     .supports = any,
     .seconds =
         [](const Shape& s, const LinkCost& link) {
           return around_seconds(s, link, s.size - 1) + share(s) * slowest(s, link).seconds_per_byte;
         },
     .bytes = [](const Shape& s) { return in_bytes(s, s.count - short_block(s)); },
     .rounds = [](const Shape& s) { return s.size - 1; },
     .run = &all_gather_ring},
    {.name = "bruck",
     .summary = "bags of blocks that double; fewest hops",
     .supports = any,
     .seconds = gather_seconds,
     .bytes = [](const Shape& s) { return in_bytes(s, gathered(s)); },
     .rounds = [](const Shape& s) { return log2_ceil(s.size); },
     .run = &all_gather_bruck},
    {.name = "two_level",
     .summary = "between nodes along the columns, then inside the node; least bytes between nodes",
     .supports = with_nodes,
     .seconds = [](const Shape& s,
                   const LinkCost& link) { return inside_seconds(s, link) + columns_seconds(s, link); },
     .bytes = two_level_gather_bytes,
     .rounds = [](const Shape& s) { return s.node_size - 1 + s.nodes() - 1; },
     .run = &all_gather_two_level},
};

const Algorithm kBroadcast[] = {
    {.name = "binomial",
     .summary = "a tree; fewest hops, for short vectors",
     .supports = any,
     .seconds =
         [](const Shape& s, const LinkCost& link) {
           double seconds = 0;
           for (int h = 0; h < log2_ceil(s.size); ++h) seconds += message(partners(s, link, 1 << h), n(s));
           return seconds;
         },
     .bytes = [](const Shape& s) { return in_bytes(s, s.count * log2_ceil(s.size)); },
     .rounds = [](const Shape& s) { return log2_ceil(s.size); },
     .run = &broadcast_binomial},
    {.name = "scatter_allgather",
     .summary = "the root sends every block once, then all ranks send; for long vectors",
     .supports = any,
     .seconds =
         [](const Shape& s, const LinkCost& link) {
           return log2_ceil(s.size) * slowest(s, link).hop_seconds +
                  share(s) * slowest(s, link).seconds_per_byte + gather_seconds(s, link);
         },
     .bytes = [](const Shape& s) { return in_bytes(s, s.count - long_block(s) + gathered(s)); },
     .rounds = [](const Shape& s) { return 2 * log2_ceil(s.size); },
     .run = &broadcast_scatter_allgather},
    {.name = "chain",
     .summary = "a pipeline from rank to rank; n bytes in all, for vectors of many micro-ops",
     .supports = any,
     .seconds =
         [](const Shape& s, const LinkCost& link) {
           const double piece = std::min(n(s), static_cast<double>(s.micro_op_bytes));
           if (s.size == 1) return 0.0;
           const int crossing = std::min(s.nodes() - 1, s.size - 2), rest = s.size - 2 - crossing;
           const double fill = crossing * message(link, piece) + rest * message(link.inside(), piece);
           return fill + message(slowest(s, link), n(s));
         },
     .bytes = [](const Shape& s) { return s.size == 1 ? 0 : s.bytes(); },
     .rounds = [](const Shape& s) { return std::min(2, s.size - 1); },
     .run = &broadcast_chain},
};

const Algorithm kBarrier[] = {
    {.name = "dissemination",
     .summary = "hears of twice as many ranks at every hop",
     .supports = any,
     .seconds = [](const Shape& s,
                   const LinkCost& link) { return log2_ceil(s.size) * slowest(s, link).hop_seconds; },
     .bytes = [](const Shape&) -> std::uint64_t { return 0; },
     .rounds = [](const Shape& s) { return log2_ceil(s.size); },
     .run = &barrier_dissemination},
};

const Algorithm kAllToAll[] = {
    {.name = "pairwise",
     .summary = "one permutation a hop; least bytes, for long messages",
     .supports = any,
     .seconds = pairwise_seconds,
     .bytes = [](const Shape& s) { return in_bytes(s, s.count - short_block(s)); },
     .rounds = [](const Shape& s) { return s.size - 1; },
     .run = &all_to_all_pairwise,
     .uneven_bytes =
         [](const Shape& s, int rank, Counts counts) {
           std::int64_t elements = 0;
           for (int to = 0; to < s.size; ++to) elements += to == rank ? 0 : counts(rank, to);
           return in_bytes(s, elements);
         }},
    {.name = "bruck",
     .summary = "parts jump by the digits of their distance; log2 P hops, for short messages of equal length",
     .supports = even,
     .seconds =
         [](const Shape& s, const LinkCost& link) {
           double seconds = 0;
           for (int hop = 0; hop < log2_ceil(s.size); ++hop) {
             const double bytes = static_cast<double>(bruck_slots(s.size, hop)) * part(s);
             seconds += shift_seconds(s, link, 1 << hop, bytes);
           }
           return seconds;
         },
     .bytes = [](const Shape& s) { return in_bytes(s, bruck_parts(s) * short_block(s)); },
     .rounds = [](const Shape& s) { return log2_ceil(s.size); },
     .run = &all_to_all_bruck},
    {.name = "hierarchical",
     .summary =
         "inside the node to the receiver's column, then between nodes; few messages on the slow network",
     .supports = with_nodes,
     .seconds =
         [](const Shape& s, const LinkCost& link) {
           if (s.node_size == 1 || s.nodes() == 1) return pairwise_seconds(s, link);
           const LinkCost near = link.inside();
           const double inside = message(near, s.nodes() * part(s)) + (s.uneven ? near.hop_seconds : 0);
           const double between = message(link, s.node_size * part(s) * s.node_size);
           return (s.node_size - 1) * inside + (s.nodes() - 1) * between;
         },
     .bytes =
         [](const Shape& s) {
           return in_bytes(s,
                           short_block(s) * ((s.node_size - 1) * s.nodes() + (s.nodes() - 1) * s.node_size));
         },
     .rounds = [](const Shape& s) { return (s.node_size - 1) * (s.uneven ? 2 : 1) + s.nodes() - 1; },
     .run = &all_to_all_hierarchical,
     .uneven_bytes = hierarchical_bytes},
};

}  // namespace

std::string_view name_of(Family family) { return wire::family_name(static_cast<std::size_t>(family)); }

std::span<const Algorithm> algorithms(Family family) {
  switch (family) {
    case Family::all_reduce:
      return kAllReduce;
    case Family::reduce_scatter:
      return kReduceScatter;
    case Family::all_gather:
      return kAllGather;
    case Family::broadcast:
      return kBroadcast;
    case Family::barrier:
      return kBarrier;
    case Family::all_to_all:
      return kAllToAll;
    case Family::message:
    case Family::sparse_all_reduce:  // sparse_allreduce/table.cc
      return {};
  }
  return {};
}

const Algorithm& find_algorithm(Family family, std::string_view name) {
  std::string names = "auto";
  for (const Algorithm& row : algorithms(family)) {
    if (row.name == name) return row;
    names += ", " + std::string(row.name);
  }
  throw UsageError(std::string(name_of(family)) + " has no algorithm '" + std::string(name) +
                   "'; there are: " + names);
}

const Algorithm& choose(Family family, const Shape& shape, const LinkCost& link) {
  const Algorithm* best = nullptr;
  double best_seconds = 0;
  for (const Algorithm& row : algorithms(family)) {
    if (!row.supports(shape)) continue;
    const double seconds = row.seconds(shape, link);
    // Formulas that are equal on paper differ in the last bits: that must not decide.
    if (best == nullptr || seconds < best_seconds * (1 - 1e-9)) {
      best = &row;
      best_seconds = seconds;
    }
  }
  if (best == nullptr)
    throw UsageError("no algorithm of " + std::string(name_of(family)) + " supports this call");
  return *best;
}

const Algorithm& pick(Family family, std::string_view name, const Shape& shape, const LinkCost& link) {
  if (name == "auto") return choose(family, shape, link);
  const Algorithm& row = find_algorithm(family, name);
  if (!row.supports(shape)) {
    throw UsageError(std::string(name_of(family)) + " by '" + std::string(name) +
                     "' does not support this call (size " + std::to_string(shape.size) +
                     (shape.uneven ? ", uneven parts" : "") + ", node_size " +
                     std::to_string(shape.node_size) + ")");
  }
  return row;
}

std::uint8_t row_of(Family family, const Algorithm& algorithm) {
  return static_cast<std::uint8_t>(&algorithm - algorithms(family).data());
}

}  // namespace weft
