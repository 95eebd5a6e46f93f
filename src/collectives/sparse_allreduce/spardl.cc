// SparDL: sparse all-reduce that never grows on the way.
//   Step 1  one pass: staged = gradient + residual, and candidates of every block (kernels/select.h)
//   Step 2  Spar-Reduce-Scatter in each team: position r ends with the sparse sum of block r
//   Step 3  Spar-All-Gather among the owners of a block in different teams (none with one team)
//   Step 4  Bruck all-gather of the blocks inside the team, as coded by their owners
//   Step 5  the residual rule (residual_rules.h)
// Rounds: 2 ceil(log2 m) + ceil(log2 d), with d teams of m = P/d ranks. Entries sent by a rank: 2 k (m-1)/m,
// plus the quota of a block times log2 d (R-SAG) or at most (d-1) (B-SAG). Any P; d divides P. A gradient
// that is not finite is told to all ranks by a bit in the head of every block: no extra message. Zhao et al.,
// ICDE 2024.
#include <algorithm>
#include <utility>

#include "collectives/sparse_allreduce/lists.h"
#include "collectives/sparse_allreduce/residual_rules.h"
#include "collectives/sparse_allreduce/spar_step.h"
#include "patterns/bruck.h"

namespace weft {

// Owners' blocks travel as they were coded: everybody decodes the same bytes.
Task<void> gather_blocks(Comm comm, SparStep& step) {
  ListGather gather{.lists = step.call.result->blocks,
                    .non_finite = step.non_finite,
                    .ring = {.size = step.members, .me = step.position, .first = step.rank_of(step.team, 0)}};
  for (int b = 0; b < step.members; ++b)
    gather.bounds.push_back({.length = step.length_of(b), .max_count = step.quota_of(b)});
  gather.lists[static_cast<std::size_t>(step.position)] = std::move(step.own);
  co_await gather_lists(comm, step.call, gather);
  step.non_finite = gather.non_finite;
}

namespace {

void prepare_team_quota(const SparStep& step) {
  SparseWork& work = *step.call.work;
  const std::int64_t quota = step.quota_of(step.position);
  work.next_team_quota = work.team_quota;
  TeamQuota& next = work.next_team_quota;
  const std::int64_t least = std::max<std::int64_t>(1, quota / step.call.teams);
  if (step.call.k >= work.length) next.entries = quota;  // everything: nothing to economise on
  next.entries = next.entries == 0 ? least : std::clamp(next.entries, least, std::max(least, quota));
}

}  // namespace

Task<void> spardl(Comm comm, SparseCall call) {
  SparStep step(comm, call);
  SparseWork& work = *call.work;
  prepare_team_quota(step);
  // Step 1
  auto accumulate_all = [&step, &call, &work] {
    const Stopwatch watch(call.result->select_seconds);
    estimate_thresholds(call.step(), step.deal, step.quotas, work.candidates);
    step.non_finite = !accumulate(call.step(), step.deal, work.candidates, call.threads).finite;
    call.spend_selection();
    return call.spent();
  };
  co_await comm.compute(accumulate_all);
  // Step 2
  std::uint32_t hop = 0;
  co_await spar_reduce_scatter(comm, step);
  hop += static_cast<std::uint32_t>(log2_ceil(step.members));
  // Step 3
  if (call.teams > 1) {
    if (call.recursive)
      co_await spar_all_gather_recursive(comm.hops_from(hop), step);
    else
      co_await spar_all_gather_bruck(comm.hops_from(hop), step);
    hop += static_cast<std::uint32_t>(log2_ceil(call.teams));
  }
  // Step 4
  co_await gather_blocks(comm.hops_from(hop), step);
  // Step 5
  call.result->finite = !step.non_finite;
  if (step.non_finite) co_return;
  auto settle = [&step, &call, &work] {
    for (int b = 0; b < step.members; ++b) {
      const auto i = static_cast<std::size_t>(b);
      apply_residual_rule(call, step.deal, b, work.selected[i], work.touched[i], call.result->blocks[i]);
    }
    return call.spent();
  };
  co_await comm.compute(settle);
}

}  // namespace weft
