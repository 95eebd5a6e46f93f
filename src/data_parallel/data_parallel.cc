#include "data_parallel/data_parallel.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <type_traits>

#include "base/identity.h"
#include "kernels/optimize.h"
#include "kernels/select.h"
#include "weft/collective.h"
#include "weft/error.h"

namespace weft {

namespace {

[[noreturn]] void refuse(const std::string& what) { throw UsageError("data parallel: " + what); }

// Throws with a sentence of this class.
void check(const DataParallelOptions& options, int ranks) {
  try {
    check_scheme(options.scheme, ranks);
  } catch (const UsageError& error) {
    refuse(error.what());
  }
  const Scheme& scheme = find_scheme(options.scheme.name);
  if (options.scheme.momentum_correction > 0 && !scheme.selects) {
    refuse("momentum correction is for schemes that select entries, not for '" + options.scheme.name +
           "': give the optimizer its momentum");
  }
  if (!(options.clip_local >= 0) || std::isinf(options.clip_local))
    refuse("clip_local must be finite and not negative");
  if (options.dtype != DType::float32 && options.dtype != DType::float64)
    refuse("gradients are float32 or float64");
  if (options.dtype == DType::float64 && !scheme.wide) {
    refuse("float64 gradients are reduced by '" + std::string(lossless_scheme().name) + "' only, not by '" +
           options.scheme.name + "'");
  }
  if (!(options.divisor > 0)) refuse("the divisor must be positive");
  if (options.rows_of != 0 &&
      (options.rows_of < 0 || ranks % options.rows_of != 0 || !scheme.lossless || options.clip_local > 0))
    refuse("a sum in two steps is dense, of rows that divide the " + std::to_string(ranks) +
           " ranks, not of " + std::to_string(options.rows_of));
  if (options.unused_stay_out && !options.find_unused)
    refuse("unused parameters stay out only where the ranks ask which they are (find_unused)");
}

DataParallelOptions checked(DataParallelOptions options, int ranks) {
  if (options.divisor == 0) options.divisor = ranks;
  check(options, ranks);
  return options;
}

// A gradient that lies in its place already is not copied.
template <class T>
void gather(std::span<const T> gradient, std::span<T> place) {
  if (gradient.data() != place.data()) std::ranges::copy(gradient, place.begin());
}

}  // namespace

DataParallel::DataParallel(Engine& engine, const Comm& comm, std::vector<ParameterInfo> parameters,
                           DataParallelOptions options, StateRegistry* registry)
    : engine_(engine),
      comm_(comm),
      options_(checked(std::move(options), comm.size())),
      scheme_(find_scheme(options_.scheme.name)),
      plan_(std::move(parameters), bucket_options(options_.scheme)),
      own_registry_(registry == nullptr ? std::make_unique<StateRegistry>() : nullptr),
      registry_(registry == nullptr ? own_registry_.get() : registry),
      attempt_(options_.first_step) {
  const bool is_world = comm.group_id() == engine.world().group_id();
  const DataParallelOptions::Copies& copies = options_.copies;
  ParameterState::Options kept{.peers = {comm.rank(), comm.size(), is_world ? 0 : comm.group_id()},
                               .divisor = options_.divisor,
                               .velocities = options_.scheme.momentum_correction > 0,
                               .factors = scheme_.low_rank,
                               .owner = options_.name};
  if (copies.count > 1) {
    kept.of_copy = kept.peers;
    kept.is_first_copy = copies.place == 0;
    kept.peers = {comm.rank() * copies.count + copies.place, comm.size() * copies.count, copies.peers};
  }
  state_ = std::make_unique<ParameterState>(plan_, *registry_, kept);
  if (options_.rows_of > 0) {
    constexpr std::uint32_t kRow = 0x726f'7773u, kColumn = 0x636f'6c73u;  // "rows", "cols"
    std::vector<int> row, column;
    for (int r = 0; r < comm.size(); ++r) {
      if (r / options_.rows_of == comm.rank() / options_.rows_of) row.push_back(r);
      if (r % options_.rows_of == comm.rank() % options_.rows_of) column.push_back(r);
    }
    row_ = comm.subgroup(row, kRow);
    column_ = comm.subgroup(column, kColumn);
  }
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
    run->divisor = options_.divisor;
    if (scheme_.low_rank) run->low_rank = low_rank_of_bucket(*run->bucket);
    run->order = options_.scheme.all_reduce;
    run->row = row_;
    run->column = column_;
    run->forgets = !options_.scheme.error_feedback;
    run->momentum = static_cast<float>(options_.scheme.momentum_correction);
    if (options_.scheme.momentum_correction > 0) run->velocity = &state_->bucket_velocity(b);
    runs_.push_back(std::move(run));
  }
  assign_quotas();
  has_result_ = false;
}

