#include "data_parallel/data_parallel.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/names.h"
#include "collectives/registry.h"
#include "kernels/optimize.h"
#include "kernels/select.h"
#include "weft/collective.h"
#include "weft/error.h"
#include "weft/identity.h"

namespace weft {

namespace {

[[noreturn]] void refuse(const std::string& what) { throw UsageError("data parallel: " + what); }

double checked_density(double density) {
  if (!(density > 0 && density <= 1)) refuse("density must be in (0, 1], not " + std::to_string(density));
  return density;
}

constexpr std::string_view kPowerSgd = "powersgd";

bool is_dense_row(std::string_view algorithm) { return algorithm == "dense" || algorithm == "dense-bf16"; }

void check_algorithm(const DataParallelOptions& options) {
  std::vector<std::string_view> known;
  for (const SparseAlgorithm& row : sparse_algorithms()) known.push_back(row.name);
  known.push_back(kPowerSgd);
  if (std::ranges::find(known, options.algorithm) == known.end())
    refuse(unknown_name("algorithm", options.algorithm, known));
  if (options.rank < 1) refuse("rank must be at least 1, not " + std::to_string(options.rank));
  if (!(options.min_compression >= 0)) refuse("min_compression must not be negative");
  if (options.all_reduce != "auto") find_algorithm(Family::all_reduce, options.all_reduce);
}

void check_recipe(const DataParallelOptions& options) {
  const double momentum = options.momentum_correction;
  if (!(momentum >= 0 && momentum < 1))
    refuse("momentum correction must be at least 0 and below 1, not " + std::to_string(momentum));
  if (momentum > 0 && (is_dense_row(options.algorithm) || options.algorithm == kPowerSgd)) {
    refuse("momentum correction is for schemes that select entries, not for '" + options.algorithm +
           "': give the optimizer its momentum");
  }
  if (!(options.clip_local >= 0) || std::isinf(options.clip_local))
    refuse("clip_local must be finite and not negative");
}

// What is short needs no bucket of its own where nothing is selected.
BucketOptions buckets_of(std::string_view algorithm, BucketOptions buckets) {
  if (algorithm == kPowerSgd) buckets.dense_below = 0;
  return buckets;
}

Task<void> compare_plans(Comm comm, std::shared_ptr<std::vector<std::int64_t>> hashes) {
  const Dense all(std::span<std::int64_t>{*hashes});
  co_await all_gather(comm, all);
  const std::int64_t mine = (*hashes)[static_cast<std::size_t>(comm.rank())];
  for (int r = 0; r < comm.size(); ++r) {
    if ((*hashes)[static_cast<std::size_t>(r)] == mine) continue;
    throw TransportError(TransportError::Kind::mismatch, comm.world_rank(r),
                         "data parallel: rank " + std::to_string(r) +
                             " has another plan of buckets (names, lengths or options) than rank " +
                             std::to_string(comm.rank()));
  }
}

}  // namespace

DataParallel::DataParallel(Engine& engine, const Comm& comm, std::vector<ParameterInfo> parameters,
                           DataParallelOptions options, StateRegistry* registry)
    : engine_(engine),
      comm_(comm),
      options_(std::move(options)),
      plan_(std::move(parameters), buckets_of(options_.algorithm, options_.buckets)),
      own_registry_(registry == nullptr ? std::make_unique<StateRegistry>() : nullptr),
      registry_(registry == nullptr ? own_registry_.get() : registry) {
  checked_density(options_.density);
  check_algorithm(options_);
  check_recipe(options_);
  wire::sparse_codec_of(options_.codec);
  if (options_.dtype != DType::float32 && options_.dtype != DType::float64)
    refuse("gradients are float32 or float64");
  if (options_.dtype == DType::float64 && options_.algorithm != "dense")
    refuse("float64 gradients are reduced by 'dense' only, not by '" + options_.algorithm + "'");
  if (options_.divisor == 0) options_.divisor = comm.size();
  if (!(options_.divisor > 0)) refuse("the divisor must be positive");
  const ParameterState::Options kept{.peers = {comm.rank(), comm.size()},
                                     .velocities = options_.momentum_correction > 0,
                                     .factors = options_.algorithm == kPowerSgd};
  state_ = std::make_unique<ParameterState>(plan_, *registry_, kept);
  lay_out();
  submit_comparison();
}

DataParallel::~DataParallel() = default;

void DataParallel::lay_out() {
  runs_.clear();
  for (int b = 0; b < plan_.num_buckets(); ++b) {
    auto run = std::make_unique<BucketRun>();
    run->plan = &plan_;
    run->bucket = &plan_.bucket(b);
    run->state = &state_->bucket(b);
    run->wide = options_.dtype == DType::float64;
    run->options.codec = options_.codec;
    run->options.blocks = options_.blocks;
    run->options.residual = options_.residual;
    run->options.teams = options_.teams;
    run->options.gather = options_.gather;
    run->options.threads = options_.threads;
    if (options_.algorithm == kPowerSgd) run->low_rank = low_rank_of_bucket(*run->bucket);
    run->order = options_.all_reduce;
    run->momentum = static_cast<float>(options_.momentum_correction);
    if (options_.momentum_correction > 0) run->velocity = &state_->bucket_velocity(b);
    runs_.push_back(std::move(run));
  }
  has_result_ = false;
}

std::unique_ptr<LowRank> DataParallel::low_rank_of_bucket(const Bucket& bucket) {
  const LowRankOptions options{
      .rank = options_.rank, .min_compression = options_.min_compression, .seed = options_.seed};
  auto out = std::make_unique<LowRank>(options);
  for (const BucketPiece& piece : bucket.pieces) {
    const ParameterInfo& info = plan_.parameter(piece.parameter);
    out->add(info.name, info.rows, info.count, &state_->factor(piece.parameter));
  }
  return out;
}

void DataParallel::submit_comparison() {
  auto hashes = std::make_shared<std::vector<std::int64_t>>(static_cast<std::size_t>(comm_.size()));
  std::uint64_t hash = plan_.hash();
  if (options_.algorithm == kPowerSgd) {
    for (const std::uint64_t part : {static_cast<std::uint64_t>(options_.rank), options_.seed,
                                     std::bit_cast<std::uint64_t>(options_.min_compression)}) {
      hash = mix(hash ^ part);
    }
  }
  for (const double part : {options_.momentum_correction, options_.clip_local}) {
    if (part != 0) hash = mix(hash ^ std::bit_cast<std::uint64_t>(part));
  }
  (*hashes)[static_cast<std::size_t>(comm_.rank())] = static_cast<std::int64_t>(hash);
  const SubmitOptions submit{.name = "plan of buckets", .slot = options_.first_slot, .step = attempt_++};
  tickets_.push_back(
      engine_.submit(comm_, submit, [hashes](Comm comm) { return compare_plans(comm, hashes); }));
}

void DataParallel::begin_step() {
  std::vector<std::int64_t> lengths;
  std::vector<QuotaPart> parts;
  for (int b = 0; b < plan_.num_buckets(); ++b) {
    const Bucket& bucket = plan_.bucket(b);
    lengths.push_back(bucket.dense ? 0 : bucket.count);
    for (const BucketPiece& piece : bucket.pieces) {
      if (bucket.dense) break;
      parts.push_back({b, plan_.parameter(piece.parameter).count, state_->scale(piece.parameter)});
    }
  }
  const std::int64_t k = std::llround(options_.density * static_cast<double>(plan_.sparse_count()));
  const bool adapts =
      options_.quotas == QuotaKind::adaptive && k < plan_.sparse_count() && !is_dense_row(options_.algorithm);
  quotas_ = options_.quotas == QuotaKind::adaptive ? adaptive_quotas(lengths, parts, k)
                                                   : proportional_quotas(lengths, k);
  for (int b = 0; b < plan_.num_buckets(); ++b) {
    const auto i = static_cast<std::size_t>(b);
    const Bucket& bucket = plan_.bucket(b);
    if (bucket.dense) quotas_[i] = bucket.count;
    BucketRun& run = *runs_[i];
    if (run.low_rank) quotas_[i] = bucket.count;
    run.step = static_cast<std::uint32_t>(state_->step());
    run.pending = bucket.pieces.size();
    run.options.k = quotas_[i];
    // (Where every entry would be sent, indices are a waste, and selection on the way may lose some.)
    const bool whole = quotas_[i] == bucket.count && !is_dense_row(options_.algorithm) && !run.low_rank;
    run.options.algorithm = whole || bucket.dense ? std::string_view("dense") : options_.algorithm;
    run.measures = adapts && !bucket.dense && !run.low_rank;
    run.masks = run.options.algorithm != "dense";
  }
  ready_.assign(static_cast<std::size_t>(plan_.num_parameters()), false);
  squares_.assign(ready_.size(), 0);
  has_result_ = false;
  phase_ = Phase::open;
}

// The bucket of a gradient that may come now.
int DataParallel::accept(int parameter, std::size_t count, DType dtype) {
  if (parameter < 0 || parameter >= plan_.num_parameters()) {
    refuse("there is no parameter " + std::to_string(parameter));
  }
  const ParameterInfo& info = plan_.parameter(parameter);
  if (static_cast<std::int64_t>(count) != info.count) {
    refuse("a gradient of " + std::to_string(count) + " elements for '" + info.name + "', which has " +
           std::to_string(info.count));
  }
  if (dtype != options_.dtype) refuse("a gradient of '" + info.name + "' of another type than was announced");
  if (phase_ == Phase::ended) refuse("a gradient of '" + info.name + "' after step_end()");
  if (phase_ == Phase::between) begin_step();
  if (ready_[static_cast<std::size_t>(parameter)])
    refuse("a second gradient of '" + info.name + "' in one step");
  ready_[static_cast<std::size_t>(parameter)] = true;
  return plan_.bucket_of(parameter);
}

void DataParallel::arrived(int bucket) {
  if (--runs_[static_cast<std::size_t>(bucket)]->pending == 0 && options_.clip_local == 0) submit(bucket);
}

void DataParallel::gradient_ready(int parameter, std::span<const double> gradient) {
  const int b = accept(parameter, gradient.size(), DType::float64);
  BucketRun& run = *runs_[static_cast<std::size_t>(b)];
  const BucketPiece piece{parameter, plan_.first_of(parameter)};
  std::copy(gradient.begin(), gradient.end(), run.part_of(run.values, piece).begin());
  if (options_.clip_local > 0) squares_[static_cast<std::size_t>(parameter)] = sum_of_squares(gradient);
  arrived(b);
}

void DataParallel::gradient_ready(int parameter, std::span<const float> gradient) {
  const int b = accept(parameter, gradient.size(), DType::float32);
  BucketRun& run = *runs_[static_cast<std::size_t>(b)];
  if (run.bucket->pieces.size() == 1) {
    run.gradient = gradient;
  } else {
    const BucketPiece piece{parameter, plan_.first_of(parameter)};
    std::copy(gradient.begin(), gradient.end(), run.part(piece).begin());
    run.gradient = run.buffer;
  }
  if (options_.clip_local > 0) squares_[static_cast<std::size_t>(parameter)] = sum_of_squares(gradient);
  arrived(b);
}

void DataParallel::submit(int b) {
  BucketRun* const run = runs_[static_cast<std::size_t>(b)].get();
  const std::string name = "gradients of bucket " + std::to_string(b) + " from " +
                           plan_.parameter(run->bucket->pieces.front().parameter).name;
  const SubmitOptions options{.name = name,
                              .traffic = TrafficClass::gradient,
                              .priority = b,
                              .slot = options_.first_slot + 1 + static_cast<std::uint32_t>(b),
                              .step = attempt_};
  run->ticket = tickets_.size();
  tickets_.push_back(engine_.submit(comm_, options, [run](Comm comm) {
    if (run->low_rank) return BucketRun::reduce_low_rank(comm, run);
    return run->wide ? BucketRun::reduce_wide(comm, run) : BucketRun::reduce(comm, run);
  }));
}

void DataParallel::submit_unused() {
  used_.assign(ready_.begin(), ready_.end());
  const SubmitOptions options{.name = "which parameters were used",
                              .traffic = TrafficClass::gradient,
                              .slot = options_.first_slot,
                              .step = attempt_};
  static constexpr AllReduceOptions kAny{.reduction = Reduction::max};
  tickets_.push_back(engine_.submit(comm_, options, [this](Comm comm) {
    return all_reduce(comm, Dense(std::span<std::int32_t>{used_}), kAny);
  }));
}

// What this rank's gradient is multiplied by; one that is not finite goes on as it is, to be named.
double DataParallel::local_scale() {
  double squares = 0;
  for (const double s : squares_) squares += s;
  local_norm_ = std::sqrt(squares) / options_.divisor;
  const double limit = options_.clip_local / std::sqrt(comm_.size());
  return std::isfinite(local_norm_) && local_norm_ > limit ? limit / local_norm_ : 1;
}

void DataParallel::step_end() {
  if (phase_ == Phase::ended) refuse("step_end() twice in one step");
  if (phase_ == Phase::between) begin_step();
  const bool held_back = options_.clip_local > 0;
  const double scale = held_back ? local_scale() : 1;
  for (int b = 0; b < plan_.num_buckets(); ++b) {
    BucketRun& run = *runs_[static_cast<std::size_t>(b)];
    if (run.pending == 0 && !held_back) continue;
    for (const BucketPiece& piece : run.bucket->pieces) {
      if (ready_[static_cast<std::size_t>(piece.parameter)]) continue;
      if (run.wide) {
        std::ranges::fill(run.part_of(run.values, piece), 0.0);
        continue;
      }
      std::ranges::fill(run.part(piece), 0.0F);
    }
    if (run.pending > 0) run.gradient = run.buffer;
    run.pending = 0;
    if (scale != 1) run.scale_by(scale);
    submit(b);
  }
  if (options_.find_unused) submit_unused();
  phase_ = Phase::ended;
}

std::vector<Ticket> DataParallel::tickets_for(int use) const {
  std::vector<Ticket> out;
  if (phase_ != Phase::ended) return out;
  for (const std::unique_ptr<BucketRun>& run : runs_) {
    const auto is_used = [&](const BucketPiece& piece) {
      return plan_.parameter(piece.parameter).use == use;
    };
    if (std::ranges::any_of(run->bucket->pieces, is_used)) out.push_back(tickets_[run->ticket]);
  }
  return out;
}

StepResult DataParallel::finish() {
  if (phase_ != Phase::ended) refuse("finish() before step_end()");
  for (const Ticket& t : tickets_) {
    if (!t.done()) refuse("finish() while operations are in flight: wait for the tickets");
  }
  const std::vector<Ticket> tickets = std::move(tickets_);
  tickets_.clear();
  for (const auto& run : runs_) run->computed_seconds = tickets[run->ticket].computed_seconds();
  phase_ = Phase::between;
  ++attempt_;
  StepResult out{.committed = false, .step = state_->step(), .bad = {}, .text = {}};
  for (const Ticket& t : tickets) {
    if (!t.error()) continue;
    registry_->roll_back();
    std::rethrow_exception(t.error());
  }
  if (!std::all_of(runs_.begin(), runs_.end(), [](const auto& run) { return run->finite(); })) {
    registry_->roll_back();
    return verdicts();
  }
  for (int b = 0; b < plan_.num_buckets(); ++b) {
    const BucketRun& run = *runs_[static_cast<std::size_t>(b)];
    if (run.measures) state_->stage_scale(b, run.measured);
  }
  registry_->commit();
  has_result_ = true;
  out.committed = true;
  return out;
}

void DataParallel::require_between_steps(const char* what) const {
  if (phase_ != Phase::between) refuse(std::string(what) + " in the middle of a step");
}

void DataParallel::replan(const BucketOptions& buckets, std::span<const int> use) {
  require_between_steps("replan()");
  std::vector<ParameterInfo> parameters(plan_.parameters().begin(), plan_.parameters().end());
  if (!use.empty() && use.size() != parameters.size()) refuse("replan: one place of use for each parameter");
  for (std::size_t p = 0; p < use.size(); ++p) parameters[p].use = use[p];
  BucketPlan plan(std::move(parameters), buckets_of(options_.algorithm, buckets));
  state_->install(plan);
  plan_ = std::move(plan);
  options_.buckets = buckets;
  lay_out();
  submit_comparison();
}

void DataParallel::set_density(double density) {
  require_between_steps("set_density()");
  options_.density = checked_density(density);
}

StateSnapshot DataParallel::save() {
  require_between_steps("save()");
  return registry_->save(comm_.rank(), comm_.size());
}

void DataParallel::load(std::span<const StateSnapshot> snapshots) {
  require_between_steps("load()");
  registry_->load(snapshots, comm_.rank(), comm_.size());
  has_result_ = false;
}

const SparseResult& DataParallel::result(int bucket) const {
  return runs_[static_cast<std::size_t>(bucket)]->result;
}

const SparseOptions& DataParallel::call(int bucket) const {
  return runs_[static_cast<std::size_t>(bucket)]->options;
}

const LowRank* DataParallel::low_rank(int bucket) const {
  return runs_[static_cast<std::size_t>(bucket)]->low_rank.get();
}

double DataParallel::low_rank_bytes() const {
  double sum = 0;
  for (const std::unique_ptr<BucketRun>& run : runs_) {
    if (run->low_rank) sum += run->low_rank->bytes(comm_.size());
  }
  return sum;
}

}  // namespace weft
