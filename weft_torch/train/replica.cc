#include "weft_torch/train/replica.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <numeric>
#include <utility>

#include "base/identity.h"
#include "base/names.h"
#include "patterns/blocks.h"
#include "state/optimizer.h"
#include "state/registry.h"
#include "step/run_step.h"
#include "weft/collective.h"
#include "weft/error.h"
#include "weft_torch/models/weight_queue.h"
#include "weft_torch/train/cut_model.h"
#include "weft_torch/train/expert_rows.h"
#include "weft_torch/train/held_tables.h"
#include "weft_torch/train/snapshot.h"
#include "weft_torch/train/stage_tensors.h"
#include "weft_torch/train/staging.h"
#include "weft_torch/train/sum_tensors.h"
#include "weft_torch/train/torch_optimizer.h"
#include "workload/job_strategies.h"
#include "workload/train_options.h"

namespace weft {

namespace {

template <class T>
std::span<T> span_of(const torch::Tensor& tensor) {
  return {tensor.data_ptr<T>(), static_cast<std::size_t>(tensor.numel())};
}

void check(const ReplicaOptions& o) {
  constexpr std::array<std::string_view, 2> kFrom{"weft", "torch"};
  if (!(o.clip_norm >= 0)) throw UsageError("the norm to clip to must not be negative");
  if (std::ranges::find(kFrom, o.optimizer_from) == kFrom.end())
    throw UsageError(unknown_name("maker of optimizers", o.optimizer_from, kFrom));
  if (o.parallel.scheme.momentum_correction == 0) return;
  if (o.optimizer.name != "sgd" || o.optimizer.momentum != 0) {
    throw UsageError("momentum correction is for sgd without a momentum of its own, not for " +
                     o.optimizer.name + " with " + std::to_string(o.optimizer.momentum));
  }
}

}  // namespace

ReplicaOptions replica_options(const TrainOptions& o) {
  ReplicaOptions out;
  out.parallel = data_parallel_options(o);
  out.tables = o.tables;
  out.backward = o.backward;
  out.backward.seed = o.seed;
  out.optimizer = optimizer_options(o);
  out.optimizer_from = o.optimizer_from;
  out.clip_norm = o.clip_local ? 0 : o.clip_norm;
  out.skip_not_finite = o.skip_not_finite;
  out.recompute = o.recompute;
  out.compared = hash_of(o);
  return out;
}

std::vector<Batch> micro_batches_of(const Batch& whole, int count) {
  const Blocks cuts(count, sequences(whole));
  std::vector<Batch> out;
  for (int m = 0; m < count; ++m) {
    out.push_back(part_of(whole, cuts.begin(m), cuts.begin(m + 1)));
  }
  return out;
}

// The LibTorch driver of step/run_step.h: computes pieces and waits for tickets, on a thread that blocks.
class Replica::Core final : private Driver {
 public:
  Core(Engine& engine, const Comm& comm, Model& model, const ReplicaOptions& options);
  ~Core() override;
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  StepOutcome step(std::span<const Batch> micro_batches, const StepContext& context, const Batch* next);
  StepOutcome settle();
  double evaluate(std::span<const Batch> batches);
  Moved lay_out_experts(int ranks);
  void abandon(std::exception_ptr cause) noexcept;
  void set_density(double density);
  void set_lr(double lr) {
    OptimizerOptions with = options_.optimizer;
    with.lr = lr;
    validate(with);
    lr_ = lr;
  }
  void watch(Watch watch) { watch_ = std::move(watch); }
  std::vector<torch::Tensor> values();
  StateRegistry& registry() { return job_->all().state(); }
  JobStrategies& job() { return *job_; }
  std::int64_t skipped_steps() const { return skipped_steps_; }

 private:
  class Hook;
  struct Mine {  // a parameter that is trained
    Parameter parameter;
    int place = 0;  // among the parameters that are trained, tables included
    int block = 0;
    Piece ready;             // behind which its gradient is complete, in a step of one micro-batch
    torch::Tensor gradient;  // dense, its place never changes
    torch::Tensor host;      // where the engine reads and writes: the gradient, or pinned memory
    bool seen = false;       // in some micro-batch of this step
    bool handed = false;     // to the engine, in this step
  };