std::unique_ptr<LowRank> DataParallel::low_rank_of_bucket(const Bucket& bucket) {
  const LowRankOptions options{.rank = options_.scheme.columns,
                               .min_compression = options_.scheme.min_compression,
                               .seed = options_.scheme.seed,
                               .bf16 = rounds_factors(scheme_, options_.scheme)};
  auto out = std::make_unique<LowRank>(options);
  for (const BucketPiece& piece : bucket.pieces) {
    const ParameterInfo& info = plan_.parameter(piece.parameter);
    out->add(info.name, info.rows, info.count, &state_->factor(piece.parameter));
  }
  return out;
}

void DataParallel::submit_comparison() {
  const SubmitOptions submit{.name = "plan of buckets", .slot = options_.first_slot, .step = attempt_++};
  comparison_ = compare_plans(engine_, comm_, submit, hash(), "plan of buckets (names, lengths or options)");
  tickets_.push_back(comparison_);
}

void DataParallel::assign_quotas() {
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
  const std::int64_t k = std::llround(options_.scheme.density * static_cast<double>(plan_.sparse_count()));
  const bool adaptive = options_.scheme.quotas == QuotaKind::adaptive;
  const bool adapts = adaptive && k < plan_.sparse_count() && scheme_.selects;
  quotas_ = adaptive ? adaptive_quotas(lengths, parts, k) : proportional_quotas(lengths, k);
  for (int b = 0; b < plan_.num_buckets(); ++b) {
    const auto i = static_cast<std::size_t>(b);
    const Bucket& bucket = plan_.bucket(b);
    if (bucket.dense) quotas_[i] = bucket.count;
    BucketRun& run = *runs_[i];
    if (run.low_rank) quotas_[i] = bucket.count;
    run.step = static_cast<std::uint32_t>(state_->step());
    const Scheme& taken = scheme_of_bucket(scheme_, bucket.dense, quotas_[i], bucket.count);
    run.options = sparse_call(taken, options_.scheme, quotas_[i]);
    run.measures = adapts && !bucket.dense;
    run.masks = taken.selects;
    const bool whole = &taken == &lossless_scheme() && run.velocity == nullptr;
    run.in_place = run.wide || (whole && (run.buffer.is_given() || row_.valid()));
  }
}

void DataParallel::begin_step() {
  assign_quotas();
  for (const std::unique_ptr<BucketRun>& run : runs_) run->pending = run->bucket->pieces.size();
  ready_.assign(static_cast<std::size_t>(plan_.num_parameters()), false);
  squares_.assign(ready_.size(), 0);
  has_result_ = false;
  next_ = plan_.num_buckets() - 1;
  at_ = At::open;
}

template <class T>
void DataParallel::give(int bucket, std::span<T> memory) {
  require_between_steps("give_memory()");
  if (bucket < 0 || bucket >= plan_.num_buckets()) refuse("there is no bucket " + std::to_string(bucket));
  if ((options_.dtype == DType::float64) != std::is_same_v<T, double>)
    refuse("memory of another type than the gradients'");
  if (static_cast<std::int64_t>(memory.size()) != plan_.bucket(bucket).count) {
    refuse("memory of " + std::to_string(memory.size()) + " elements for bucket " + std::to_string(bucket) +
           ", which has " + std::to_string(plan_.bucket(bucket).count));
  }
  runs_[static_cast<std::size_t>(bucket)]->memory<T>().give(memory);
}
void DataParallel::give_memory(int bucket, std::span<float> memory) { give(bucket, memory); }
void DataParallel::give_memory(int bucket, std::span<double> memory) { give(bucket, memory); }

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
  if (at_ == At::ended) refuse("a gradient of '" + info.name + "' after step_end()");
  if (at_ == At::between) begin_step();
  if (ready_[static_cast<std::size_t>(parameter)])
    refuse("a second gradient of '" + info.name + "' in one step");
  ready_[static_cast<std::size_t>(parameter)] = true;
  return plan_.bucket_of(parameter);
}

