#include "collectives/sparse_allreduce/spar_operation.h"

#include <algorithm>
#include <bit>

#include "collectives/sparse_allreduce/residual_rules.h"

namespace weft {

SparOperation::SparOperation(const Comm& comm, const SparseCall& c)
    : call(c),
      members(comm.size() / c.teams),
      team(comm.rank() / members),
      position(comm.rank() % members),
      deal(c.blocks, members, c.work->length) {
  for (int b = 0; b < members; ++b) quotas.push_back(deal.quota(b, c.k));
  c.work->selected.resize(static_cast<std::size_t>(members));
  c.work->touched.resize(static_cast<std::size_t>(members));
  for (Entries& entries : c.work->selected) entries.clear();
  for (Entries& entries : c.work->touched) entries.clear();
  c.result->deal = deal;
  c.result->blocks.resize(static_cast<std::size_t>(members));
}

void SparOperation::keep_share(EntriesView entries, int sharers, int mine) {
  Entries& share = call.work->share;
  share.resize(entries.size());
  const auto number = static_cast<std::uint32_t>(sharers), me = static_cast<std::uint32_t>(mine);
  const bool power = std::has_single_bit(number);  // then no division
  std::size_t count = 0;
  for (std::size_t i = 0; i < entries.size(); ++i) {  // no branch inside: whose an entry is cannot be guessed
    const std::uint32_t index = entries.indices[i];
    const float value = entries.values[i];
    share.indices[count] = index;
    share.values[count] = value;
    const bool falls_to_me = (power ? index & (number - 1) : index % number) == me;
    count += falls_to_me && value != 0 ? 1 : 0;
  }
  share.resize(count);
  call.spend(call.kernels->move_entry, entries.size());
  add_and_touch(call, deal, position, share, call.work->selected[static_cast<std::size_t>(position)]);
}

void SparOperation::round(Entries& entries, int sharers, int mine) {
  if (call.codec != wire::SparseCodec::packed_bf16) return;
  wire::round_to_bfloat16(entries.values, call.work->errors);
  call.spend(call.kernels->round_element, entries.size());
  keep_share({entries.indices, call.work->errors}, sharers, mine);
}

void SparOperation::code(EntriesView entries, int block, std::vector<std::byte>& into) {
  wire::encode(call.codec, non_finite ? EntriesView{} : entries, length_of(block), non_finite, into);
  call.spend_encoding(entries.size());
}

TeamQuota next_team_quota(TeamQuota now, std::int64_t union_size, std::int64_t quota, int teams) {
  const std::int64_t least = std::max<std::int64_t>(1, quota / teams);
  if (now.step == 0) now.step = std::max<std::int64_t>(1, (quota - now.entries) / 100);
  const bool right_way = (union_size > quota) != (now.step > 0);
  if (right_way) {
    if (now.inertia) now.step *= 2;
    now.inertia = !now.inertia;
  } else {
    now.step = now.step > 1 || now.step < -1 ? -now.step / 2 : -now.step;
    now.inertia = false;
  }
  now.step = std::clamp(now.step, -quota, quota);
  now.entries = std::clamp(now.entries + now.step, least, std::max(least, quota));
  return now;
}

}  // namespace weft
