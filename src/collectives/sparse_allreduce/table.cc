// The table of sparse all-reduces, with what each sends. Terms: P ranks, k entries, quotas q_b of the blocks
// of a deal.
#include <algorithm>
#include <bit>
#include <cmath>
#include <string>

#include "collectives/registry.h"
#include "collectives/sparse_allreduce/call.h"
#include "patterns/bruck.h"
#include "weft/error.h"

namespace weft {

SparseRun spardl;
SparseRun topka;
SparseRun topkdsa;
SparseRun gtopk;
SparseRun oktopk;
SparseRun sparse_dense;
SparseRun sparse_dense_bf16;

namespace {

// Of a team, in B-SAG.
std::int64_t bruck_list(const SparseShape& s, std::int64_t quota) {
  const double share = std::pow(s.teams, s.overlap - 1);
  return static_cast<std::int64_t>(std::ceil(share * static_cast<double>(quota)));
}

// What the busiest position of a team sends: all quotas but its own, then the bags of the gather, then its
// SAG.
std::int64_t spardl_entries(const SparseShape& s) {
  const int m = s.size / s.teams;
  const Deal deal(s.blocks, m, s.length);
  std::int64_t total = 0;
  // Sums of quotas of blocks 0 .. , twice around.
  std::vector<std::int64_t> upto(2 * static_cast<std::size_t>(m) + 1);
  for (std::size_t b = 0; b + 1 < upto.size(); ++b) {
    upto[b + 1] = upto[b] + deal.quota(static_cast<int>(b) % m, s.k);
  }
  total = upto[static_cast<std::size_t>(m)];
  std::int64_t most = 0;
  for (int r = 0; r < m; ++r) {
    const std::int64_t own = deal.quota(r, s.k);
    std::int64_t sent = total - own;
    for (const Hop& hop : gather_hops(m)) {
      sent += upto[static_cast<std::size_t>(r) + static_cast<std::size_t>(hop.count)] -
              upto[static_cast<std::size_t>(r)];
    }
    if (s.teams > 1) sent += s.recursive ? own * log2_ceil(s.teams) : bruck_list(s, own) * (s.teams - 1);
    most = std::max(most, sent);
  }
  return most;
}

std::int64_t spardl_heads(const SparseShape& s) {
  const int m = s.size / s.teams;
  return 2 * (m - 1) + (s.teams == 1 ? 0 : (s.recursive ? log2_ceil(s.teams) : s.teams - 1));
}

int spardl_rounds(const SparseShape& s) { return 2 * log2_ceil(s.size / s.teams) + log2_ceil(s.teams); }

// P-1 lists of k, the own one at every hop.
std::int64_t topka_entries(const SparseShape& s) { return std::min(s.k, s.length) * (s.size - 1); }
std::int64_t topka_heads(const SparseShape& s) { return s.size - 1; }
int topka_rounds(const SparseShape& s) { return log2_ceil(s.size); }

// Entries of all regions together, at most.
std::int64_t topkdsa_sums(const SparseShape& s) {
  const std::int64_t k = std::min(s.k, s.length);
  return k < s.length / s.size ? k * s.size : s.length;
}
bool topkdsa_may_go_dense(const SparseShape& s) {
  return 3 * (8 * topkdsa_sums(s) + 4 * s.size) >= 8 * s.length;
}
// All of the selection to others; then the regions, the first ones of a bag at every hop: as entries, while
// all of them take less than 2/3 of the dense bytes, or dense (two values for an entry).
std::int64_t topkdsa_entries(const SparseShape& s) {
  const std::int64_t k = std::min(s.k, s.length);
  const std::int64_t longest = Deal(s.blocks, s.size, s.length).longest();
  const std::int64_t sums = topkdsa_sums(s);
  const bool always_sparse = !topkdsa_may_go_dense(s);
  std::int64_t sparse = 0;
  for (const Hop& hop : gather_hops(s.size)) {
    sparse += std::min(always_sparse ? sums : s.length / 3, hop.count * longest);
  }
  const std::int64_t dense = always_sparse ? 0 : ((s.size - 1) * longest + 1) / 2;
  return s.size == 1 ? 0 : k + std::max(sparse, dense);
}
// Heads of the lists in both steps, and 8-byte sizes.
std::int64_t topkdsa_heads(const SparseShape& s) { return 4 * (s.size - 1); }
int topkdsa_rounds(const SparseShape& s) { return s.size - 1 + 2 * log2_ceil(s.size); }

// Rank 0 has the most to send: its list to a child at every level.
std::int64_t gtopk_entries(const SparseShape& s) { return std::min(s.k, s.length) * log2_ceil(s.size); }
std::int64_t gtopk_heads(const SparseShape& s) { return log2_ceil(s.size); }
int gtopk_rounds(const SparseShape& s) { return 2 * log2_ceil(s.size); }

std::int64_t oktopk_entries(const SparseShape& s) {
  return (3 * std::min(s.k, s.length) * (s.size - 1) + s.size - 1) / s.size;
}
// Heads of the lists in steps 3, 5, 6, and 8-byte counts.
std::int64_t oktopk_heads(const SparseShape& s) { return 5 * (s.size - 1); }
int oktopk_rounds(const SparseShape& s) { return 2 * (s.size - 1) + 2 * log2_ceil(s.size); }

Shape dense_shape(const SparseShape& s, std::size_t element_bytes) {
  return {.size = s.size,
          .count = s.length,
          .element_bytes = element_bytes,
          .node_size = s.node_size,
          .micro_op_bytes = s.micro_op_bytes};
}
template <std::size_t element_bytes>
std::int64_t dense_words(const SparseShape& s) {
  const Shape shape = dense_shape(s, element_bytes);
  return static_cast<std::int64_t>((pick(Family::all_reduce, s.all_reduce, shape, s.link).bytes(shape) + 3) /
                                   4);
}
template <std::size_t element_bytes>
int dense_rounds(const SparseShape& s) {
  const Shape shape = dense_shape(s, element_bytes);
  return pick(Family::all_reduce, s.all_reduce, shape, s.link).rounds(shape);
}
template <std::size_t element_bytes>
double dense_seconds(const SparseShape& s, const LinkCost& link) {
  const Shape shape = dense_shape(s, element_bytes);
  return pick(Family::all_reduce, s.all_reduce, shape, link).seconds(shape, link);
}
std::int64_t no_entries(const SparseShape&) { return 0; }

// Rows keep their place: it is in the fingerprint.
const SparseAlgorithm kRows[] = {
    {.name = "spardl",
     .summary = "blocks are cut again at every hop, so no message grows; 2 log2 P rounds, teams for fewer",
     .entries = spardl_entries,
     .heads = spardl_heads,
     .rounds = spardl_rounds,
     .run = &spardl,
     .exact = true,
     .teams = true},
    {.name = "topka",
     .summary = "everybody's k largest to everybody; log2 P rounds, the result has up to k P entries",
     .entries = topka_entries,
     .heads = topka_heads,
     .rounds = topka_rounds,
     .run = &topka,
     .exact = true,
     .sums_selections = true},
    {.name = "topkdsa",
     .summary = "everybody's k largest to the owners of regions, whose sums go to everybody, sparse or dense "
                "(SparCML)",
     .entries = topkdsa_entries,
     .heads = topkdsa_heads,
     .rounds = topkdsa_rounds,
     .run = &topkdsa,
     .exact = false,
     .may_go_dense = topkdsa_may_go_dense},
    {.name = "gtopk",
     .summary = "a tree whose nodes keep the k largest of two lists; 2 log2 P rounds",
     .entries = gtopk_entries,
     .heads = gtopk_heads,
     .rounds = gtopk_rounds,
     .run = &gtopk,
     .exact = true},
    {.name = "oktopk",
     .summary = "thresholds kept for many steps, balanced regions: about k entries, 2 P rounds",
     .entries = oktopk_entries,
     .heads = oktopk_heads,
     .rounds = oktopk_rounds,
     .run = &oktopk,
     .exact = false},
    {.name = "dense",
     .summary = "the whole vector in float32, by the fastest dense all-reduce",
     .entries = no_entries,
     .heads = dense_words<4>,
     .rounds = dense_rounds<4>,
     .run = &sparse_dense,
     .exact = true,
     .lossless = true,
     .selects = false,
     .level_seconds = dense_seconds<4>},
    {.name = "dense-bf16",
     .summary = "the whole vector in bfloat16, by the fastest dense all-reduce",
     .entries = no_entries,
     .heads = dense_words<2>,
     .rounds = dense_rounds<2>,
     .run = &sparse_dense_bf16,
     .exact = false,
     .selects = false,
     .level_seconds = dense_seconds<2>},
};

}  // namespace

std::span<const SparseAlgorithm> sparse_algorithms() { return kRows; }

const SparseAlgorithm& find_sparse_algorithm(std::string_view name) {
  std::string names;
  for (const SparseAlgorithm& row : kRows) {
    if (row.name == name) return row;
    names += (names.empty() ? "" : ", ") + std::string(row.name);
  }
  throw UsageError("sparse_all_reduce: '" + std::string(name) + "' is none of: " + names);
}

// Indices of E entries in lists that span S elements take min over r of E (r+1) + S / 2^r bits
// (wire/codec.h), and where lists are about as dense as the result S is E n/k. Every list has its head, its
// coding, filling, and what its rounded quota adds: 8 bytes.
std::int64_t payload_bytes(const SparseAlgorithm& row, const SparseShape& shape) {
  const std::int64_t entries = row.entries(shape);
  const std::int64_t plain = 8 * entries + 4 * row.heads(shape);
  const bool dense = entries == 0 || (row.may_go_dense != nullptr && row.may_go_dense(shape));
  if (dense || shape.codec == wire::SparseCodec::coo) return plain;
  const auto coded = [&](double entry_bytes) {
    return static_cast<std::int64_t>(std::ceil(entry_bytes * static_cast<double>(entries))) +
           8 * row.heads(shape);
  };
  if (shape.entry_bytes > 0) return coded(shape.entry_bytes);
  const double spacing =
      static_cast<double>(shape.length) / static_cast<double>(std::max<std::int64_t>(1, shape.k));
  double bits = spacing;
  for (int r = 1; r < 32; ++r) bits = std::min(bits, r + 1 + std::ldexp(spacing, -r));
  bits += shape.codec == wire::SparseCodec::packed_bf16 ? 16 : 32;
  return coded(bits / 8);
}

double sparse_wire_seconds(const SparseAlgorithm& row, const SparseShape& shape, const LinkCost& link) {
  if (shape.node_size > 1 && row.level_seconds != nullptr) return row.level_seconds(shape, link);
  return row.rounds(shape) * link.hop_seconds +
         static_cast<double>(payload_bytes(row, shape)) * link.seconds_per_byte;
}

TeamChoice choose_teams(int size, std::int64_t length, std::int64_t k, const LinkCost& link,
                        wire::SparseCodec codec, std::string_view gather, const TeamFigures& measured) {
  TeamChoice best;
  double least = 0;
  for (int teams = 1; teams <= size; ++teams) {
    if (size % teams != 0) continue;
    for (const bool recursive : {true, false}) {
      if (teams > 1 && recursive && !std::has_single_bit(static_cast<unsigned>(teams))) continue;
      if (teams == 1 && (recursive || gather != "auto")) continue;
      if ((recursive && gather == "b-sag") || (!recursive && gather == "r-sag")) continue;
      const SparseShape shape{.size = size,
                              .length = length,
                              .k = k,
                              .teams = teams,
                              .recursive = recursive,
                              .codec = codec,
                              .entry_bytes = measured.entry_bytes,
                              .overlap = measured.overlap};
      const double seconds = sparse_wire_seconds(kRows[0], shape, link);
      if (least != 0 && seconds >= least) continue;
      least = seconds;
      best = {.teams = teams, .recursive = recursive};
    }
  }
  return best;
}

}  // namespace weft