void DataParallel::arrived(int bucket) {
  if (--runs_[static_cast<std::size_t>(bucket)]->pending > 0 || options_.clip_local > 0) return;
  if (!options_.one_at_a_time) return submit(bucket);
  // On all ranks in one order, whichever is complete first.
  while (next_ >= 0 && runs_[static_cast<std::size_t>(next_)]->pending == 0) submit(next_--);
}

void DataParallel::gradient_ready(int parameter, std::span<const double> gradient) {
  const int b = accept(parameter, gradient.size(), DType::float64);
  BucketRun& run = *runs_[static_cast<std::size_t>(b)];
  const BucketPiece piece{parameter, plan_.first_of(parameter)};
  gather(gradient, run.part<double>(piece));
  if (options_.clip_local > 0) squares_[static_cast<std::size_t>(parameter)] = sum_of_squares(gradient);
  arrived(b);
}

void DataParallel::gradient_ready(int parameter, std::span<const float> gradient) {
  const int b = accept(parameter, gradient.size(), DType::float32);
  BucketRun& run = *runs_[static_cast<std::size_t>(b)];
  if (run.bucket->pieces.size() == 1 && !run.buffer.is_given() && !row_.valid()) {
    run.gradient = gradient;
  } else {
    const BucketPiece piece{parameter, plan_.first_of(parameter)};
    gather(gradient, run.part<float>(piece));
    run.gradient = run.buffer.all();
  }
  if (options_.clip_local > 0) squares_[static_cast<std::size_t>(parameter)] = sum_of_squares(gradient);
  arrived(b);
}

namespace {

template <class Reduce>
Task<void> behind(Comm comm, Ticket before, Reduce reduce) {
  co_await before.behind();
  co_await reduce(comm);
}

}  // namespace

void DataParallel::submit(int b) {
  BucketRun* const run = runs_[static_cast<std::size_t>(b)].get();
  const std::string name = name_of_bucket(b);
  const SubmitOptions options{.name = name,
                              .traffic = TrafficClass::gradient,
                              .priority = options_.awaited_together ? plan_.num_buckets() - 1 - b : b,
                              .slot = options_.first_slot + 1 + static_cast<std::uint32_t>(b),
                              .step = attempt_};
  run->ticket = tickets_.size();
  const auto reduce = [run](const Comm& comm) {
    if (run->low_rank) return BucketRun::reduce_low_rank(comm, run);
    if (run->wide) return BucketRun::reduce_in_place<double>(comm, run);
    return run->in_place ? BucketRun::reduce_in_place<float>(comm, run) : BucketRun::reduce(comm, run);
  };
  const Ticket before = std::exchange(last_, {});
  const bool waits = options_.one_at_a_time && before.valid();
  Ticket ticket = engine_.submit(comm_, options, [reduce, before, waits](Comm comm) {
    return waits ? behind(comm, before, reduce) : reduce(comm);
  });
  last_ = ticket;
  tickets_.push_back(std::move(ticket));
}

void DataParallel::submit_unused() {
  used_.assign(ready_.begin(), ready_.end());
  const SubmitOptions options{.name = "which parameters were used",
                              .traffic = TrafficClass::gradient,
                              .slot = unused_slot(),
                              .step = attempt_};
  static constexpr AllReduceOptions kAny{.reduction = Reduction::max};
  unused_ = engine_.submit(comm_, options, [this](Comm comm) {
    return all_reduce(comm, Dense(std::span<std::int32_t>{used_}), kAny);
  });
  tickets_.push_back(unused_);
}