  Task<void> compute(Piece piece) override;
  Task<void> wait(Ticket ticket) override;
  Dense tensor(const TensorName& name) override {
    if (sums_->has(name.name)) return sums_->tensor(name);
    return stages_->has(name.name) ? stages_->tensor(name) : experts_->tensor(name);
  }

  ModelShape add_parameters();
  ModelShape trained() const;
  void set_gradient(Mine& mine);
  OptimizerParameter optimizer_parameter(const Mine& mine) const;
  void add_strategies(Engine& engine, const Comm& comm, const ModelShape& trained);
  void make_optimizer();
  void add_state();
  void batch_known(std::span<const Batch> batches, const StepContext& context);
  void forward(const Piece& piece);
  void backward(const Piece& piece);
  void add_weights(const Piece& piece);
  void after_gradients(const Piece& piece);
  bool is_ready_behind(const Mine& mine, const Piece& piece) const;
  void gradient_ready(int index);
  void send(int index);
  void hand_over(int index);
  void fetch(int index);
  void update_block(int block);
  void update(int index);
  void take_result();
  std::vector<double> over_ranks(std::vector<double> values, Reduction reduction);

  Engine& engine_;
  Model& model_;
  ReplicaOptions options_;
  CutModel cut_;
  std::vector<Mine> parameters_;
  std::unique_ptr<JobStrategies> job_;
  Strategies* strategies_ = nullptr;  // of the job
  std::unique_ptr<HeldTables> tables_;
  std::unique_ptr<ExpertRows> experts_;
  std::unique_ptr<StageTensors> stages_;
  std::unique_ptr<SumTensors> sums_;
  WeightQueue weights_;
  std::unique_ptr<Walker> walker_;
  std::unique_ptr<Optimizer> optimizer_;             // of weft, or
  std::unique_ptr<TorchOptimizer> torch_optimizer_;  // of torch
  Staging staging_;
  Watch watch_;
  bool wide_ = false;  // float64
  int micro_batches_ = 0;
  Piece piece_;  // that is computed
  StepContext context_;
  const Batch* next_ = nullptr;         // that comes next
  std::optional<double> density_, lr_;  // to be set when the step before is over
  StepOutcome outcome_;
  std::int64_t skipped_steps_ = 0;
  bool evaluates_ = false;
  std::uint32_t evaluations_ = 0;  // exchanges of them
};

// torch calls it once per backward and parameter, after the gradient was added to what was there.
class Replica::Core::Hook final : public torch::autograd::PostAccumulateGradHook {
 public:
  Hook(Core& replica, int index) : replica_(replica), index_(index) {}
  void operator()(const torch::autograd::Variable&) override { replica_.gradient_ready(index_); }

 private:
  Core& replica_;
  int index_;
};

Replica::Core::Core(Engine& engine, const Comm& comm, Model& model, const ReplicaOptions& options)
    : engine_(engine), model_(model), options_(options), cut_(model, options.recompute) {
  check(options);
  add_strategies(engine, comm, add_parameters());
  make_optimizer();
  add_state();
  Driver& driver = *this;
  walker_ = std::make_unique<Walker>(driver, *strategies_);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    torch::autograd::impl::set_post_acc_grad_hooks(parameters_[i].parameter.tensor,
                                                   std::make_unique<Hook>(*this, static_cast<int>(i)));
  }
}

