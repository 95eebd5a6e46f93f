#include "data_parallel/state.h"

#include <algorithm>
#include <cmath>

#include "weft/error.h"

namespace weft {

namespace {

std::string number(std::int64_t n) { return std::to_string(n); }

void check_complete(std::span<const StateSnapshot> snapshots) {
  std::vector<bool> seen(snapshots.size());
  for (const StateSnapshot& s : snapshots) {
    if (s.size != static_cast<int>(snapshots.size())) {
      throw UsageError("reshard: rank " + number(s.rank) + "'s snapshot is of " + number(s.size) +
                       " ranks, not " + number(static_cast<std::int64_t>(snapshots.size())));
    }
    if (s.rank < 0 || s.rank >= s.size || seen[static_cast<std::size_t>(s.rank)]) {
      throw UsageError("reshard: rank " + number(s.rank) + " of " + number(s.size) +
                       " is there twice or never was");
    }
    seen[static_cast<std::size_t>(s.rank)] = true;
    if (s.step != snapshots[0].step) {
      throw UsageError("reshard: rank " + number(s.rank) + "'s snapshot is of step " + number(s.step) +
                       ", others of step " + number(snapshots[0].step));
    }
    const auto same = [](const StateSnapshot::Parameter& a, const StateSnapshot::Parameter& b) {
      return a.name == b.name && a.count == b.count && a.factor == b.factor && a.factor_rank == b.factor_rank;
    };
    if (!std::equal(s.parameters.begin(), s.parameters.end(), snapshots[0].parameters.begin(),
                    snapshots[0].parameters.end(), same)) {
      throw UsageError("reshard: rank " + number(s.rank) +
                       "'s snapshot has other parameters or factors than rank " + number(snapshots[0].rank) +
                       "'s");
    }
    for (const StateSnapshot::Parameter& p : s.parameters) {
      if (!p.residual.empty() && static_cast<std::int64_t>(p.residual.size()) != p.count) {
        throw UsageError("reshard: the residual of '" + p.name + "' on rank " + number(s.rank) + " is torn");
      }
      if (!p.velocity.empty() && static_cast<std::int64_t>(p.velocity.size()) != p.count) {
        throw UsageError("reshard: the velocity of '" + p.name + "' on rank " + number(s.rank) + " is torn");
      }
    }
  }
}

void check_finite(const StateSnapshot::Parameter& p) {
  const auto finite = [](float v) { return std::isfinite(v); };
  if (std::all_of(p.residual.begin(), p.residual.end(), finite) && std::isfinite(p.scale) &&
      std::all_of(p.factor.begin(), p.factor.end(), finite) &&
      std::all_of(p.velocity.begin(), p.velocity.end(), finite)) {
    return;
  }
  throw UsageError("state: the snapshot of '" + p.name + "' is not finite");
}

// Columns of a factor of the parameter, as far as its elements say.
void check_factor(const StateSnapshot::Parameter& p) {
  const auto rank = static_cast<std::size_t>(p.factor_rank);
  if (p.factor_rank >= 0 && (rank == 0 ? p.factor.empty() : p.factor.size() % rank == 0)) return;
  throw UsageError("state: the factor of '" + p.name + "' is torn");
}

void add(std::vector<float>& into, const std::vector<float>& more) {
  if (into.empty()) {
    into = more;
    return;
  }
  for (std::size_t i = 0; i < more.size(); ++i) into[i] += more[i];
}

}  // namespace

std::vector<StateSnapshot> reshard(std::span<const StateSnapshot> snapshots, int size) {
  if (size < 1 || snapshots.empty()) throw UsageError("reshard: no snapshots, or no ranks");
  check_complete(snapshots);
  std::vector<const StateSnapshot*> old(snapshots.size());
  for (const StateSnapshot& s : snapshots) old[static_cast<std::size_t>(s.rank)] = &s;
  if (size == static_cast<int>(old.size())) {
    std::vector<StateSnapshot> same;
    same.reserve(old.size());
    for (const StateSnapshot* s : old) same.push_back(*s);
    return same;
  }
  StateSnapshot empty = *old[0];
  empty.size = size;
  empty.controllers.clear();
  for (StateSnapshot::Parameter& p : empty.parameters) {
    p.residual.clear();
    p.velocity.clear();
  }
  std::vector<StateSnapshot> out(static_cast<std::size_t>(size), empty);
  for (int r = 0; r < size; ++r) out[static_cast<std::size_t>(r)].rank = r;
  for (std::size_t r = 0; r < old.size(); ++r) {
    StateSnapshot& into = out[r % out.size()];
    for (std::size_t p = 0; p < into.parameters.size(); ++p) {
      add(into.parameters[p].residual, old[r]->parameters[p].residual);
      add(into.parameters[p].velocity, old[r]->parameters[p].velocity);
    }
  }
  return out;
}

ParameterState::ParameterState(const BucketPlan& plan) : plan_(plan) {
  for (const Bucket& b : plan_.buckets()) buckets_.push_back(std::make_unique<SparseState>(b.count));
  scales_.assign(static_cast<std::size_t>(plan_.num_parameters()), kUnmeasured);
  staged_scales_ = scales_;
  factors_.resize(scales_.size());
  velocities_.resize(buckets_.size());
}

std::span<const float> ParameterState::residual(int parameter) const {
  const std::span<const float> all = bucket(plan_.bucket_of(parameter)).residual();
  if (all.empty()) return {};
  return all.subspan(static_cast<std::size_t>(plan_.first_of(parameter)),
                     static_cast<std::size_t>(plan_.parameter(parameter).count));
}

std::span<const float> ParameterState::velocity(int parameter) const {
  const auto b = static_cast<std::size_t>(plan_.bucket_of(parameter));
  const std::span<const float> all = velocities_[b].committed;
  if (all.empty()) return {};
  return all.subspan(static_cast<std::size_t>(plan_.first_of(parameter)),
                     static_cast<std::size_t>(plan_.parameter(parameter).count));
}

void ParameterState::add_residual(int parameter, std::span<const float> residual) {
  SparseWork& work = bucket(plan_.bucket_of(parameter)).work();
  work.residual.resize(static_cast<std::size_t>(work.length));
  const auto first = work.residual.begin() + static_cast<std::ptrdiff_t>(plan_.first_of(parameter));
  std::transform(residual.begin(), residual.end(), first, first, [](float a, float b) { return a + b; });
}

void ParameterState::add_velocity(int parameter, std::span<const float> velocity) {
  const int b = plan_.bucket_of(parameter);
  LargeVector<float>& all = bucket_velocity(b).committed;
  all.resize(static_cast<std::size_t>(plan_.bucket(b).count));
  std::copy(velocity.begin(), velocity.end(),
            all.begin() + static_cast<std::ptrdiff_t>(plan_.first_of(parameter)));
}

void ParameterState::install(const BucketPlan& plan) {
  // A plan is a snapshot's journey to itself with other places; controllers find their bucket by its names.
  ParameterState next(plan);
  next.load(save(0, 1), 0, 1);
  *this = std::move(next);
}

void ParameterState::stage_scale(int b, double measured) {
  for (const BucketPiece& piece : plan_.bucket(b).pieces) {
    const auto p = static_cast<std::size_t>(piece.parameter);
    staged_scales_[p] = blend_scales(scales_[p], measured);
  }
}

void ParameterState::commit() {
  for (const auto& b : buckets_) {
    if (!b->work().has_staged) throw UsageError("ParameterState::commit: a bucket has nothing staged");
  }
  for (const auto& b : buckets_) b->commit();
  scales_ = staged_scales_;
  for (WarmFactor& f : factors_) f.commit();
  for (Velocity& v : velocities_) v.commit();
  ++step_;
}

void ParameterState::roll_back() {
  for (const auto& b : buckets_) b->roll_back();
  for (WarmFactor& f : factors_) f.roll_back();
  for (Velocity& v : velocities_) v.roll_back();
  staged_scales_ = scales_;
}

StateSnapshot ParameterState::save(int rank, int size) const {
  StateSnapshot out{.step = step_, .rank = rank, .size = size, .parameters = {}, .controllers = {}};
  for (int p = 0; p < plan_.num_parameters(); ++p) {
    const std::span<const float> mine = residual(p);
    const std::span<const float> fast = velocity(p);
    const ParameterInfo& info = plan_.parameter(p);
    const std::vector<float>& factor = factors_[static_cast<std::size_t>(p)].columns;
    const auto columns = static_cast<std::size_t>(info.rows == 0 ? 0 : info.count / info.rows);
    out.parameters.push_back({.name = info.name,
                              .count = info.count,
                              .residual = {mine.begin(), mine.end()},
                              .scale = scale(p),
                              .factor = factor,
                              .factor_rank = columns == 0 ? 0 : static_cast<int>(factor.size() / columns),
                              .velocity = {fast.begin(), fast.end()}});
  }
  for (int b = 0; b < plan_.num_buckets(); ++b) {
    const SparseWork& work = bucket(b).work();
    StateSnapshot::Controllers controllers{
        .parameters = {}, .team_quota = work.team_quota, .thresholds = work.thresholds};
    for (const BucketPiece& piece : plan_.bucket(b).pieces) {
      controllers.parameters.push_back(plan_.parameter(piece.parameter).name);
    }
    out.controllers.push_back(std::move(controllers));
  }
  return out;
}

void ParameterState::load(const StateSnapshot& snapshot, int rank, int size) {
  if (snapshot.rank != rank || snapshot.size != size) {
    throw UsageError("state: a snapshot of rank " + number(snapshot.rank) + " of " + number(snapshot.size) +
                     " does not load on rank " + number(rank) + " of " + number(size) + ": reshard it first");
  }
  ParameterState next(plan_);
  next.step_ = snapshot.step;
  for (const StateSnapshot::Parameter& from : snapshot.parameters) next.take(from);
  next.staged_scales_ = next.scales_;
  next.take_controllers(snapshot);
  *this = std::move(next);
}

void ParameterState::take(const StateSnapshot::Parameter& from) {
  check_finite(from);
  check_factor(from);
  const auto fits = [&](const std::vector<float>& values) {
    return values.empty() || static_cast<std::int64_t>(values.size()) == from.count;
  };
  if (!fits(from.residual) || !fits(from.velocity))
    throw UsageError("state: the residual or velocity of '" + from.name + "' is torn");
  const int p = plan_.find(from.name);
  if (p < 0) {
    if (std::all_of(from.residual.begin(), from.residual.end(), [](float v) { return v == 0; })) return;
    throw UsageError("state: the residual of '" + from.name + "' (" + number(from.count) +
                     " elements) has no place in this plan; its mass would be lost");
  }
  const ParameterInfo& info = plan_.parameter(p);
  if (from.count != info.count) {
    throw UsageError("state: '" + from.name + "' has " + number(from.count) +
                     " elements in the snapshot and " + number(info.count) + " here");
  }
  if (!from.residual.empty()) add_residual(p, from.residual);
  if (!from.velocity.empty()) add_velocity(p, from.velocity);
  scales_[static_cast<std::size_t>(p)] = from.scale;
  if (info.rows > 0 &&
      static_cast<std::int64_t>(from.factor.size()) == from.count / info.rows * from.factor_rank) {
    factors_[static_cast<std::size_t>(p)].columns = from.factor;
  }
}

// REQUIRES: every parameter of the snapshot that is in the plan has its length.
void ParameterState::take_controllers(const StateSnapshot& snapshot) {
  std::vector<bool> known(static_cast<std::size_t>(plan_.num_parameters()));
  for (const StateSnapshot::Parameter& from : snapshot.parameters) {
    if (const int p = plan_.find(from.name); p >= 0) known[static_cast<std::size_t>(p)] = true;
  }
  for (int b = 0; b < plan_.num_buckets(); ++b) {
    bool complete = true;
    std::vector<std::string> names;
    for (const BucketPiece& piece : plan_.bucket(b).pieces) {
      complete = complete && known[static_cast<std::size_t>(piece.parameter)];
      names.push_back(plan_.parameter(piece.parameter).name);
    }
    const auto found = std::find_if(snapshot.controllers.begin(), snapshot.controllers.end(),
                                    [&](const auto& c) { return c.parameters == names; });
    if (!complete || found == snapshot.controllers.end()) continue;
    const std::vector<std::int64_t>& regions = found->thresholds.regions;
    if (!regions.empty() && (regions.front() != 0 || regions.back() != plan_.bucket(b).count ||
                             !std::is_sorted(regions.begin(), regions.end()))) {
      throw UsageError("state: the regions of the bucket from '" + names.front() + "' do not fit its " +
                       number(plan_.bucket(b).count) + " elements");
    }
    bucket(b).work().team_quota = found->team_quota;
    bucket(b).work().thresholds = found->thresholds;
  }
}

}  // namespace weft
