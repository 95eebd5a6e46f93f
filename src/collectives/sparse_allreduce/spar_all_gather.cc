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
#include "collectives/sparse_allreduce/spar_operation.h"
#include "kernels/sparse.h"

namespace weft {

namespace {

// Keeps the largest of what `sharers` ranks have added up alike.
void settle(SparOperation& op, int sharers, int mine) {
  Entries& discards = op.call.work->discards;
  op.call.spend(op.call.kernels->keep_entry, op.own.size());
  keep_largest(op.own, op.quota_of(op.position), discards);
  // Finite values may overflow as they are added up; all sharers see the same sums.
  op.non_finite |=
      !std::all_of(op.own.values.begin(), op.own.values.end(), [](float v) { return std::isfinite(v); });
  op.keep_share(discards, sharers, mine);
  op.round(op.own, sharers, mine);
}

}  // namespace

Task<void> spar_all_gather_recursive(Comm comm, SparOperation& op) {
  const std::int64_t quota = op.quota_of(op.position);
  std::uint32_t hop = 0;
  for (int gap = 1; gap < op.call.teams; gap *= 2, ++hop) {
    // Step 1
    const int partner = op.team ^ gap;
    const int peer = op.rank_of(partner, op.position);
    const BagRoute route{.to = peer, .from = peer, .hop = hop};
    auto code = [&op] {
      const Stopwatch watch(op.call.result->select_seconds);
      op.outgoing.clear();
      op.code(op.own, op.position, op.outgoing);
      op.call.result->entries_sent += op.own.size();
      return op.call.spent();
    };
    co_await comm.compute(code);
    co_await op.exchange(comm, route, op.limit_of(quota, op.position));
    // Step 2
    auto add = [&op, partner, peer, gap, quota] {
      Entries& theirs = op.call.work->arrived;
      Entries& mine = op.call.work->own_before;
      BagReader bag(op.call.codec, op.incoming, peer);
      bag.next(op.length_of(op.position), quota, theirs, op.non_finite);
      bag.end();
      std::swap(mine, op.own);
      op.own.clear();
      if (partner < op.team)
        merge_add(theirs, mine, op.own);
      else
        merge_add(mine, theirs, op.own);
      op.call.spend_decoding(theirs.size());
      op.call.spend(op.call.kernels->merge_entry, mine.size() + theirs.size());
      settle(op, 2 * gap, op.team % (2 * gap));
      return op.call.spent();
    };
    co_await comm.compute(add);
  }
}

Task<void> spar_all_gather_bruck(Comm comm, SparOperation& op) {
  const int teams = op.call.teams;
  const std::int64_t quota = op.quota_of(op.position);
  std::vector<Entries> lists(static_cast<std::size_t>(teams));
  ListGather gather{.lists = lists,
                    .non_finite = op.non_finite,
                    .ring = {.size = teams, .me = op.team, .first = op.position, .stride = op.members}};
  gather.bounds.assign(lists.size(), {.length = op.length_of(op.position), .max_count = quota});
  lists[static_cast<std::size_t>(op.team)] = std::move(op.own);
  // Step 1
  co_await gather_lists(comm, op.call, gather);
  op.non_finite = gather.non_finite;
  // Step 2
  auto add = [&op, &lists, teams, quota] {
    Entries sum;
    Entries next;
    for (const Entries& list : lists) {
      merge_add(sum, list, next);
      op.call.spend(op.call.kernels->merge_entry, sum.size() + list.size());
      std::swap(sum, next);
    }
    SparseWork& work = *op.call.work;
    work.next_team_quota =
        next_team_quota(work.next_team_quota, static_cast<std::int64_t>(sum.size()), quota, teams);
    op.own = std::move(sum);
    settle(op, teams, op.team);
    return op.call.spent();
  };
  co_await comm.compute(add);
}

}  // namespace weft
