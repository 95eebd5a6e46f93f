// One operation of SparDL on one rank: what its phases hand on to each other. Ranks are split into `teams` of
// `members` ranks; team t has ranks t*members .. , and position r of every team owns block r.
#pragma once

#include <cstdint>
#include <vector>

#include "collectives/sparse_allreduce/call.h"
#include "collectives/sparse_allreduce/messages.h"
#include "weft/comm.h"

namespace weft {

struct SparOperation {
  SparOperation(const Comm& comm, const SparseCall& c);

  int rank_of(int in_team, int at) const { return in_team * members + (at + members) % members; }
  std::int64_t length_of(int block) const { return deal.count(block); }
  std::int64_t quota_of(int block) const { return quotas[static_cast<std::size_t>(block)]; }
  // Adds to the residual of this rank if it is the one of `sharers` (equal lists on all of them) that an
  // index falls to.
  void keep_share(EntriesView entries, int sharers, int mine);
  // Adds what rounding to the codec's values loses to this rank's residual (one of `sharers`, as above), and
  // rounds.
  void round(Entries& entries, int sharers, int mine);
  // Appends the block to `into`.
  void code(EntriesView entries, int block, std::vector<std::byte>& into);
  // One hop: `outgoing` against `incoming`, of at most `limit` bytes. Counts what is sent.
  Task<void> exchange(Comm comm, BagRoute route, std::size_t limit) {
    call.result->entry_bytes_sent += outgoing.size();
    return exchange_messages(comm, route, outgoing, incoming, limit);
  }
  std::size_t limit_of(std::int64_t count, int block) const {
    return wire::max_encoded_bytes(call.codec, count, length_of(block));
  }

  SparseCall call;
  int members;
  int team;
  int position;
  Deal deal;
  std::vector<std::int64_t> quotas;
  bool non_finite = false;  // here, or wherever anything came from
  Entries own;              // the block this rank owns, from its cut on
  std::vector<std::byte> outgoing;
  std::vector<std::byte> incoming;
};

// Phases, each with its hops counted from 0. REQUIRES: awaited in the expression that calls them.
Task<void> spar_reduce_scatter(Comm comm, SparOperation& op);
Task<void> spar_all_gather_recursive(Comm comm, SparOperation& op);  // R-SAG
Task<void> spar_all_gather_bruck(Comm comm, SparOperation& op);      // B-SAG
Task<void> gather_blocks(Comm comm, SparOperation& op);              // inside the team

// The controller of B-SAG: aims at a union of `quota` entries. (The published one, with its result kept in
// [quota/teams, quota] and its step at least one entry.)
TeamQuota next_team_quota(TeamQuota now, std::int64_t union_size, std::int64_t quota, int teams);

}  // namespace weft
