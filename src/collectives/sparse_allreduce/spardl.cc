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

#include "collectives/sparse_allreduce/residual_rules.h"
#include "collectives/sparse_allreduce/spar_step.h"
#include "patterns/bruck.h"

namespace weft {

// Owners' blocks travel as they were coded: everybody decodes the same bytes.
Task<void> gather_blocks(Comm comm, SparStep& step) {
  const int m = step.members;
  std::vector<std::vector<std::byte>> coded(static_cast<std::size_t>(m));
  std::vector<std::size_t> entries(static_cast<std::size_t>(m));
  const auto own = static_cast<std::size_t>(step.position);
  wire::encode(step.call.codec, step.non_finite ? EntriesView{} : step.own.view(),
               step.length_of(step.position), step.non_finite, coded[own]);
  entries[own] = step.own.size();
  step.call.result->blocks[own] = step.own;
  step.call.spend_encoding(step.own.size());
  step.call.spend(step.call.kernels->move_entry, step.own.size());
  co_await comm.charge(step.call.spent());
  for (const Hop& hop : gather_hops(m)) {
    const BagRoute route{.to = step.rank_of(step.team, step.position - hop.gap),
                         .from = step.rank_of(step.team, step.position + hop.gap),
                         .hop = hop.number};
    step.outgoing.clear();
    std::size_t limit = 0;
    for (int i = 0; i < hop.count; ++i) {
      const auto sent = static_cast<std::size_t>((step.position + hop.sent + i) % m);
      step.outgoing.insert(step.outgoing.end(), coded[sent].begin(), coded[sent].end());
      step.call.result->entries_sent += entries[sent];
      const int received = (step.position + hop.received + i) % m;
      limit += step.limit_of(step.quota_of(received), received);
    }
    co_await step.exchange(comm, route, limit);
    auto decode = [&step, &coded, &entries, &hop, &route, m] {
      BagReader bag(step.call.codec, step.incoming, route.from);
      for (int i = 0; i < hop.count; ++i) {
        const int block = (step.position + hop.received + i) % m;
        const auto b = static_cast<std::size_t>(block);
        const std::span<const std::byte> before = bag.rest();
        bag.next(step.length_of(block), step.quota_of(block), step.call.result->blocks[b], step.non_finite);
        const auto used = before.first(before.size() - bag.rest().size());
        coded[b].assign(used.begin(), used.end());
        entries[b] = step.call.result->blocks[b].size();
        step.call.spend_decoding(entries[b]);
        step.call.spend(step.call.kernels->copy_byte, used.size());
      }
      bag.end();
      return step.call.spent();
    };
    co_await comm.compute(decode);
  }
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
