#include "data_parallel/data_parallel.h"

#include <algorithm>
#include <cmath>

#include "kernels/select.h"
#include "weft/collective.h"
#include "weft/error.h"

namespace weft {

namespace {

[[noreturn]] void refuse(const std::string& what) { throw UsageError("data parallel: " + what); }

double checked_density(double density) {
  if (!(density > 0 && density <= 1)) refuse("density must be in (0, 1], not " + std::to_string(density));
  return density;
}

bool is_dense_row(std::string_view algorithm) { return algorithm == "dense" || algorithm == "dense-bf16"; }

// Above the hops of every sparse all-reduce (a ring has 2 size), and small: tags of mpi have few bits for
// them.
std::uint32_t names_hop(int size) { return 8 * static_cast<std::uint32_t>(size) + 256; }

// 0: all finite. A vector is to blame with its residual: their sum is what was put in.
std::byte blame(std::span<const float> gradient, std::span<const float> residual) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    const float sum = residual.empty() ? gradient[i] : gradient[i] + residual[i];
    largest = std::max(largest, magnitude_key(sum));
  }
  if (largest < kInfinityKey) return std::byte{0};
  return static_cast<std::byte>(largest > kInfinityKey ? StepResult::Kind::nan : StepResult::Kind::infinity);
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

// A bucket in a step. What its operation reads and writes; nobody else does between submit and the ticket's
// end.
struct DataParallel::Run {
  const BucketPlan* plan = nullptr;
  const Bucket* bucket = nullptr;
  SparseState* state = nullptr;
  SparseOptions options;
  bool measures = false;
  std::size_t pending = 0;          // gradients that are not here yet
  std::span<const float> gradient;  // the caller's memory, or the buffer
  std::vector<float> buffer;
  SparseResult result;
  double measured = 0;            // scale of the result
  std::vector<float> magnitudes;  // of its entries
  std::vector<std::byte> blamed;  // rank after rank, one for each piece; only where the result is not finite

  std::int64_t count_of(const BucketPiece& piece) const { return plan->parameter(piece.parameter).count; }
  std::span<float> part(const BucketPiece& piece) {
    buffer.resize(static_cast<std::size_t>(bucket->count));
    return std::span(buffer).subspan(static_cast<std::size_t>(piece.first),
                                     static_cast<std::size_t>(count_of(piece)));
  }
  const BucketPiece& piece_around(std::int64_t index) const {
    const auto after = std::upper_bound(bucket->pieces.begin(), bucket->pieces.end(), index,
                                        [](std::int64_t i, const BucketPiece& p) { return i < p.first; });
    return *(after - 1);
  }
  // f(piece, index inside its parameter, value) for the entries of the result.
  template <class F>
  void visit(F&& f) const {
    const BucketPiece* at = nullptr;
    std::int64_t end = 0;
    result.for_each([&](std::int64_t index, float value) {
      if (at == nullptr || index < at->first || index >= end) {
        at = &piece_around(index);
        end = at->first + count_of(*at);
      }
      f(*at, index - at->first, value);
    });
  }

