#include "experts/placement.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <string>

#include "patterns/blocks.h"
#include "weft/error.h"

namespace weft {

namespace {

constexpr double kNothing = 1e-9;  // of a rank's mean load

// Of an expert on one of its ranks.
double load_of(double rows, std::size_t replicas, const PlacementOptions& o) {
  if (rows <= 0) return 0;
  const double here = rows / static_cast<double>(replicas), own = rows / o.ranks;
  return here + o.remote_rows * (here - own) + o.expert_rows;
}

// A placement while it is made.
class Draft {
 public:
  explicit Draft(const PlacementOptions& options)
      : most_(options.most),
        experts_(static_cast<std::size_t>(options.experts)),
        replicas_(experts_),
        loads_(static_cast<std::size_t>(options.ranks)),
        sizes_(loads_.size()),
        has_(loads_.size() * experts_) {}

  bool has(std::size_t expert, std::size_t rank) const { return has_[rank * experts_ + expert] != 0; }
  bool room(std::size_t rank) const { return sizes_[rank] < most_; }
  void add(std::size_t expert, std::size_t rank, double load) {
    has_[rank * experts_ + expert] = 1;
    ++sizes_[rank];
    ++replicas_[expert];
    loads_[rank] += load;
  }
  std::size_t ranks() const { return loads_.size(); }
  int replicas(std::size_t expert) const { return replicas_[expert]; }
  bool empty(std::size_t rank) const { return sizes_[rank] == 0; }
  double load(std::size_t rank) const { return loads_[rank]; }
  // The one with room, and without this expert, that has least to do; ranks(): there is none.
  std::size_t least_loaded(std::size_t expert) const;
  ExpertPlacement placement() const;

