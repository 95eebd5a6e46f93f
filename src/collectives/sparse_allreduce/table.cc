// The table of sparse all-reduces, with what each sends. Terms: P ranks, k entries, quotas q_b of the blocks of a deal.
#include <algorithm>
#include <bit>
#include <string>

#include "collectives/sparse_allreduce/call.h"
#include "patterns/bruck.h"
#include "weft/error.h"

namespace weft {

SparseRun spardl;

namespace {

// What the busiest position of a team sends: all quotas but its own, then the bags of the gather, then its SAG.
std::int64_t spardl_entries(const SparseShape& s) {
  const int m = s.size / s.teams;
  const Deal deal(s.blocks, m, s.length);
  std::int64_t total = 0;
  std::vector<std::int64_t> upto(static_cast<std::size_t>(2 * m + 1));  // sums of quotas of blocks 0 .. , twice around
  for (int b = 0; b < 2 * m; ++b) {
    upto[static_cast<std::size_t>(b + 1)] = upto[static_cast<std::size_t>(b)] + deal.quota(b % m, s.k);
  }
  total = upto[static_cast<std::size_t>(m)];
  std::int64_t most = 0;
  for (int r = 0; r < m; ++r) {
    const std::int64_t own = deal.quota(r, s.k);
    std::int64_t sent = total - own;
    for (const Hop& hop : gather_hops(m)) {
      sent += upto[static_cast<std::size_t>(r + hop.count)] - upto[static_cast<std::size_t>(r)];
    }
    if (s.teams > 1) sent += own * (s.recursive ? log2_ceil(s.teams) : s.teams - 1);
    most = std::max(most, sent);
  }
  return most;
}

std::int64_t spardl_heads(const SparseShape& s) {
  const int m = s.size / s.teams;
  return 2 * (m - 1) + (s.teams == 1 ? 0 : (s.recursive ? log2_ceil(s.teams) : s.teams - 1));
}

int spardl_rounds(const SparseShape& s) { return 2 * log2_ceil(s.size / s.teams) + log2_ceil(s.teams); }

const SparseAlgorithm kRows[] = {
    {.name = "spardl",
     .summary = "blocks are cut again at every hop, so no message grows; 2 log2 P rounds, teams for fewer",
     .entries = spardl_entries,
     .heads = spardl_heads,
     .rounds = spardl_rounds,
     .run = &spardl,
     .exact = true},
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

double sparse_wire_seconds(const SparseAlgorithm& row, const SparseShape& shape, const LinkCost& link) {
  return row.rounds(shape) * link.hop_seconds + static_cast<double>(coo_bytes(row, shape)) * link.seconds_per_byte;
}

TeamChoice choose_teams(int size, std::int64_t length, std::int64_t k, const LinkCost& link) {
  TeamChoice best;
  double least = 0;
  for (int teams = 1; teams <= size; ++teams) {
    if (size % teams != 0) continue;
    for (const bool recursive : {true, false}) {
      if (teams > 1 && recursive && !std::has_single_bit(static_cast<unsigned>(teams))) continue;
      if (teams == 1 && recursive) continue;
      const SparseShape shape{.size = size, .length = length, .k = k, .teams = teams, .recursive = recursive};
      const double seconds = sparse_wire_seconds(kRows[0], shape, link);
      if (least != 0 && seconds >= least) continue;
      least = seconds;
      best = {.teams = teams, .recursive = recursive};
    }
  }
  return best;
}

}  // namespace weft