// Of the model with what is trained of it. Tables that are held elsewhere are none of `parameters_`.
ModelShape Replica::Core::add_parameters() {
  ModelShape trained = this->trained();
  const std::vector<bool> held = held_tables(trained, options_.tables);
  int place = 0;
  for (std::size_t i = 0; i < model_.parameters().size(); ++i) {
    const Parameter& parameter = model_.parameters()[i];
    const ParameterShape& shape = model_.shape().parameters[i];
    torch::Tensor tensor = parameter.tensor;
    const bool is_trained = tensor.requires_grad();
    if (is_trained) wide_ = tensor.scalar_type() == torch::kFloat64;
    const bool is_held = is_trained && held[static_cast<std::size_t>(place)];
    if (!is_held && tensor.numel() != shape.count()) bring_back(parameter, shape);
    if (!is_trained) continue;
    const int at = place++;
    if (is_held) continue;
    if (!tensor.is_contiguous()) throw UsageError("'" + parameter.name + "' is not contiguous");
    Mine mine{.parameter = parameter, .place = at};
    mine.ready = trained.ready_after(at, 1);
    mine.block = mine.ready.block;
    set_gradient(mine);
    parameters_.push_back(std::move(mine));
  }
  if (parameters_.empty()) throw UsageError("the model has no parameter that is trained");
  return trained;
}

ModelShape Replica::Core::trained() const {
  std::vector<bool> is_trained;
  for (const Parameter& parameter : model_.parameters())
    is_trained.push_back(parameter.tensor.requires_grad());
  return model_.shape().trained(is_trained);
}

// It stays: gradients are added in place.
void Replica::Core::set_gradient(Mine& mine) {
  const torch::Tensor& tensor = mine.parameter.tensor;
  mine.gradient = torch::zeros_like(tensor);
  mine.host = tensor.is_cpu() ? mine.gradient : pinned_like(tensor);
  tensor.mutable_grad() = mine.gradient;
}

void Replica::Core::add_strategies(Engine& engine, const Comm& comm, const ModelShape& trained) {
  JobOptions job{.parallel = options_.parallel,
                 .tables = options_.tables,
                 .experts = model_.options().experts,
                 .optimizer = options_.optimizer,
                 .dtype = wide_ ? DType::float64 : DType::float32,
                 .step = {}};
  job.step.clip_norm = options_.clip_norm;
  job.step.skip_not_finite = options_.skip_not_finite;
  job.step.lookahead = options_.lookahead;
  job.step.stage = model_.options().stage;
  job.mesh = mesh_of(model_.options(), comm.size());
  job.backward = options_.backward;
  job.tokens = options_.tokens;
  job.step.compared = mix(options_.compared ^
                          mix(hash_of(options_.optimizer) ^ (options_.optimizer_from == "torch" ? 1U : 0U)));
  job_ = std::make_unique<JobStrategies>(engine, comm, trained, job);
  strategies_ = &job_->all();
  tables_ = std::make_unique<HeldTables>(model_, *job_);
  experts_ = std::make_unique<ExpertRows>(model_, *job_, cut_);
  stages_ = std::make_unique<StageTensors>(model_, *job_, cut_);
  sums_ = std::make_unique<SumTensors>(*job_, cut_);
}

OptimizerParameter Replica::Core::optimizer_parameter(const Mine& mine) const {
  const ParameterShape& shape = strategies_->shape().parameters[static_cast<std::size_t>(mine.place)];
  return {.name = mine.parameter.name,
          .count = mine.parameter.tensor.numel(),
          .dtype = wide_ ? DType::float64 : DType::float32,
          .shard = shard_of(shape),
          .holders = job_->holders(shape),
          .counters = job_->counters(shape)};
}

void Replica::Core::make_optimizer() {
  std::vector<OptimizerParameter> updated;
  std::vector<Parameter> trained;
  bool on_device = false;
  for (const Mine& mine : parameters_) {
    updated.push_back(optimizer_parameter(mine));
    trained.push_back(mine.parameter);
    on_device = on_device || !mine.parameter.tensor.is_cpu();
  }
  if (options_.optimizer_from == "torch") {
    torch_optimizer_ = std::make_unique<TorchOptimizer>(options_.optimizer, trained, updated);
    return;
  }
  if (on_device)
    throw UsageError("parameters on a GPU are updated by torch's optimizers: optimizer_from = torch");
  optimizer_ = std::make_unique<Optimizer>(options_.optimizer, updated);
}

