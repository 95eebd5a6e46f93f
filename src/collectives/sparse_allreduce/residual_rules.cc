#include "collectives/sparse_allreduce/residual_rules.h"

#include <algorithm>
#include <array>

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

void apply_residual_rule(const SparseCall& call, const Deal& deal, int block, EntriesView selected,
                         std::span<const std::uint32_t> touched, EntriesView kept) {
  if (call.residual == ResidualRule::drop) return;
  const std::span<const float> residual = call.work->residual;
  const std::span<float> staged = call.work->staged;
  Membership in_result(kept.indices);
  Membership sent(selected.indices);
  // What stays here of an element: all that this rank had of it, or nothing.
  struct Place {
    std::size_t at = 0;
    bool stays = false;
  };
  const auto settle = [&](const Place& place) {
    const std::size_t i = place.at;
    const float own = call.gradient[i] + (residual.empty() ? 0.0F : residual[i]);
    staged[i] = place.stays ? own : 0.0F;
  };
  // The places lie far apart, so that each is a wait for memory: they are asked for ahead of their turn.
  constexpr std::size_t kAhead = 32;
  std::array<Place, kAhead> ahead;
  std::size_t count = 0;
  const auto add = [&](std::uint32_t local) {
    const bool result = in_result.has(local);
    const bool mine = sent.has(local);
    if (result && call.residual == ResidualRule::gres) return;
    const bool stays = call.residual == ResidualRule::lres ? !mine : !(result && mine);
    Place& place = ahead[count % kAhead];
    if (count++ >= kAhead) settle(place);
    place = {static_cast<std::size_t>(deal.global(block, local)), stays};
    __builtin_prefetch(&call.gradient[place.at]);
    if (!residual.empty()) __builtin_prefetch(&residual[place.at]);
    __builtin_prefetch(&staged[place.at], 1);
  };
  // The union of two sorted lists, each place once.
  std::size_t a = 0;
  std::size_t b = 0;
  while (a < selected.size() || b < touched.size()) {
    const bool from_a = b == touched.size() || (a < selected.size() && selected.indices[a] <= touched[b]);
    const std::uint32_t local = from_a ? selected.indices[a] : touched[b];
    if (a < selected.size() && selected.indices[a] == local) ++a;
    if (b < touched.size() && touched[b] == local) ++b;
    add(local);
  }
  for (std::size_t i = count - std::min(count, kAhead); i < count; ++i) settle(ahead[i % kAhead]);
  call.spend(call.kernels->settle_place, count);
  call.spend(call.kernels->unite_index, selected.size() + touched.size() - count);
}

}  // namespace weft