 private:
  int most_;
  std::size_t experts_;
  std::vector<int> replicas_;
  std::vector<double> loads_;
  std::vector<int> sizes_;
  std::vector<char> has_;  // [rank * experts + expert]
};

// Of equal ones that with fewer experts, then the expert's home, then the first behind it.
std::size_t Draft::least_loaded(std::size_t expert) const {
  std::size_t best = ranks(), r = expert % ranks();
  for (std::size_t i = 0; i < ranks(); ++i, r = r + 1 == ranks() ? 0 : r + 1) {
    if (!room(r) || has(expert, r)) continue;
    if (best == ranks() || loads_[r] < loads_[best] ||
        (loads_[r] == loads_[best] && sizes_[r] < sizes_[best]))
      best = r;
  }
  return best;
}

ExpertPlacement Draft::placement() const {
  ExpertPlacement out;
  out.replicas.resize(experts_);
  for (std::size_t r = 0; r < ranks(); ++r) {
    for (std::size_t e = 0; e < experts_; ++e) {
      if (has(e, r)) out.replicas[e].push_back(static_cast<int>(r));
    }
  }
  return out;
}

// Experts by what they are left with, most first; of equal ones the first.
std::vector<std::size_t> decreasing(const std::vector<double>& sizes) {
  std::vector<std::size_t> out(sizes.size());
  std::iota(out.begin(), out.end(), std::size_t{0});
  std::ranges::sort(
      out, [&](std::size_t a, std::size_t b) { return sizes[a] != sizes[b] ? sizes[a] > sizes[b] : a < b; });
  return out;
}

// Steps 1 and 2; none where a rank would need more experts than it may have.
std::optional<ExpertPlacement> packed(std::span<const double> rows, const PlacementOptions& o) {
  const double all = std::accumulate(rows.begin(), rows.end(), 0.0);
  Draft draft(o);
  // Step 1
  std::vector<double> left(rows.size());
  for (std::size_t e = 0; e < rows.size(); ++e) left[e] = rows[e] / all * o.ranks;
  for (const std::size_t e : decreasing(left)) {
    for (std::size_t i = 0; i < draft.ranks() && left[e] >= 1 - kNothing; ++i) {
      const std::size_t rank = (e + i) % draft.ranks();
      if (!draft.empty(rank)) continue;
      draft.add(e, rank, 1);
      left[e] = std::max(0.0, left[e] - 1);
    }
  }
  // Step 2
  for (const std::size_t e : decreasing(left)) {
    if (left[e] <= kNothing && draft.replicas(e) > 0) continue;
    std::size_t rank = 0;
    while (rank < draft.ranks() &&
           (draft.load(rank) + left[e] > 1 + kNothing || !draft.room(rank) || draft.has(e, rank)))
      ++rank;
    if (rank == draft.ranks()) {
      if (draft.replicas(e) > 0) continue;  // the others take its rows
      rank = draft.least_loaded(e);
      if (rank == draft.ranks()) return std::nullopt;
    }
    draft.add(e, rank, left[e]);
  }
  return draft.placement();
}

// So many replicas of each expert, the heaviest first, to the rank that has least to do.
std::optional<ExpertPlacement> dealt(std::span<const double> rows, const std::vector<int>& replicas,
                                     const PlacementOptions& o) {
  std::vector<double> shares(rows.size());
  for (std::size_t e = 0; e < rows.size(); ++e)
    shares[e] = load_of(rows[e], static_cast<std::size_t>(replicas[e]), o);
  Draft draft(o);
  for (const std::size_t e : decreasing(shares)) {
    for (int i = 0; i < replicas[e]; ++i) {
      const std::size_t rank = draft.least_loaded(e);
      if (rank == draft.ranks()) return std::nullopt;
      draft.add(e, rank, shares[e]);
    }
  }
  return draft.placement();
}

}  // namespace

void check(const PlacementOptions& o) {
  const auto refuse = [](const std::string& what) { throw UsageError("placement: " + what); };
  if (o.ranks < 1) refuse("there is at least one rank, not " + std::to_string(o.ranks));
  if (o.experts < 1) refuse("there is at least one expert, not " + std::to_string(o.experts));
  if (o.most < 1) refuse("a rank has at least one expert, not " + std::to_string(o.most));
  if (std::int64_t{o.most} * o.ranks < o.experts)
    refuse(std::to_string(o.experts) + " experts do not fit into " + std::to_string(o.ranks) + " ranks of " +
           std::to_string(o.most) + " each");
  if (!(o.expert_rows >= 0 && std::isfinite(o.expert_rows) && o.remote_rows >= 0 &&
        std::isfinite(o.remote_rows)))
    refuse("what an expert or a row of another rank takes beside its rows is not negative");
}

ExpertPlacement static_placement(const PlacementOptions& o) {
  ExpertPlacement out;
  for (int e = 0; e < o.experts; ++e) out.replicas.push_back({e % o.ranks});
  return out;
}

ExpertPlacement plan_placement(std::span<const double> rows, const PlacementOptions& o) {
  if (!(std::accumulate(rows.begin(), rows.end(), 0.0) > 0)) return static_placement(o);
  ExpertPlacement best = static_placement(o);
  double least = max_load(best, rows, o);
  const auto consider = [&](const std::optional<ExpertPlacement>& placement) {
    if (!placement) return;
    const double load = max_load(*placement, rows, o);
    if (load >= least * (1 - kNothing)) return;
    best = *placement;
    least = load;
  };
  consider(packed(rows, o));
  // Step 3
  const auto experts = static_cast<std::size_t>(o.experts);
  std::vector<int> replicas(experts, 1);
  for (int all = o.experts; all <= o.ranks * o.most; ++all) {
    consider(dealt(rows, replicas, o));
    std::size_t next = experts;  // who has most rows a replica, and is not everywhere
    for (std::size_t e = 0; e < experts; ++e) {
      if (replicas[e] == o.ranks) continue;
      if (next == experts || rows[e] / replicas[e] > rows[next] / replicas[next]) next = e;
    }
    if (next == experts || rows[next] <= 0) break;
    ++replicas[next];
  }
  return best;
}

double max_load(const ExpertPlacement& placement, std::span<const double> rows, const PlacementOptions& o) {
  std::vector<double> loads(static_cast<std::size_t>(o.ranks));
  for (std::size_t e = 0; e < rows.size(); ++e) {
    const std::vector<int>& on = placement.replicas[e];
    for (const int rank : on) loads[static_cast<std::size_t>(rank)] += load_of(rows[e], on.size(), o);
  }
  return *std::ranges::max_element(loads);
}

std::vector<std::int64_t> quotas(std::int64_t rows, std::size_t replicas) {
  const Blocks blocks(static_cast<int>(replicas), rows);
  std::vector<std::int64_t> out;
  out.reserve(replicas);
  for (std::size_t i = 0; i < replicas; ++i) out.push_back(blocks.count(static_cast<int>(i)));
  return out;
}

std::vector<std::int64_t> deal_rows(const ExpertPlacement& placement, std::span<const std::int64_t> counts,
                                    const PlacementOptions& o) {
  const auto ranks = static_cast<std::size_t>(o.ranks), experts = static_cast<std::size_t>(o.experts);
  std::vector<std::int64_t> out(ranks * ranks * experts);
  for (std::size_t e = 0; e < experts; ++e) {
    const std::vector<int>& on = placement.replicas[e];
    std::vector<std::int64_t> left(ranks);
    for (std::size_t s = 0; s < ranks; ++s) left[s] = counts[s * experts + e];
    std::vector<std::int64_t> room =
        quotas(std::accumulate(left.begin(), left.end(), std::int64_t{0}), on.size());
    const auto send = [&](std::size_t source, std::size_t replica) {
      const std::int64_t rows = std::min(left[source], room[replica]);
      out[(source * ranks + static_cast<std::size_t>(on[replica])) * experts + e] += rows;
      left[source] -= rows;
      room[replica] -= rows;
    };
    for (std::size_t i = 0; i < on.size(); ++i) send(static_cast<std::size_t>(on[i]), i);
    for (std::size_t s = 0; s < ranks; ++s) {
      for (std::size_t i = 0; i < on.size() && left[s] > 0; ++i) send(s, i);
    }
  }
  return out;
}

}  // namespace weft
