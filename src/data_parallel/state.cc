#include "data_parallel/state.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "base/identity.h"
#include "weft/error.h"

namespace weft {

namespace {

// Of steps: the sum of two does not overflow.
constexpr std::int64_t kMostSteps = std::int64_t{1} << 53;

template <class T>
std::span<const T> as(std::span<const std::byte> values) {
  return {reinterpret_cast<const T*>(values.data()), values.size() / sizeof(T)};
}

template <class T, std::size_t n>
std::span<const std::byte> put(std::vector<std::byte>& scratch, const T (&values)[n]) {
  scratch.resize(sizeof values);
  std::memcpy(scratch.data(), values, sizeof values);
  return scratch;
}

std::span<const float> part_of(std::span<const float> all, const BucketPlan& plan, int parameter) {
  if (all.empty()) return {};
  return all.subspan(static_cast<std::size_t>(plan.first_of(parameter)),
                     static_cast<std::size_t>(plan.parameter(parameter).count));
}

// The controllers of a bucket of `length` elements; regions become offsets into memory and must fit exactly.
[[noreturn]] void refuse_controllers(const char* what, std::int64_t length) {
  throw UsageError("the " + std::string(what) + " of a bucket of " + std::to_string(length) +
                   " elements cannot be");
}

bool takes_quota(std::int64_t length, std::span<const std::int64_t> q) {
  const std::int64_t most = std::max<std::int64_t>(length, 1);
  if (q.size() != 3 || q[0] < 0 || q[0] > most || q[1] < -most || q[1] > most || q[2] < 0 || q[2] > 1)
    refuse_controllers("team quota", length);
  return true;
}
bool takes_figures(std::int64_t length, int size, std::span<const double> f) {
  const auto is_count = [](double value, std::int64_t most) {
    return value >= 0 && value <= static_cast<double>(most) && value == std::floor(value);
  };
  const bool fits = f.size() == 8 && is_count(f[0], TeamFigures::kPeriod) && is_count(f[1], size) &&
                    (f[1] == 0 || size % static_cast<int>(f[1]) == 0) && is_count(f[2], 1) &&
                    is_count(f[3], length) && f[4] >= 0 && f[5] >= 0 && f[5] <= 1 && is_count(f[6], 1) &&
                    f[7] >= 0 && f[7] <= static_cast<double>(TeamFigures::kPeriod);
  if (!fits) refuse_controllers("team figures", length);
  return true;
}
bool takes_thresholds(std::int64_t length, std::span<const float> t) {
  if (t.size() != 2 || !(t[0] >= 0) || !(t[1] >= 0)) refuse_controllers("thresholds", length);
  return true;
}
bool takes_steps(std::int64_t length, std::span<const std::int64_t> s) {
  if (s.size() != 2 || s[0] < 0 || s[0] > length || s[1] < 0 || s[1] > kMostSteps)
    refuse_controllers("thresholds", length);
  return true;
}
bool takes_regions(std::int64_t length, int size, std::span<const std::int64_t> r) {
  const bool fits = r.empty() || (r.size() == static_cast<std::size_t>(size) + 1 && r.front() == 0 &&
                                  r.back() == length && std::is_sorted(r.begin(), r.end()));
  if (!fits) refuse_controllers("regions", length);
  return true;
}

}  // namespace

std::string bucket_name(const BucketPlan& plan, int bucket) {
  const std::vector<BucketPiece>& pieces = plan.bucket(bucket).pieces;
  std::uint64_t hash = mix(pieces.size());
  for (const BucketPiece& piece : pieces) {
    const ParameterInfo& info = plan.parameter(piece.parameter);
    hash = mix(hash ^ static_cast<std::uint64_t>(info.count));
    for (const char c : name_of_part(info.name, info.part()))
      hash = mix(hash ^ static_cast<unsigned char>(c));
  }
  std::array<char, 16> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), hash, 16).ptr;
  return plan.parameter(pieces.front().parameter).name + " to " +
         plan.parameter(pieces.back().parameter).name + " " + std::string(digits.data(), end);
}