// While gradients come.
bool DataParallel::is_submitted(int b) const {
  if (options_.clip_local > 0) return false;
  return options_.one_at_a_time ? b > next_ : runs_[static_cast<std::size_t>(b)]->pending == 0;
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
  if (at_ == At::ended) refuse("step_end() twice in one step");
  if (at_ == At::between) begin_step();
  const bool held_back = options_.clip_local > 0;
  const double scale = held_back ? local_scale() : 1;
  for (int i = 0; i < plan_.num_buckets(); ++i) {
    const int b = options_.one_at_a_time ? plan_.num_buckets() - 1 - i : i;
    BucketRun& run = *runs_[static_cast<std::size_t>(b)];
    if (is_submitted(b)) continue;
    for (const BucketPiece& piece : run.bucket->pieces) {
      if (ready_[static_cast<std::size_t>(piece.parameter)]) continue;
      if (run.wide) {
        std::ranges::fill(run.part<double>(piece), 0.0);
        continue;
      }
      std::ranges::fill(run.part<float>(piece), 0.0F);
    }
    if (run.pending > 0) run.gradient = run.buffer.all();
    run.pending = 0;
    if (scale != 1) run.scale_by(scale);
    submit(b);
    next_ = b - 1;
  }
  if (options_.find_unused) submit_unused();
  at_ = At::ended;
}

StepResult DataParallel::verdict() {
  if (at_ != At::ended) refuse("a verdict before step_end()");
  for (const Ticket& t : tickets_) {
    if (!t.done()) refuse("a verdict while operations are in flight: wait for the tickets");
  }
  for (const Ticket& t : tickets_) {
    if (!t.error()) continue;
    const std::exception_ptr error = t.error();
    registry_->roll_back();
    close(false, 1);
    std::rethrow_exception(error);
  }
  if (!std::all_of(runs_.begin(), runs_.end(), [](const auto& run) { return run->finite(); }))
    return verdicts();
  return {.committed = true, .step = state_->step(), .bad = {}, .text = {}};
}

void DataParallel::close(bool committed, double) {
  has_result_ = committed;
  sent_bytes_ = 0;
  for (const auto& run : runs_) {
    run->computed_seconds = tickets_[run->ticket].computed_seconds();
    sent_bytes_ += run->result.entry_bytes_sent();
  }
  tickets_.clear();
  comparison_ = unused_ = {};
  at_ = At::between;
  ++attempt_;
}

void DataParallel::stage() {
  for (int b = 0; b < plan_.num_buckets(); ++b) {
    const BucketRun& run = *runs_[static_cast<std::size_t>(b)];
    if (run.measures) state_->stage_scale(b, run.measured);
  }
  if (!options_.unused_stay_out) return;
  for (int p = 0; p < plan_.num_parameters(); ++p) {
    if (used_[static_cast<std::size_t>(p)] == 0) state_->keep(p);
  }
}

StepResult DataParallel::finish() {
  const StepResult result = verdict();
  if (result.committed) {
    stage();
    registry_->commit();
  } else {
    registry_->roll_back();
  }
  close(result.committed, 1);
  return result;
}

void DataParallel::require_between_steps(const char* what) const {
  if (at_ != At::between) refuse(std::string(what) + " in the middle of a step");
}

void DataParallel::replan(const BucketOptions& buckets, std::span<const int> use) {
  require_between_steps("replan()");
  if (own_registry_ == nullptr)
    refuse("replan() of a strategy that shares its step: the tables of the step are of its first plan");
  std::vector<ParameterInfo> parameters(plan_.parameters().begin(), plan_.parameters().end());
  if (!use.empty() && use.size() != parameters.size()) refuse("replan: one place of use for each parameter");
  for (std::size_t p = 0; p < use.size(); ++p) parameters[p].use = use[p];
  SchemeOptions changed = options_.scheme;
  changed.buckets = buckets;
  BucketPlan plan(std::move(parameters), bucket_options(changed));
  state_->install(plan);
  plan_ = std::move(plan);
  options_.scheme.buckets = buckets;
  lay_out();
  submit_comparison();
}

void DataParallel::set_density(double density) {
  require_between_steps("set_density()");
  SchemeOptions changed = options_.scheme;
  changed.density = density;
  check_scheme(changed, comm_.size());
  options_.scheme.density = density;
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
