// SparDL's Spar-Reduce-Scatter. The index space is dealt to `members` blocks, block b belongs to position b
// of the team.
//   Step 1  for gap = 2^(L-1) .. 1: cut the blocks of this hop's bag to their quotas (what is left stays in
//           `staged`), send them to position + gap, add what arrives to the blocks still here
//   Step 2  cut the own block the same way
// A block is cut just before it is sent, on own values plus everything that has arrived ("lazy"): it is cut
// once, and the pass over the vector was made before (kernels/select.h). Rounds: L = ceil(log2 members).
// Entries sent by a rank: the quotas of all blocks but its own, k (members-1)/members. Zhao et al., ICDE
// 2024.
#include "collectives/sparse_allreduce/residual_rules.h"
#include "collectives/sparse_allreduce/spar_step.h"
#include "kernels/sparse.h"
#include "patterns/bruck.h"

namespace weft {

namespace {

// B-SAG's owner keeps fewer than its quota.
std::int64_t own_quota(const SparStep& step) {
  const bool bruck = step.call.teams > 1 && !step.call.recursive;
  return bruck ? step.call.work->next_team_quota.entries : step.quota_of(step.position);
}

void cut_block(SparStep& step, int block, std::int64_t quota) {
  Entries& selected = step.call.work->selected[static_cast<std::size_t>(block)];
  selected.clear();
  if (step.non_finite) return;
  SparseWork& work = *step.call.work;
  step.call.spend_cut(block, step.length_of(block));
  step.non_finite |= !cut(work.staged, step.deal, block, quota, work.candidates, selected);
}

void cut_bag(SparStep& step, const Hop& hop) {
  step.outgoing.clear();
  std::vector<float>& errors = step.call.work->errors;
  for (int i = 0; i < hop.count; ++i) {
    const int block = (step.position + hop.sent + i) % step.members;
    cut_block(step, block, step.quota_of(block));
    Entries& selected = step.call.work->selected[static_cast<std::size_t>(block)];
    if (step.call.codec == wire::SparseCodec::packed_bf16) {
      touch(step.call, block, selected);
      wire::round_to_bfloat16(selected.values, errors);
      scatter_add({selected.indices, errors}, step.deal, block, step.call.work->staged);
      step.call.spend(step.call.kernels->round_element + step.call.kernels->scatter_entry, selected.size());
    }
    step.code(selected, block, step.outgoing);
    step.call.result->entries_sent += selected.size();
  }
}

void spend_arrival(const SparStep& step, int block, std::size_t entries) {
  const SparseCall& call = step.call;
  call.spend_decoding(entries);
  call.spend(call.kernels->unite_index, call.work->candidates.blocks[static_cast<std::size_t>(block)].count);
}

void add_bag(SparStep& step, const Hop& hop, int peer) {
  BagReader bag(step.call.codec, step.incoming, peer);
  Entries entries;
  for (int i = 0; i < hop.count; ++i) {
    const int block = (step.position + hop.received + i) % step.members;
    bag.next(step.length_of(block), step.quota_of(block), entries, step.non_finite);
    add_and_touch(step.call, step.deal, block, entries, {});
    arrived(entries.indices, block, step.call.work->candidates);
    spend_arrival(step, block, entries.size());
  }
  bag.end();
}

}  // namespace

// What has come with a hop is added in the computation that cuts for the next: going to the pool and back takes
// a while where ranks share cores.
Task<void> spar_reduce_scatter(Comm comm, SparStep& step) {
  Hop last{};  // whose bag has come and is not added yet; count 0: none
  int peer = 0;
  // Step 1
  for (const Hop& hop : halving_hops(step.members)) {
    const BagRoute route{.to = step.rank_of(step.team, step.position + hop.gap),
                         .from = step.rank_of(step.team, step.position - hop.gap),
                         .hop = hop.number};
    std::size_t limit = 0;
    for (int i = 0; i < hop.count; ++i) {
      const int block = (step.position + hop.received + i) % step.members;
      limit += step.limit_of(step.quota_of(block), block);
    }
    auto prepare = [&step, &hop, &last, &peer] {
      if (last.count > 0) add_bag(step, last, peer);
      const Stopwatch watch(step.call.result->select_seconds);
      cut_bag(step, hop);
      return step.call.spent();
    };
    co_await comm.compute(prepare);
    co_await step.exchange(comm, route, limit);
    last = hop;
    peer = route.from;
  }
  // Step 2
  auto finish = [&step, &last, &peer] {
    if (last.count > 0) add_bag(step, last, peer);
    const Stopwatch watch(step.call.result->select_seconds);
    cut_block(step, step.position, own_quota(step));
    step.own = step.call.work->selected[static_cast<std::size_t>(step.position)];
    step.round(step.own, 1, 0);
    step.call.spend(step.call.kernels->move_entry, step.own.size());
    return step.call.spent();
  };
  co_await comm.compute(finish);
}

}  // namespace weft
