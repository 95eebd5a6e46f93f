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
#include "collectives/sparse_allreduce/spar_operation.h"
#include "kernels/sparse.h"
#include "patterns/bruck.h"

namespace weft {

namespace {

// B-SAG's owner keeps fewer than its quota.
std::int64_t own_quota(const SparOperation& op) {
  const bool bruck = op.call.teams > 1 && !op.call.recursive;
  return bruck ? op.call.work->next_team_quota.entries : op.quota_of(op.position);
}

void cut_block(SparOperation& op, int block, std::int64_t quota) {
  Entries& selected = op.call.work->selected[static_cast<std::size_t>(block)];
  selected.clear();
  if (op.non_finite) return;
  SparseWork& work = *op.call.work;
  const std::int64_t readings = op.call.readings(block);
  op.non_finite |= !cut(work.staged, op.deal, block, quota, work.candidates, selected);
  op.call.spend_cut(block, op.length_of(block), readings);
}

void cut_bag(SparOperation& op, const Hop& hop) {
  op.outgoing.clear();
  std::vector<float>& errors = op.call.work->errors;
  for (int i = 0; i < hop.count; ++i) {
    const int block = (op.position + hop.sent + i) % op.members;
    cut_block(op, block, op.quota_of(block));
    Entries& selected = op.call.work->selected[static_cast<std::size_t>(block)];
    if (op.call.codec == wire::SparseCodec::packed_bf16) {
      touch(op.call, block, selected);
      wire::round_to_bfloat16(selected.values, errors);
      scatter_add({selected.indices, errors}, op.deal, block, op.call.work->staged);
      op.call.spend(op.call.kernels->round_element + op.call.kernels->scatter_entry, selected.size());
    }
    op.code(selected, block, op.outgoing);
    op.call.result->entries_sent += selected.size();
  }
}

void spend_arrival(const SparOperation& op, int block, std::size_t entries) {
  const SparseCall& call = op.call;
  call.spend_decoding(entries);
  call.spend(call.kernels->unite_index, call.work->candidates.blocks[static_cast<std::size_t>(block)].count);
}

void add_bag(SparOperation& op, const Hop& hop, int peer) {
  BagReader bag(op.call.codec, op.incoming, peer);
  Entries entries;
  for (int i = 0; i < hop.count; ++i) {
    const int block = (op.position + hop.received + i) % op.members;
    bag.next(op.length_of(block), op.quota_of(block), entries, op.non_finite);
    add_and_touch(op.call, op.deal, block, entries, {});
    arrived(entries.indices, block, op.call.work->candidates);
    spend_arrival(op, block, entries.size());
  }
  bag.end();
}

}  // namespace

// What has come with a hop is added in the computation that cuts for the next: going to the pool and back takes
// a while where ranks share cores.
Task<void> spar_reduce_scatter(Comm comm, SparOperation& op) {
  Hop last{};  // whose bag has come and is not added yet; count 0: none
  int peer = 0;
  // Step 1
  for (const Hop& hop : halving_hops(op.members)) {
    const BagRoute route{.to = op.rank_of(op.team, op.position + hop.gap),
                         .from = op.rank_of(op.team, op.position - hop.gap),
                         .hop = hop.number};
    std::size_t limit = 0;
    for (int i = 0; i < hop.count; ++i) {
      const int block = (op.position + hop.received + i) % op.members;
      limit += op.limit_of(op.quota_of(block), block);
    }
    auto prepare = [&op, &hop, &last, &peer] {
      if (last.count > 0) add_bag(op, last, peer);
      const Stopwatch watch(op.call.result->select_seconds);
      cut_bag(op, hop);
      return op.call.spent();
    };
    co_await comm.compute(prepare);
    co_await op.exchange(comm, route, limit);
    last = hop;
    peer = route.from;
  }
  // Step 2
  auto finish = [&op, &last, &peer] {
    if (last.count > 0) add_bag(op, last, peer);
    const Stopwatch watch(op.call.result->select_seconds);
    cut_block(op, op.position, own_quota(op));
    op.own = op.call.work->selected[static_cast<std::size_t>(op.position)];
    op.round(op.own, 1, 0);
    op.call.spend(op.call.kernels->move_entry, op.own.size());
    return op.call.spent();
  };
  co_await comm.compute(finish);
}

}  // namespace weft