ParameterState::ParameterState(const BucketPlan& plan, StateRegistry& registry, const Options& options)
    : registry_(registry), options_(options) {
  lay_out(plan);
  registry_.add(options_.owner, owned());
}

ParameterState::~ParameterState() { registry_.remove(options_.owner); }

void ParameterState::lay_out(const BucketPlan& plan) {
  plan_ = plan;
  buckets_.clear();
  for (const Bucket& b : plan_.buckets()) buckets_.push_back(std::make_unique<SparseState>(b.count));
  scales_.assign(static_cast<std::size_t>(plan_.num_parameters()), kUnmeasured);
  staged_scales_ = scales_;
  factors_.assign(scales_.size(), {});
  velocities_.assign(buckets_.size(), {});
}

OwnedState ParameterState::owned() {
  return {.rows = [this] { return rows(); },
          .missing = [this] { return std::string(is_complete() ? "" : "a bucket has nothing staged"); },
          .commit = [this] { commit(); },
          .roll_back = [this] { roll_back(); }};
}

void ParameterState::install(const BucketPlan& plan) {
  // A plan is a snapshot's journey to itself with other places; controllers find their bucket by its names.
  StateRegistry apart;
  ParameterState next(plan, apart, options_);
  const StateSnapshot mine = registry_.save(options_.peers.rank, options_.peers.size, options_.owner);
  const LoadOptions only{.owners = {options_.owner}, .elsewhere = {}};
  apart.load(std::span(&mine, 1), mine.rank, mine.size, only);
  plan_ = plan;
  buckets_.swap(next.buckets_);
  scales_.swap(next.scales_);
  staged_scales_ = scales_;
  factors_.swap(next.factors_);
  velocities_.swap(next.velocities_);
}

std::span<const float> ParameterState::residual(int parameter) const {
  return part_of(bucket(plan_.bucket_of(parameter)).residual(), plan_, parameter);
}

std::span<const float> ParameterState::velocity(int parameter) const {
  const auto b = static_cast<std::size_t>(plan_.bucket_of(parameter));
  return part_of(velocities_[b].committed, plan_, parameter);
}

void ParameterState::stage_scale(int b, double measured) {
  for (const BucketPiece& piece : plan_.bucket(b).pieces) {
    const auto p = static_cast<std::size_t>(piece.parameter);
    staged_scales_[p] = blend_scales(scales_[p], measured);
  }
}

void ParameterState::keep(int parameter) {
  const int b = plan_.bucket_of(parameter);
  const auto restore = [&](const LargeVector<float>& committed, LargeVector<float>& staged) {
    if (committed.empty() && staged.empty()) return;
    if (staged.empty()) staged.assign(static_cast<std::size_t>(plan_.bucket(b).count), 0.0F);
    const auto first = staged.begin() + static_cast<std::ptrdiff_t>(plan_.first_of(parameter));
    std::fill_n(first, plan_.parameter(parameter).count, 0.0F);
    std::ranges::copy(part_of(committed, plan_, parameter), first);
  };
  SparseWork& work = bucket(b).work();
  restore(work.residual, work.staged);
  Velocity& velocity = bucket_velocity(b);
  if (velocity.has_staged) restore(velocity.committed, velocity.staged);
  factor(parameter).roll_back();
}

bool ParameterState::is_complete() const {
  return std::all_of(buckets_.begin(), buckets_.end(), [](const auto& b) { return b->work().has_staged; });
}

void ParameterState::commit() {
  for (const auto& b : buckets_) b->commit();
  scales_ = staged_scales_;
  for (WarmFactor& f : factors_) f.commit();
  for (Velocity& v : velocities_) v.commit();
}

void ParameterState::roll_back() {
  for (const auto& b : buckets_) b->roll_back();
  for (WarmFactor& f : factors_) f.roll_back();
  for (Velocity& v : velocities_) v.roll_back();
  staged_scales_ = scales_;
}

// ---- rows ----

