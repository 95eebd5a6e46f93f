// SparDL's Spar-All-Gather: the ranks that own the same block in different teams (a SAG group) add up their
// blocks.
//
// R-SAG, teams a power of two. For s = 0 .. log2(teams)-1:
//   Step 1  exchange the block with team XOR 2^s
//   Step 2  add, the lower teams' list first, and keep the quota's largest
// B-SAG, any number of teams:
//   Step 1  Bruck all-gather of the teams' lists, each cut to h entries before
//   Step 2  add the lists in team order, keep the quota's largest, and let the controller move h for the next
//   step
//
// What is discarded, or lost by rounding, is known to several ranks: it goes whole to one of them, by index
// modulo their number, so that conservation is exact. (Shares of 1/sharers are not exact in float32.) Adding
// in team order gives the same bits on all. Rounds: log2(teams), ceil(log2 teams). Entries sent by a rank:
// quota log2(teams), h (teams-1). Zhao et al., ICDE 2024.
#include <algorithm>
#include <cmath>

#include "collectives/sparse_allreduce/spar_step.h"
#include "kernels/sparse.h"
#include "patterns/bruck.h"

namespace weft {

namespace {

// Keeps the largest of what `sharers` ranks have added up alike.
void settle(SparStep& step, int sharers, int mine) {
  Entries discards;
  step.call.spend(step.call.kernels->keep_entry, step.own.size());
  keep_largest(step.own, step.quota_of(step.position), discards);
  // Finite values may overflow as they are added up; all sharers see the same sums.
  step.non_finite |=
      !std::all_of(step.own.values.begin(), step.own.values.end(), [](float v) { return std::isfinite(v); });
  step.keep_share(discards, sharers, mine);
  step.round(step.own, sharers, mine);
}

}  // namespace

Task<void> spar_all_gather_recursive(Comm comm, SparStep& step) {
  const std::int64_t quota = step.quota_of(step.position);
  std::uint32_t hop = 0;
  for (int gap = 1; gap < step.call.teams; gap *= 2, ++hop) {
    // Step 1
    const int partner = step.team ^ gap;
    const int peer = step.rank_of(partner, step.position);
    const BagRoute route{.to = peer, .from = peer, .hop = hop};
    step.outgoing.clear();
    step.code(step.own, step.position, step.outgoing);
    step.call.result->entries_sent += step.own.size();
    co_await comm.charge(step.call.spent());
    co_await step.exchange(comm, route, step.limit_of(quota, step.position));
    // Step 2
    auto add = [&step, partner, peer, gap, quota] {
      Entries theirs;
      BagReader bag(step.call.codec, step.incoming, peer);
      bag.next(step.length_of(step.position), quota, theirs, step.non_finite);
      bag.end();
      const Entries mine = std::move(step.own);
      step.own.clear();
      if (partner < step.team)
        merge_add(theirs, mine, step.own);
      else
        merge_add(mine, theirs, step.own);
      step.call.spend_decoding(theirs.size());
      step.call.spend(step.call.kernels->merge_entry, mine.size() + theirs.size());
      settle(step, 2 * gap, step.team % (2 * gap));
      return step.call.spent();
    };
    co_await comm.compute(add);
  }
}

Task<void> spar_all_gather_bruck(Comm comm, SparStep& step) {
  const int teams = step.call.teams;
  const std::int64_t quota = step.quota_of(step.position);
  std::vector<std::vector<std::byte>> coded(static_cast<std::size_t>(teams));
  std::vector<std::size_t> entries_of(static_cast<std::size_t>(teams));
  entries_of[static_cast<std::size_t>(step.team)] = step.own.size();
  step.code(step.own, step.position, coded[static_cast<std::size_t>(step.team)]);
  co_await comm.charge(step.call.spent());
  // Step 1
  for (const Hop& hop : gather_hops(teams)) {
    const BagRoute route{.to = step.rank_of((step.team - hop.gap + teams) % teams, step.position),
                         .from = step.rank_of((step.team + hop.gap) % teams, step.position),
                         .hop = hop.number};
    step.outgoing.clear();
    for (int i = 0; i < hop.count; ++i) {
      const auto sent = static_cast<std::size_t>((step.team + hop.sent + i) % teams);
      step.outgoing.insert(step.outgoing.end(), coded[sent].begin(), coded[sent].end());
      step.call.result->entries_sent += entries_of[sent];
    }
    const std::size_t limit = static_cast<std::size_t>(hop.count) * step.limit_of(quota, step.position);
    co_await step.exchange(comm, route, limit);
    BagReader bag(step.call.codec, step.incoming, route.from);
    Entries entries;
    for (int i = 0; i < hop.count; ++i) {
      const std::span<const std::byte> before = bag.rest();
      bag.next(step.length_of(step.position), quota, entries, step.non_finite);
      const auto used = before.first(before.size() - bag.rest().size());
      const auto received = static_cast<std::size_t>((step.team + hop.received + i) % teams);
      coded[received].assign(used.begin(), used.end());
      entries_of[received] = entries.size();
      step.call.spend_decoding(entries.size());
    }
    bag.end();
    co_await comm.charge(step.call.spent());
  }
  // Step 2
  auto add = [&step, &coded, teams, quota] {
    Entries sum;
    Entries next;
    Entries list;
    for (int t = 0; t < teams; ++t) {
      BagReader bag(step.call.codec, coded[static_cast<std::size_t>(t)], step.rank_of(t, step.position));
      bag.next(step.length_of(step.position), quota, list, step.non_finite);
      merge_add(sum, list, next);
      step.call.spend_decoding(list.size());
      step.call.spend(step.call.kernels->merge_entry, sum.size() + list.size());
      std::swap(sum, next);
    }
    SparseWork& work = *step.call.work;
    work.next_team_quota =
        next_team_quota(work.next_team_quota, static_cast<std::int64_t>(sum.size()), quota, teams);
    step.own = std::move(sum);
    settle(step, teams, step.team);
    return step.call.spent();
  };
  co_await comm.compute(add);
}

}  // namespace weft
