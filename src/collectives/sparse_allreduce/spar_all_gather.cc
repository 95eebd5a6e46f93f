// SparDL's Spar-All-Gather: the ranks that own the same block in different teams (a SAG group) add up their
// blocks.
//
// R-SAG, teams a power of two. For s = 0 .. log2(teams)-1:
//   Step 1  exchange the block with team XOR 2^s
//   Step 2  add, the lower teams' list first, and keep the quota's largest
// B-SAG, any number of teams:
//   Step 1  Bruck all-gather of the teams' lists, each cut to h entries before
//   Step 2  add the lists in team order, keep the quota's largest, and let the controller move h for the next
//           step
//
// What is discarded, or lost by rounding, is known to several ranks: it goes whole to one of them, by index
// modulo their number, so that conservation is exact. (Shares of 1/sharers are not exact in float32.) Adding
// in team order gives the same bits on all. Rounds: log2(teams), ceil(log2 teams). Entries sent by a rank:
// quota log2(teams), h (teams-1). Zhao et al., ICDE 2024.
#include <algorithm>
#include <cmath>

#include "collectives/sparse_allreduce/lists.h"
#include "collectives/sparse_allreduce/spar_step.h"
#include "kernels/sparse.h"

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
    auto code = [&step] {
      const Stopwatch watch(step.call.result->select_seconds);
      step.outgoing.clear();
      step.code(step.own, step.position, step.outgoing);
      step.call.result->entries_sent += step.own.size();
      return step.call.spent();
    };
    co_await comm.compute(code);
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
  std::vector<Entries> lists(static_cast<std::size_t>(teams));
  ListGather gather{.lists = lists,
                    .non_finite = step.non_finite,
                    .ring = {.size = teams, .me = step.team, .first = step.position, .stride = step.members}};
  gather.bounds.assign(lists.size(), {.length = step.length_of(step.position), .max_count = quota});
  lists[static_cast<std::size_t>(step.team)] = std::move(step.own);
  // Step 1
  co_await gather_lists(comm, step.call, gather);
  step.non_finite = gather.non_finite;
  // Step 2
  auto add = [&step, &lists, teams, quota] {
    Entries sum;
    Entries next;
    for (const Entries& list : lists) {
      merge_add(sum, list, next);
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