  void measure();
  void find_blame(int rank, int size);
  static Task<void> reduce(Comm comm, Run* run);
};

void DataParallel::Run::measure() {
  magnitudes.clear();
  result.for_each([this](std::int64_t, float value) { magnitudes.push_back(std::abs(value)); });
  measured = scale_of(magnitudes, bucket->count);
}

void DataParallel::Run::find_blame(int rank, int size) {
  const std::size_t pieces = bucket->pieces.size();
  blamed.assign(pieces * static_cast<std::size_t>(size), std::byte{0});
  for (std::size_t i = 0; i < pieces; ++i) {
    const BucketPiece& piece = bucket->pieces[i];
    const auto first = static_cast<std::size_t>(piece.first);
    const auto count = static_cast<std::size_t>(count_of(piece));
    const std::span<const float> residual = state->residual();
    blamed[static_cast<std::size_t>(rank) * pieces + i] =
        blame(gradient.subspan(first, count), residual.empty() ? residual : residual.subspan(first, count));
  }
}

Task<void> DataParallel::Run::reduce(Comm comm, Run* run) {
  co_await sparse_all_reduce(comm, run->gradient, *run->state, run->result, run->options);
  if (run->result.finite()) {
    auto measure = [run] { run->measure(); };
    if (run->measures) co_await comm.compute(measure);
    co_return;
  }
  // All ranks know it, so all of them come here.
  auto find = [run, &comm] { run->find_blame(comm.rank(), comm.size()); };
  co_await comm.compute(find);
  const Dense blamed(std::span<std::byte>{run->blamed});
  const Comm apart = comm.hops_from(names_hop(comm.size()));
  co_await all_gather(apart, blamed);
}

DataParallel::DataParallel(Engine& engine, const Comm& comm, std::vector<ParameterInfo> parameters,
                           DataParallelOptions options)
    : engine_(engine),
      comm_(comm),
      options_(std::move(options)),
      plan_(std::move(parameters), options_.buckets),
      state_(std::make_unique<ParameterState>(plan_)) {
  checked_density(options_.density);
  find_sparse_algorithm(options_.algorithm);
  wire::sparse_codec_of(options_.codec);
  if (options_.divisor == 0) options_.divisor = comm.size();
  if (!(options_.divisor > 0)) refuse("the divisor must be positive");
  lay_out();
  submit_comparison();
}

DataParallel::~DataParallel() = default;

void DataParallel::lay_out() {
  runs_.clear();
  for (int b = 0; b < plan_.num_buckets(); ++b) {
    auto run = std::make_unique<Run>();
    run->plan = &plan_;
    run->bucket = &plan_.bucket(b);
    run->state = &state_->bucket(b);
    run->options.codec = options_.codec;
    run->options.blocks = options_.blocks;
    run->options.residual = options_.residual;
    run->options.teams = options_.teams;
    run->options.gather = options_.gather;
    run->options.threads = options_.threads;
    runs_.push_back(std::move(run));
  }
  has_result_ = false;
}

void DataParallel::submit_comparison() {
  auto hashes = std::make_shared<std::vector<std::int64_t>>(static_cast<std::size_t>(comm_.size()));
  (*hashes)[static_cast<std::size_t>(comm_.rank())] = static_cast<std::int64_t>(plan_.hash());
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
    Run& run = *runs_[i];
    run.pending = bucket.pieces.size();
    run.options.k = quotas_[i];
    // (Where every entry would be sent, indices are a waste, and selection on the way may lose some.)
    const bool whole = quotas_[i] == bucket.count && !is_dense_row(options_.algorithm);
    run.options.algorithm = whole || bucket.dense ? std::string_view("dense") : options_.algorithm;
    run.measures = adapts && !bucket.dense;
  }
  ready_.assign(static_cast<std::size_t>(plan_.num_parameters()), false);
  has_result_ = false;
  phase_ = Phase::open;
}

void DataParallel::gradient_ready(int parameter, std::span<const float> gradient) {
  if (parameter < 0 || parameter >= plan_.num_parameters()) {
    refuse("there is no parameter " + std::to_string(parameter));
  }
  const ParameterInfo& info = plan_.parameter(parameter);
  if (static_cast<std::int64_t>(gradient.size()) != info.count) {
    refuse("a gradient of " + std::to_string(gradient.size()) + " elements for '" + info.name +
           "', which has " + std::to_string(info.count));
  }
  if (phase_ == Phase::ended) refuse("a gradient of '" + info.name + "' after step_end()");
  if (phase_ == Phase::between) begin_step();
  if (ready_[static_cast<std::size_t>(parameter)])
    refuse("a second gradient of '" + info.name + "' in one step");
  ready_[static_cast<std::size_t>(parameter)] = true;
  const int b = plan_.bucket_of(parameter);
  Run& run = *runs_[static_cast<std::size_t>(b)];
  if (run.bucket->pieces.size() == 1) {
    run.gradient = gradient;
  } else {
    const BucketPiece piece{parameter, plan_.first_of(parameter)};
    std::copy(gradient.begin(), gradient.end(), run.part(piece).begin());
    run.gradient = run.buffer;
  }
  if (--run.pending == 0) submit(b);
}