std::vector<LiveRow> ParameterState::rows() {
  std::vector<LiveRow> out;
  for (int p = 0; p < plan_.num_parameters(); ++p) {
    const int b = plan_.bucket_of(p);
    out.push_back(part_row("residual", p, bucket(b).work().residual));
    if (options_.velocities) out.push_back(part_row("velocity", p, bucket_velocity(b).committed));
    out.push_back(scale_row(p));
    if (options_.factors && plan_.parameter(p).rows > 0) out.push_back(factor_row(p));
  }
  for (int b = 0; b < plan_.num_buckets(); ++b) add_controllers(out, b);
  return out;
}

// A parameter's part of a bucket's vector, which is empty for zeros.
LiveRow ParameterState::part_row(const char* kind, int parameter, LargeVector<float>& all) {
  const ParameterInfo& info = plan_.parameter(parameter);
  LiveRow out;
  out.row = {.key = {options_.owner, kind, info.name},
             .dtype = DType::float32,
             .rule = LayoutRule::sum,
             .shard = info.part(),
             .peers = options_.of_copy.value_or(options_.peers),
             .divisor = options_.divisor};
  out.loads_only = !options_.is_first_copy;
  out.read = [this, parameter, &all](auto&) { return std::as_bytes(part_of(all, plan_, parameter)); };
  out.write = [this, parameter, &all](std::span<const std::byte> values) {
    if (values.empty() && all.empty()) return;
    all.resize(static_cast<std::size_t>(plan_.bucket(plan_.bucket_of(parameter)).count));
    const auto first = all.begin() + static_cast<std::ptrdiff_t>(plan_.first_of(parameter));
    std::fill_n(first, plan_.parameter(parameter).count, 0.0F);
    std::ranges::copy(as<float>(values), first);
  };
  return out;
}

LiveRow ParameterState::scale_row(int parameter) {
  double& scale = scales_[static_cast<std::size_t>(parameter)];
  const ParameterInfo& info = plan_.parameter(parameter);
  LiveRow out;
  out.row = {.key = {options_.owner, "scale", name_of_part(info.name, info.part())},
             .dtype = DType::float64,
             .rule = LayoutRule::same,
             .shard = Shard::whole({1}),
             .peers = options_.peers};
  out.read = [&scale](auto&) { return std::as_bytes(std::span(&scale, 1)); };
  out.write = [&scale](std::span<const std::byte> values) {
    scale = values.empty() ? kUnmeasured : as<double>(values)[0];
  };
  out.takes = [name = info.name](const Shard&, std::span<const std::byte> values) {
    const std::span<const double> told = as<double>(values);
    if (told.size() != 1 || (told[0] < 0 && told[0] != kUnmeasured))
      throw UsageError("the scale of '" + name + "' is negative, or not one");
    return true;
  };
  return out;
}

// Columns one after the other; none before the first step. A factor holds no mass: one of a matrix with
// another shape is left behind.
LiveRow ParameterState::factor_row(int parameter) {
  WarmFactor& factor = factors_[static_cast<std::size_t>(parameter)];
  const ParameterInfo& info = plan_.parameter(parameter);
  const std::int64_t length = info.count / info.rows;
  const std::int64_t columns = length == 0 ? 0 : static_cast<std::int64_t>(factor.columns.size()) / length;
  LiveRow out;
  out.row = {.key = {options_.owner, "factor", name_of_part(info.name, info.part())},
             .dtype = DType::float32,
             .rule = LayoutRule::same,
             .shard = Shard::whole({columns, length}),
             .peers = options_.peers};
  out.read = [&factor](auto&) { return std::as_bytes(std::span<const float>(factor.columns)); };
  out.write = [&factor](std::span<const std::byte> values) {
    factor.columns.assign(as<float>(values).begin(), as<float>(values).end());
  };
  out.takes = [name = info.name, length, count = info.count](const Shard& shard, std::span<const std::byte>) {
    if (shard.shape.size() != 2) throw UsageError("the factor of '" + name + "' is not a matrix");
    return shard.shape[1] == length && shard.num_elements() <= count;
  };
  return out;
}