// Parameters and what the optimizers keep of them: of this rank's part of the tables, too.
void Replica::Core::add_state() {
  const Peers peers{strategies_->world().rank(), strategies_->world().size()};
  const Comm& data = job_->data_ranks();  // who have the tables
  const Peers own{data.rank(), data.size(), data.group_id()};
  const auto add = [this](std::string_view owner, std::function<std::vector<LiveRow>()> rows) {
    registry().add(std::string(owner),
                   {.rows = std::move(rows), .missing = {}, .commit = {}, .roll_back = {}});
  };
  add(kModelOwner, [this, own] {
    std::vector<LiveRow> out =
        model_rows(model_, [this](const ParameterShape& of) { return job_->holders(of); });
    std::erase_if(out, [this](const LiveRow& row) { return tables_->holds(row.row.key.name); });
    for (HybridEmbedding* tables : job_->hybrids()) {
      for (LiveRow& row : tables->value_rows(kModelOwner, kModelValue, own)) out.push_back(std::move(row));
    }
    return out;
  });
  add(kOptimizerOwner, [this, peers, own] {
    std::vector<LiveRow> out = torch_optimizer_ ? torch_optimizer_->rows(peers) : optimizer_->rows(peers);
    job_->add_optimizer_rows(out, own);
    return out;
  });
}

Replica::Core::~Core() {
  for (Mine& mine : parameters_)
    torch::autograd::impl::set_post_acc_grad_hooks(mine.parameter.tensor, nullptr);
}

StepOutcome Replica::Core::step(std::span<const Batch> micro_batches, const StepContext& context,
                                const Batch* next) {
  if (micro_batches.empty()) throw UsageError("a step has at least one micro-batch, if an empty one");
  const bool as_many = static_cast<int>(micro_batches.size()) == micro_batches_;
  if (job_->pipeline() != nullptr && strategies_->under_way() && !as_many)
    throw UsageError("stages: a step has as many micro-batches as the one before it, unless that is settled");
  outcome_ = {};
  micro_batches_ = static_cast<int>(micro_batches.size());
  next_ = next;
  context_ = context;
  context_.tables = tables_.get();
  if (in_halves(model_.options().stage)) context_.weights = &weights_;
  weights_.clear();
  strategies_->number_step(context.step);
  if (!options_.lookahead || !strategies_->under_way()) batch_known(micro_batches, context_);
  for (Mine& parameter : parameters_) parameter.seen = parameter.handed = false;
  cut_.begin(micro_batches, context_);
  experts_->begin(micro_batches);
  stages_->begin(micro_batches);
  sums_->begin(micro_batches);
  walker_->walk(strategies_->next_table(micro_batches_));
  if (strategies_->result()) outcome_.sent_bytes += job_->table_bytes();
  outcome_.last_loss = strategies_->last_loss();
  outcome_.tokens = static_cast<std::int64_t>(strategies_->tokens());
  return outcome_;
}

void Replica::Core::batch_known(std::span<const Batch> batches, const StepContext& context) {
  std::int64_t tokens = 0;  // of a batch that several ranks have, one's are counted
  for (const Batch& batch : batches) tokens += job_->counts_tokens() ? counted(batch) : 0;
  const std::vector<BatchInfo::Lookup> lookups = tables_->lookups(batches, context);
  strategies_->batch_known({.tokens = tokens, .lookups = lookups});
}

StepOutcome Replica::Core::settle() {
  outcome_ = {};
  if (!strategies_->under_way()) return outcome_;
  walker_->walk(strategies_->tables(micro_batches_).settle);
  take_result();
  if (strategies_->result()) outcome_.sent_bytes += job_->table_bytes();
  outcome_.last_loss = strategies_->last_loss();
  return outcome_;
}