void DataParallel::submit(int b) {
  Run* const run = runs_[static_cast<std::size_t>(b)].get();
  const std::string name = "gradients of bucket " + std::to_string(b) + " from " +
                           plan_.parameter(run->bucket->pieces.front().parameter).name;
  const SubmitOptions options{.name = name,
                              .traffic = TrafficClass::gradient,
                              .priority = b,
                              .slot = options_.first_slot + 1 + static_cast<std::uint32_t>(b),
                              .step = attempt_};
  tickets_.push_back(engine_.submit(comm_, options, [run](Comm comm) { return Run::reduce(comm, run); }));
}

void DataParallel::step_end() {
  if (phase_ == Phase::ended) refuse("step_end() twice in one step");
  if (phase_ == Phase::between) begin_step();
  for (int b = 0; b < plan_.num_buckets(); ++b) {
    Run& run = *runs_[static_cast<std::size_t>(b)];
    if (run.pending == 0) continue;
    for (const BucketPiece& piece : run.bucket->pieces) {
      if (ready_[static_cast<std::size_t>(piece.parameter)]) continue;
      const std::span<float> part = run.part(piece);
      std::fill(part.begin(), part.end(), 0.0F);
    }
    run.gradient = run.buffer;
    run.pending = 0;
    submit(b);
  }
  phase_ = Phase::ended;
}

void DataParallel::take_verdicts(StepResult& out) const {
  std::string overflowed;
  for (const std::unique_ptr<Run>& run : runs_) {
    if (run->result.finite()) continue;
    const std::size_t pieces = run->bucket->pieces.size();
    const std::size_t before = out.bad.size();
    for (std::size_t i = 0; i < run->blamed.size(); ++i) {
      if (run->blamed[i] == std::byte{0}) continue;
      out.bad.push_back({.parameter = run->bucket->pieces[i % pieces].parameter,
                         .rank = static_cast<int>(i / pieces),
                         .kind = static_cast<StepResult::Kind>(run->blamed[i])});
    }
    if (out.bad.size() == before) {
      overflowed += "; the sum of finite gradients overflows in the bucket from '" +
                    plan_.parameter(run->bucket->pieces.front().parameter).name + "'";
    }
  }
  out.text = "step " + std::to_string(out.step) + " was not committed";
  constexpr std::size_t kNamed = 8;
  for (std::size_t i = 0; i < std::min(out.bad.size(), kNamed); ++i) {
    const StepResult::Bad& bad = out.bad[i];
    out.text += "; the gradient of '" + plan_.parameter(bad.parameter).name + "' on rank " +
                std::to_string(bad.rank) +
                (bad.kind == StepResult::Kind::nan ? " holds NaN" : " holds infinity");
  }
  if (out.bad.size() > kNamed) out.text += "; and " + std::to_string(out.bad.size() - kNamed) + " more";
  out.text += overflowed;
}

