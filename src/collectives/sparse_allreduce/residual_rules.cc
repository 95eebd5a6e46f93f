#include "collectives/sparse_allreduce/residual_rules.h"

#include <algorithm>
#include <array>
#include <utility>

#include "kernels/sparse.h"

namespace weft {

namespace {

// Walks a sorted list beside increasing questions.
class Membership {
 public:
  explicit Membership(std::span<const std::uint32_t> sorted) : sorted_(sorted) {}
  bool has(std::uint32_t index) {
    while (at_ < sorted_.size() && sorted_[at_] < index) ++at_;
    return at_ < sorted_.size() && sorted_[at_] == index;
  }

 private:
  std::span<const std::uint32_t> sorted_;
  std::size_t at_ = 0;
};

}  // namespace

void touch(const SparseCall& call, int block, EntriesView own) {
  Entries& all = call.work->touched[static_cast<std::size_t>(block)];
  Entries& out = call.work->united;
  call.spend(call.kernels->unite_index, all.size() + own.size());
  if (own.empty()) return;
  merge_first(all, own, out);
  std::swap(all, out);
}

void add_and_touch(const SparseCall& call, const Deal& deal, int block, EntriesView entries,
                   EntriesView selected) {
  std::vector<float>& before = call.work->before;
  before.resize(entries.size());
  scatter_add(entries, deal, block, call.work->staged, before);
  call.spend(call.kernels->scatter_entry, entries.size());
  if (selected.empty()) return touch(call, block, {entries.indices, before});
  Entries fresh;
  Membership cut_out(selected.indices);
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (!cut_out.has(entries.indices[i])) fresh.push_back(entries.indices[i], before[i]);
  }
  touch(call, block, fresh);
}

void apply_residual_rule(const SparseCall& call, const Deal& deal, int block, EntriesView selected,
                         EntriesView touched, EntriesView kept) {
  if (call.residual == ResidualRule::drop) return;
  const std::span<float> staged = call.work->staged;
  Membership in_result(kept.indices);
  // What stays here of an element: all that this rank had of it, or nothing.
  struct Place {
    std::size_t at = 0;
    float stays = 0;
  };
  // The places lie far apart, so that each is a wait for memory: they are asked for ahead of their turn.
  constexpr std::size_t kAhead = 32;
  std::array<Place, kAhead> ahead;
  std::size_t count = 0;
  const auto add = [&](std::uint32_t local, bool mine, float own) {
    const bool result = in_result.has(local);
    if (result && call.residual == ResidualRule::gres) return;
    const bool stays = call.residual == ResidualRule::lres ? !mine : !(result && mine);
    Place& place = ahead[count % kAhead];
    if (count++ >= kAhead) staged[place.at] = place.stays;
    place = {static_cast<std::size_t>(deal.global(block, local)), stays ? own : 0.0F};
    __builtin_prefetch(&staged[place.at], 1);
  };
  // The union of two sorted lists, each place once.
  std::size_t a = 0;
  std::size_t b = 0;
  while (a < selected.size() || b < touched.size()) {
    const bool from_a =
        b == touched.size() || (a < selected.size() && selected.indices[a] < touched.indices[b]);
    const std::uint32_t local = from_a ? selected.indices[a] : touched.indices[b];
    const float own = from_a ? selected.values[a] : touched.values[b];
    const bool mine = a < selected.size() && selected.indices[a] == local;
    a += mine ? 1 : 0;
    b += from_a ? 0 : 1;
    add(local, mine, own);
  }
  for (std::size_t i = count - std::min(count, kAhead); i < count; ++i)
    staged[ahead[i % kAhead].at] = ahead[i % kAhead].stays;
  call.spend(call.kernels->settle_place, count);
  call.spend(call.kernels->unite_index, selected.size() + touched.size() - count);
}

}  // namespace weft