void ParameterState::add_controllers(std::vector<LiveRow>& rows, int b) {
  const Bucket& bucket = plan_.bucket(b);
  std::vector<std::string> names;
  names.reserve(bucket.pieces.size());
  for (const BucketPiece& piece : bucket.pieces) names.push_back(plan_.parameter(piece.parameter).name);
  const std::string name = bucket_name(plan_, b);
  SparseWork& work = buckets_[static_cast<std::size_t>(b)]->work();
  const std::int64_t length = bucket.count;
  const auto add = [&](const char* kind, DType dtype, std::size_t count, auto read, auto write, auto takes) {
    LiveRow row;
    row.row = {.key = {options_.owner, kind, name},
               .dtype = dtype,
               .rule = LayoutRule::restart,
               .shard = Shard::whole({static_cast<std::int64_t>(count)}),
               .peers = options_.peers};
    row.read = read;
    row.write = write;
    row.takes = takes;
    row.needs = names;
    rows.push_back(std::move(row));
  };
  using Bytes = std::span<const std::byte>;
  add(
      "team_quota", DType::int64, 3,
      [&q = work.team_quota](auto& scratch) {
        return put<std::int64_t>(scratch, {q.entries, q.step, q.inertia ? 1 : 0});
      },
      [&q = work.team_quota](Bytes values) {
        const auto v = as<std::int64_t>(values);
        q = v.empty() ? TeamQuota{} : TeamQuota{.entries = v[0], .step = v[1], .inertia = v[2] == 1};
      },
      [length](const Shard&, Bytes values) { return takes_quota(length, as<std::int64_t>(values)); });
  add(
      "team_figures", DType::float64, 8,
      [&f = work.team_figures](auto& scratch) {
        return put<double>(scratch, {static_cast<double>(f.operations), static_cast<double>(f.choice.teams),
                                     f.choice.recursive ? 1.0 : 0.0, static_cast<double>(f.k), f.entry_bytes,
                                     f.overlap, f.has_overlap ? 1.0 : 0.0, f.lists});
      },
      [&f = work.team_figures](Bytes values) {
        const auto v = as<double>(values);
        f = {};
        if (v.empty()) return;
        f = {.operations = static_cast<std::int64_t>(v[0]),
             .choice = {.teams = static_cast<int>(v[1]), .recursive = v[2] == 1},
             .k = static_cast<std::int64_t>(v[3]),
             .entry_bytes = v[4],
             .overlap = v[5],
             .has_overlap = v[6] == 1,
             .lists = v[7]};
      },
      [length, size = options_.peers.size](const Shard&, Bytes values) {
        return takes_figures(length, size, as<double>(values));
      });
  Thresholds& t = work.thresholds;
  add(
      "thresholds", DType::float32, 2,
      [&t](auto& scratch) { return put<float>(scratch, {t.local, t.global}); },
      [&t](Bytes values) {
        const auto v = as<float>(values);
        t.local = v.empty() ? 0 : v[0];
        t.global = v.empty() ? 0 : v[1];
      },
      [length](const Shard&, Bytes values) { return takes_thresholds(length, as<float>(values)); });
  add(
      "threshold_steps", DType::int64, 2,
      [&t](auto& scratch) { return put<std::int64_t>(scratch, {t.k, t.steps}); },
      [&t](Bytes values) {
        const auto v = as<std::int64_t>(values);
        t.k = v.empty() ? 0 : v[0];
        t.steps = v.empty() ? 0 : v[1];
      },
      [length](const Shard&, Bytes values) { return takes_steps(length, as<std::int64_t>(values)); });
  add(
      "regions", DType::int64, t.regions.size(),
      [&t](auto&) { return std::as_bytes(std::span<const std::int64_t>(t.regions)); },
      [&t](Bytes values) {
        t.regions.assign(as<std::int64_t>(values).begin(), as<std::int64_t>(values).end());
      },
      [length, size = options_.peers.size](const Shard&, Bytes values) {
        return takes_regions(length, size, as<std::int64_t>(values));
      });
}

}  // namespace weft