StepResult DataParallel::finish() {
  if (phase_ != Phase::ended) refuse("finish() before step_end()");
  for (const Ticket& t : tickets_) {
    if (!t.done()) refuse("finish() while operations are in flight: wait for the tickets");
  }
  const std::vector<Ticket> tickets = std::move(tickets_);
  tickets_.clear();
  phase_ = Phase::between;
  ++attempt_;
  StepResult out{.committed = false, .step = state_->step(), .bad = {}, .text = {}};
  for (const Ticket& t : tickets) {
    if (!t.error()) continue;
    state_->roll_back();
    std::rethrow_exception(t.error());
  }
  if (!std::all_of(runs_.begin(), runs_.end(), [](const auto& run) { return run->result.finite(); })) {
    take_verdicts(out);
    state_->roll_back();
    return out;
  }
  for (int b = 0; b < plan_.num_buckets(); ++b) {
    const Run& run = *runs_[static_cast<std::size_t>(b)];
    if (run.measures) state_->stage_scale(b, run.measured);
  }
  state_->commit();
  has_result_ = true;
  out.committed = true;
  return out;
}

void DataParallel::copy_to(std::span<const std::span<float>> outputs) const {
  if (!has_result_) refuse("there is no committed result to copy");
  if (static_cast<int>(outputs.size()) != plan_.num_parameters())
    refuse("copy_to: one span for each parameter");
  for (int p = 0; p < plan_.num_parameters(); ++p) {
    const std::span<float> out = outputs[static_cast<std::size_t>(p)];
    if (!out.empty() && static_cast<std::int64_t>(out.size()) != plan_.parameter(p).count) {
      refuse("copy_to: a span of " + std::to_string(out.size()) + " elements for '" +
             plan_.parameter(p).name + "'");
    }
    std::fill(out.begin(), out.end(), 0.0F);
  }
  const auto divisor = static_cast<float>(options_.divisor);
  for (const std::unique_ptr<Run>& run : runs_) {
    const SparseResult::Contents& contents = run->result.contents();
    if (!contents.is_dense) {
      run->visit([&](const BucketPiece& piece, std::int64_t index, float value) {
        const std::span<float> out = outputs[static_cast<std::size_t>(piece.parameter)];
        if (!out.empty()) out[static_cast<std::size_t>(index)] = value / divisor;
      });
      continue;
    }
    for (const BucketPiece& piece : run->bucket->pieces) {
      const std::span<float> out = outputs[static_cast<std::size_t>(piece.parameter)];
      const auto first = contents.dense.begin() + static_cast<std::ptrdiff_t>(piece.first);
      std::transform(first, first + static_cast<std::ptrdiff_t>(out.size()), out.begin(),
                     [divisor](float value) { return value / divisor; });
    }
  }
}

void DataParallel::for_each(
    const std::function<void(int parameter, std::int64_t index, float value)>& f) const {
  if (!has_result_) refuse("there is no committed result to visit");
  const auto divisor = static_cast<float>(options_.divisor);
  for (const std::unique_ptr<Run>& run : runs_) {
    run->visit([&](const BucketPiece& piece, std::int64_t index, float value) {
      f(piece.parameter, index, value / divisor);
    });
  }
}

void DataParallel::require_between_steps(const char* what) const {
  if (phase_ != Phase::between) refuse(std::string(what) + " in the middle of a step");
}

void DataParallel::replan(const BucketOptions& buckets, std::span<const int> use) {
  require_between_steps("replan()");
  std::vector<ParameterInfo> parameters(plan_.parameters().begin(), plan_.parameters().end());
  if (!use.empty() && use.size() != parameters.size()) refuse("replan: one place of use for each parameter");
  for (std::size_t p = 0; p < use.size(); ++p) parameters[p].use = use[p];
  BucketPlan plan(std::move(parameters), buckets);
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

StateSnapshot DataParallel::save() const {
  require_between_steps("save()");
  return state_->save(comm_.rank(), comm_.size());
}

void DataParallel::load(const StateSnapshot& snapshot) {
  require_between_steps("load()");
  state_->load(snapshot, comm_.rank(), comm_.size());
  lay_out();
}

const SparseResult& DataParallel::result(int bucket) const {
  return runs_[static_cast<std::size_t>(bucket)]->result;
}

const SparseOptions& DataParallel::call(int bucket) const {
  return runs_[static_cast<std::size_t>(bucket)]->options;
}

}  // namespace weft