Replica::Moved Replica::Core::lay_out_experts(int ranks) {
  settle();
  if (job_->experts() != nullptr && ranks == job_->expert_ranks()) return {};
  const std::unique_ptr<Relayout> move = job_->plan_move(ranks);
  job_->start_move(*move).wait();
  model_.lay_out_experts(ranks, strategies_->world().rank() % ranks);
  job_->lay_out(trained(), ranks);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Mine& mine = parameters_[i];
    const ParameterShape& shape = strategies_->shape().parameters[static_cast<std::size_t>(mine.place)];
    if (shape.of_experts == 0) continue;
    set_gradient(mine);
    const OptimizerParameter part = optimizer_parameter(mine);
    if (torch_optimizer_) torch_optimizer_->set_part(static_cast<int>(i), part);
    if (optimizer_) optimizer_->set_part(static_cast<int>(i), part);
  }
  job_->finish_move(*move);
  if (torch_optimizer_) torch_optimizer_->parts_loaded();
  return {.sent_bytes = move->sent_bytes(),
          .planned_bytes = static_cast<std::uint64_t>(
              std::accumulate(move->to().begin(), move->to().end(), std::int64_t{0})),
          .most_bytes = move->most_bytes()};
}

void Replica::Core::abandon(std::exception_ptr cause) noexcept {
  weft::abandon(*strategies_, std::move(cause));
}

void Replica::Core::set_density(double density) {
  density_ = density;
  if (!strategies_->under_way()) job_->set_density(*std::exchange(density_, std::nullopt));
}

// ---- what the walker asks for ----

Task<void> Replica::Core::compute(Piece piece) {
  piece_ = piece;
  switch (piece.work) {
    case Work::update:
      update_block(piece.block);
      break;
    case Work::forward:
      forward(piece);
      break;
    case Work::backward:
      backward(piece);
      break;
    case Work::input_gradient:
      weights_.begin(piece);
      backward(piece);
      break;
    case Work::weight_gradient:
      add_weights(piece);
      break;
  }
  co_return;
}

Task<void> Replica::Core::wait(Ticket ticket) {
  const auto start = std::chrono::steady_clock::now();
  ticket.wait();
  outcome_.waited_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  co_return;
}

void Replica::Core::forward(const Piece& piece) {
  if (!evaluates_) tables_->before_forward(piece);
  experts_->before_forward(piece);
  stages_->before_forward(piece);
  sums_->before_forward(piece);
  cut_.forward(piece);
  if (evaluates_) return;
  if (!model_.shape().is_last(piece) || piece.micro_batch + 1 != micro_batches_) return;
  strategies_->loss_known(job_->counts_tokens() ? cut_.loss_sum() : 0);
  if (!options_.lookahead) return;
  StepContext following = context_;
  ++following.step;
  batch_known(next_ == nullptr ? std::span<const Batch>() : std::span(next_, 1), following);
}

bool Replica::Core::is_ready_behind(const Mine& mine, const Piece& piece) const {
  return adds_gradients(piece.work) && piece.micro_batch + 1 == micro_batches_ &&
         mine.ready.block == piece.block && mine.ready.part == piece.part;
}

// The step before is committed by now, and no gradient of this one has gone out yet.
void Replica::Core::backward(const Piece& piece) {
  const bool first = model_.shape().is_last(piece) && piece.micro_batch == 0;
  if (first) take_result();
  // Sums over the data-parallel ranks are divided by their number.
  const double tokens = strategies_->tokens();
  const double scale = tokens > 0 ? job_->mesh().dp / tokens : 0.0;
  if (first && job_->pipeline() != nullptr) job_->pipeline()->set_scale(scale);
  experts_->before_backward(piece);
  stages_->before_backward(piece);
  sums_->before_backward(piece);
  cut_.backward(piece, scale);
  after_gradients(piece);
}

// The other half of a backward.
void Replica::Core::add_weights(const Piece& piece) {
  weights_.run(piece, [this](const torch::Tensor& parameter) {
    const auto mine = std::ranges::find_if(
        parameters_, [&](const Mine& m) { return m.parameter.tensor.is_same(parameter); });
    gradient_ready(static_cast<int>(mine - parameters_.begin()));
  });
  after_gradients(piece);
}

