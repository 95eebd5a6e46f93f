#include "collectives/sparse_allreduce/residual_rules.h"

#include <algorithm>

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
  const auto settle = [&](std::uint32_t local) {
    const auto i = static_cast<std::size_t>(deal.global(block, local));
    const float own = call.gradient[i] + (residual.empty() ? 0.0F : residual[i]);
    const bool result = in_result.has(local);
    const bool mine = sent.has(local);
    switch (call.residual) {
      case ResidualRule::gres:
        if (!result) staged[i] = own;
        break;
      case ResidualRule::pres:
        staged[i] = result && mine ? 0.0F : own;
        break;
      case ResidualRule::lres:
        staged[i] = mine ? 0.0F : own;
        break;
      case ResidualRule::drop:
        break;
    }
  };
  // The union of two sorted lists, each place once.
  std::size_t a = 0;
  std::size_t b = 0;
  while (a < selected.size() || b < touched.size()) {
    const bool from_a = b == touched.size() || (a < selected.size() && selected.indices[a] <= touched[b]);
    const std::uint32_t local = from_a ? selected.indices[a] : touched[b];
    if (a < selected.size() && selected.indices[a] == local) ++a;
    if (b < touched.size() && touched[b] == local) ++b;
    settle(local);
  }
}

}  // namespace weft
