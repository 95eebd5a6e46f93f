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
#include "collectives/sparse_allreduce/spar_operation.h"
#include "patterns/bruck.h"

namespace weft {

// Owners' blocks travel as they were coded: everybody decodes the same bytes.
Task<void> gather_blocks(Comm comm, SparOperation& op) {
  ListGather gather{.lists = op.call.result->blocks,
                    .non_finite = op.non_finite,
                    .ring = {.size = op.members, .me = op.position, .first = op.rank_of(op.team, 0)}};
  for (int b = 0; b < op.members; ++b)
    gather.bounds.push_back({.length = op.length_of(b), .max_count = op.quota_of(b)});
  gather.lists[static_cast<std::size_t>(op.position)] = std::move(op.own);
  co_await gather_lists(comm, op.call, gather);
  op.non_finite = gather.non_finite;
}

namespace {

void prepare_team_quota(const SparOperation& op) {
  SparseWork& work = *op.call.work;
  const std::int64_t quota = op.quota_of(op.position);
  TeamQuota& next = work.next_team_quota;
  const std::int64_t least = std::max<std::int64_t>(1, quota / op.call.teams);
  if (op.call.k >= work.length) next.entries = quota;  // everything: nothing to economise on
  next.entries = next.entries == 0 ? least : std::clamp(next.entries, least, std::max(least, quota));
}

}  // namespace

Task<void> spardl(Comm comm, SparseCall call) {
  SparOperation op(comm, call);
  SparseWork& work = *call.work;
  prepare_team_quota(op);
  // Step 1
  auto accumulate_all = [&op, &call, &work] {
    const Stopwatch watch(call.result->select_seconds);
    estimate_thresholds(call.step(), op.deal, op.quotas, work.candidates);
    op.non_finite = !accumulate(call.step(), op.deal, work.candidates, call.threads).finite;
    call.spend_selection();
    return call.spent();
  };
  co_await comm.compute(accumulate_all);
  // Step 2
  std::uint32_t hop = 0;
  co_await spar_reduce_scatter(comm, op);
  hop += static_cast<std::uint32_t>(log2_ceil(op.members));
  // Step 3
  if (call.teams > 1) {
    if (call.recursive)
      co_await spar_all_gather_recursive(comm.hops_from(hop), op);
    else
      co_await spar_all_gather_bruck(comm.hops_from(hop), op);
    hop += static_cast<std::uint32_t>(log2_ceil(call.teams));
  }
  // Step 4
  co_await gather_blocks(comm.hops_from(hop), op);
  // Step 5
  call.result->finite = !op.non_finite;
  if (op.non_finite) co_return;
  auto settle = [&op, &call, &work] {
    for (int b = 0; b < op.members; ++b) {
      const auto i = static_cast<std::size_t>(b);
      apply_residual_rule(call, op.deal, b, work.selected[i], work.touched[i], call.result->blocks[i]);
    }
    return call.spent();
  };
  co_await comm.compute(settle);
}

}  // namespace weft