void Replica::Core::after_gradients(const Piece& piece) {
  if (!adds_gradients(piece.work)) return;
  // What only an earlier micro-batch used, or the first half of this backward.
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const Mine& mine = parameters_[i];
    if (mine.seen && !mine.handed && is_ready_behind(mine, piece)) send(static_cast<int>(i));
  }
  if (piece.micro_batch + 1 == micro_batches_) tables_->after_backward(piece);
  // And what is still on its way from a GPU.
  if (piece.block == 0 && piece.part == 0 && piece.micro_batch + 1 == micro_batches_)
    staging_.hand_over(true, [this](int i) { hand_over(i); });
}

// Of the step before, all of whose updates are done.
void Replica::Core::take_result() {
  if (density_) job_->set_density(*std::exchange(density_, std::nullopt));
  if (lr_) {
    const double lr = *std::exchange(lr_, std::nullopt);
    if (torch_optimizer_) torch_optimizer_->set_lr(lr);
    if (optimizer_) optimizer_->set_lr(lr);
    job_->set_lr(lr);
  }
  const std::optional<StepResult>& result = strategies_->result();
  if (!result) return;
  outcome_.gradient_norm =
      options_.parallel.clip_local > 0 ? job_->parallel().local_norm() : strategies_->gradient_norm();
  outcome_.sent_bytes = job_->sent_bytes();
  if (result->committed) return;
  outcome_.skipped = result->text;
  ++skipped_steps_;
}

// ---- gradients ----

// torch calls it for every part that used the parameter, after the gradient was added to what was there.
void Replica::Core::gradient_ready(int index) {
  Mine& mine = parameters_[static_cast<std::size_t>(index)];
  torch::Tensor& gradient = mine.parameter.tensor.mutable_grad();
  if (!gradient.is_same(mine.gradient)) {  // somebody took ours away, so this one is new
    const torch::NoGradGuard no_grad;
    mine.gradient.copy_(gradient.is_sparse() ? gradient.coalesce().to_dense() : gradient);
    gradient = mine.gradient;
  }
  mine.seen = true;
  if (is_ready_behind(mine, piece_)) send(index);
}

void Replica::Core::send(int index) {
  Mine& mine = parameters_[static_cast<std::size_t>(index)];
  mine.handed = true;
  if (mine.gradient.is_cpu()) return hand_over(index);
  staging_.start(index, mine.gradient, mine.host);
  staging_.hand_over(false, [this](int i) { hand_over(i); });
}

void Replica::Core::hand_over(int index) {
  const Mine& mine = parameters_[static_cast<std::size_t>(index)];
  if (wide_)
    strategies_->gradient_ready(mine.place, std::span<const double>(span_of<double>(mine.host)));
  else
    strategies_->gradient_ready(mine.place, std::span<const float>(span_of<float>(mine.host)));
}

void Replica::Core::update_block(int block) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].block == block) update(static_cast<int>(i));
  }
}

void Replica::Core::fetch(int index) {
  const Mine& mine = parameters_[static_cast<std::size_t>(index)];
  if (wide_)
    strategies_->result_of(mine.place, span_of<double>(mine.host));
  else
    strategies_->result_of(mine.place, span_of<float>(mine.host));
  // (The next gradient comes down behind it on the same stream, so the host memory is free again by then.)
  if (!mine.gradient.is_cpu()) mine.gradient.copy_(mine.host, /*non_blocking=*/true);
}

// Where the step was left out, or no rank had a gradient, nothing is updated.
void Replica::Core::update(int index) {
  const torch::NoGradGuard no_grad;
  Mine& mine = parameters_[static_cast<std::size_t>(index)];
  const torch::Tensor& value = mine.parameter.tensor;
  torch::Tensor& gradient = mine.gradient;
  const std::optional<StepResult>& result = strategies_->result();
  const bool left_out = result && !result->committed;
  if (!left_out && strategies_->used(mine.place)) {
    fetch(index);
    const double scale = strategies_->update_scale();
    if (scale != 1) gradient.mul_(scale);
    if (watch_) watch_(mine.parameter, gradient);
    if (torch_optimizer_) {
      value.mutable_grad() = gradient;
      torch_optimizer_->update(index);
    } else if (wide_) {
      optimizer_->update(index, span_of<double>(value), std::span<const double>(span_of<double>(gradient)));
    } else {
      optimizer_->update(index, span_of<float>(value), std::span<const float>(span_of<float>(gradient)));
    }
  }
  gradient.zero_();
}

// Of all ranks, element by element.
std::vector<double> Replica::Core::over_ranks(std::vector<double> values, Reduction reduction) {
  const SubmitOptions submit{.name = "evaluation",
                             .traffic = TrafficClass::blocking,
                             .slot = strategies_->next_slot(strategies_->world()),
                             .step = evaluations_++};
  const Dense all(std::span<double>{values});
  engine_
      .submit(strategies_->world(), submit,
              [all, reduction](Comm comm) { return all_reduce(comm, all, {.reduction = reduction}); })
      .wait();
  return values;
}

// A rank that has no batch left asks for rows with the others, of a blank one.
double Replica::Core::evaluate(std::span<const Batch> batches) {
  settle();
  const torch::NoGradGuard no_grad;
  const StepContext context{.training = false, .tables = &tables_->outside()};
  const double most = over_ranks({static_cast<double>(batches.size())}, Reduction::max)[0];
  std::vector<double> sums(2);  // loss, tokens
  for (const Batch& batch : batches) model_.check(batch);
  evaluates_ = true;
  const auto trains_again = [this](void*) { evaluates_ = false; };
  const std::unique_ptr<void, decltype(trains_again)> behind(this, trains_again);
  for (std::size_t i = 0; i < static_cast<std::size_t>(most); ++i) {
    const bool has = i < batches.size() && sequences(batches[i]) > 0;
    const Batch batch = has ? batches[i] : model_.blank();
    cut_.begin({&batch, 1}, context);
    experts_->begin({&batch, 1});
    stages_->begin({&batch, 1});
    sums_->begin({&batch, 1});
    walker_->walk(strategies_->forward_table());
    if (!job_->counts_tokens()) continue;
    sums[0] += cut_.loss_sum();
    sums[1] += static_cast<double>(counted(batch));
  }
  sums = over_ranks(std::move(sums), Reduction::sum);
  if (sums[1] == 0) throw UsageError("an evaluation without a token that counts has no loss");
  return sums[0] / sums[1];
}

std::vector<torch::Tensor> Replica::Core::values() {
  std::vector<torch::Tensor> out;
  for (const Parameter& parameter : model_.parameters()) {
    out.push_back(tables_->holds(parameter.name) ? tables_->whole(parameter.name)
                                                 : parameter.tensor.detach().clone());
  }
  return out;
}

// ---- the handle ----

Replica::Replica(Engine& engine, const Comm& comm, Model& model, const ReplicaOptions& options)
    : core_(std::make_unique<Core>(engine, comm, model, options)) {}
Replica::~Replica() = default;

StepOutcome Replica::step(std::span<const Batch> micro_batches, const StepContext& context,
                          const Batch* next) {
  return core_->step(micro_batches, context, next);
}
StepOutcome Replica::settle() { return core_->settle(); }
double Replica::evaluate(std::span<const Batch> batches) { return core_->evaluate(batches); }
Replica::Moved Replica::lay_out_experts(int ranks) { return core_->lay_out_experts(ranks); }
void Replica::abandon(std::exception_ptr cause) noexcept { core_->abandon(std::move(cause)); }
void Replica::set_density(double density) { core_->set_density(density); }
void Replica::set_lr(double lr) { core_->set_lr(lr); }
void Replica::watch(Watch watch) { core_->watch(std::move(watch)); }
StateRegistry& Replica::registry() { return core_->registry(); }
std::vector<torch::Tensor> Replica::values() { return core_->values(); }
JobStrategies& Replica::job() { return core_->job(); }
DataParallel& Replica::parallel() { return core_->job().parallel(); }
Strategies& Replica::strategies() { return core_->job().all(); }
std::int64_t Replica::skipped_steps() const { return core_->skipped_steps(); }

}  // namespace weft
