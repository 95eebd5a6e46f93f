#include "weft_torch/train/replica.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <utility>

#include "base/names.h"
#include "patterns/blocks.h"
#include "weft/collective.h"
#include "weft/error.h"
#include "weft_torch/train/options.h"

namespace weft {

namespace {

constexpr std::uint32_t kTokensSlot = 0;  // the agreement on tokens; buckets come behind it

template <class T>
std::span<T> span_of(const torch::Tensor& tensor) {
  return {tensor.data_ptr<T>(), static_cast<std::size_t>(tensor.numel())};
}

double squared_sum(const torch::Tensor& tensor) {
  return tensor.to(torch::kFloat64).square().sum().item<double>();
}

void check(const ReplicaOptions& o) {
  constexpr std::array<std::string_view, 2> kFrom{"weft", "torch"};
  if (!(o.clip_norm >= 0)) throw UsageError("the norm to clip to must not be negative");
  if (std::ranges::find(kFrom, o.optimizer_from) == kFrom.end())
    throw UsageError(unknown_name("maker of optimizers", o.optimizer_from, kFrom));
  if (o.parallel.momentum_correction == 0) return;
  if (o.optimizer.name != "sgd" || o.optimizer.momentum != 0) {
    throw UsageError("momentum correction is for sgd without a momentum of its own, not for " +
                     o.optimizer.name + " with " + std::to_string(o.optimizer.momentum));
  }
}

}  // namespace

ReplicaOptions replica_options(const TrainOptions& o) {
  ReplicaOptions out;
  out.parallel = data_parallel_options(o);
  out.optimizer = optimizer_options(o);
  out.optimizer_from = o.optimizer_from;
  out.clip_norm = o.clip_local ? 0 : o.clip_norm;
  out.skip_not_finite = o.skip_not_finite;
  return out;
}

std::vector<Batch> micro_batches_of(const Batch& whole, int count) {
  const Blocks cuts(count, sequences(whole));
  std::vector<Batch> out;
  for (int m = 0; m < count; ++m) {
    const std::int64_t begin = cuts.begin(m), end = cuts.begin(m + 1);
    out.push_back({.tokens = whole.tokens.slice(0, begin, end),
                   .targets = whole.targets.slice(0, begin, end),
                   .first_sequence = whole.first_sequence + begin});
  }
  return out;
}

// torch calls it once per backward and parameter, after the gradient was added to what was there.
class Replica::Hook final : public torch::autograd::PostAccumulateGradHook {
 public:
  Hook(Replica& replica, int index) : replica_(replica), index_(index) {}
  void operator()(const torch::autograd::Variable&) override { replica_.gradient_ready(index_); }

 private:
  Replica& replica_;
  int index_;
};

Replica::Replica(Engine& engine, const Comm& comm, Model& model, const ReplicaOptions& options)
    : engine_(engine), comm_(comm), model_(model), options_(options) {
  check(options);
  add_parameters();
  options_.parallel.dtype = wide_ ? DType::float64 : DType::float32;
  options_.parallel.divisor = 0;
  options_.parallel.first_slot = kTokensSlot + 1;
  std::vector<ParameterInfo> plan;
  std::vector<OptimizerParameter> updated;
  std::vector<Parameter> trained;
  bool on_device = false;
  for (const Mine& mine : parameters_) {
    const torch::Tensor& tensor = mine.parameter.tensor;
    plan.push_back({.name = mine.parameter.name,
                    .count = tensor.numel(),
                    .use = mine.block,
                    .rows = tensor.dim() < 2 ? 0 : tensor.size(0)});
    updated.push_back({.name = mine.parameter.name,
                       .count = tensor.numel(),
                       .dtype = options_.parallel.dtype,
                       .shard = Shard::whole(tensor.sizes().vec())});
    trained.push_back(mine.parameter);
    on_device = on_device || !tensor.is_cpu();
  }
  if (options_.optimizer_from == "torch") {
    torch_optimizer_ = std::make_unique<TorchOptimizer>(options_.optimizer, trained);
  } else {
    if (on_device)
      throw UsageError("parameters on a GPU are updated by torch's optimizers: optimizer_from = torch");
    optimizer_ = std::make_unique<Optimizer>(options_.optimizer, updated);
  }
  const auto rows = [this, peers = Peers{comm.rank(), comm.size()}] {
    return torch_optimizer_ ? torch_optimizer_->rows(peers) : optimizer_->rows(peers);
  };
  registry_.add(std::string(kOptimizerOwner), {.rows = rows, .missing = {}, .commit = {}, .roll_back = {}});
  parallel_ = std::make_unique<DataParallel>(engine, comm, std::move(plan), options_.parallel, &registry_);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    torch::autograd::impl::set_post_acc_grad_hooks(parameters_[i].parameter.tensor,
                                                   std::make_unique<Hook>(*this, static_cast<int>(i)));
  }
}

void Replica::add_parameters() {
  const std::vector<Block>& blocks = model_.blocks();
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    for (const Parameter& parameter : blocks[b].parameters) {
      torch::Tensor tensor = parameter.tensor;
      if (!tensor.requires_grad()) continue;
      if (!tensor.is_contiguous()) throw UsageError("'" + parameter.name + "' is not contiguous");
      wide_ = tensor.scalar_type() == torch::kFloat64;
      Mine mine{.parameter = parameter, .block = static_cast<int>(b)};
      mine.gradient = torch::zeros_like(tensor);  // stays: gradients are added in place
      mine.host = tensor.is_cpu() ? mine.gradient : pinned_like(tensor);
      tensor.mutable_grad() = mine.gradient;
      parameters_.push_back(std::move(mine));
    }
  }
  if (parameters_.empty()) throw UsageError("the model has no parameter that is trained");
}

Replica::~Replica() {
  for (Mine& mine : parameters_)
    torch::autograd::impl::set_post_acc_grad_hooks(mine.parameter.tensor, nullptr);
}

void Replica::wait(const Ticket& ticket) {
  const auto start = std::chrono::steady_clock::now();
  ticket.wait();
  outcome_.waited_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void Replica::gradient_ready(int index) {
  Mine& mine = parameters_[static_cast<std::size_t>(index)];
  torch::Tensor& gradient = mine.parameter.tensor.mutable_grad();
  if (!gradient.is_same(mine.gradient)) {  // somebody took ours away, so this one is new
    const torch::NoGradGuard no_grad;
    mine.gradient.copy_(gradient.is_sparse() ? gradient.coalesce().to_dense() : gradient);
    gradient = mine.gradient;
  }
  // (An empty batch gives zeros for everything, which uses nothing.)
  if (empty_micro_ && options_.parallel.find_unused) return;
  mine.seen = true;
  if (last_micro_) send(index);
}

void Replica::send(int index) {
  Mine& mine = parameters_[static_cast<std::size_t>(index)];
  mine.handed = true;
  if (mine.gradient.is_cpu()) return hand_over(index);
  staging_.start(index, mine.gradient, mine.host);
  staging_.hand_over(false, [this](int i) { hand_over(i); });
}

void Replica::hand_over(int index) {
  const torch::Tensor& host = parameters_[static_cast<std::size_t>(index)].host;
  if (wide_)
    parallel_->gradient_ready(index, std::span<const double>(span_of<double>(host)));
  else
    parallel_->gradient_ready(index, std::span<const float>(span_of<float>(host)));
}

// What only an earlier micro-batch used, and what is still on its way from a GPU.
void Replica::send_the_rest() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].seen && !parameters_[i].handed) send(static_cast<int>(i));
  }
  staging_.hand_over(true, [this](int i) { hand_over(i); });
}

// The counted tokens of all ranks in this step; the loss of the step before comes along.
double Replica::agree_on_tokens(std::int64_t counted) {
  std::array<double, 2> sums{static_cast<double>(counted), loss_sum_};
  const SubmitOptions submit{.name = "tokens of the step",
                             .traffic = TrafficClass::blocking,
                             .slot = kTokensSlot,
                             .step = exchanges_++};
  const Dense data(std::span<double>{sums});
  wait(engine_.submit(comm_, submit, [data](Comm comm) { return all_reduce(comm, data); }));
  take_loss(sums[1]);
  return sums[0];
}

void Replica::take_loss(double sum) {
  const double mine = loss_sum_;
  if (tokens_ > 0) outcome_.last_loss = sum / tokens_;
  loss_sum_ = 0;
  tokens_ = 0;
  if (!std::isfinite(sum) && !options_.skip_not_finite) refuse_loss(mine);
}

// All ranks know that the sum is not finite, so all of them come here.
void Replica::refuse_loss(double mine) {
  std::vector<double> losses(static_cast<std::size_t>(comm_.size()));
  losses[static_cast<std::size_t>(comm_.rank())] = mine;
  const SubmitOptions submit{.name = "losses that are not finite",
                             .traffic = TrafficClass::blocking,
                             .slot = kTokensSlot,
                             .step = exchanges_++};
  const Dense data(std::span<double>{losses});
  wait(engine_.submit(comm_, submit, [data](Comm comm) { return all_gather(comm, data); }));
  std::string text = "step " + std::to_string(step_) + ": the loss is ";
  bool first = true;
  for (std::size_t r = 0; r < losses.size(); ++r) {
    if (std::isfinite(losses[r])) continue;
    text += std::string(first ? "" : ", ") + (std::isnan(losses[r]) ? "NaN" : "infinite") + " on rank " +
            std::to_string(r);
    first = false;
  }
  if (first) text += "not finite in its sum over the ranks";
  throw Error(text + "; a smaller learning rate or --clip-norm may help");
}

StepOutcome Replica::step(std::span<const Batch> micro_batches, const StepContext& context) {
  if (micro_batches.empty()) throw UsageError("a step has at least one micro-batch, if an empty one");
  outcome_ = {};
  if (!under_way_ && density_) parallel_->set_density(*std::exchange(density_, std::nullopt));
  std::int64_t mine = 0;
  for (const Batch& batch : micro_batches) mine += counted(batch);
  const double tokens = agree_on_tokens(mine);
  const double scale = tokens > 0 ? comm_.size() / tokens : 0.0;
  double loss_sum = 0;
  for (Mine& parameter : parameters_) parameter.seen = parameter.handed = false;
  for (std::size_t i = 0; i < micro_batches.size(); ++i) {
    last_micro_ = i + 1 == micro_batches.size();
    empty_micro_ = sequences(micro_batches[i]) == 0;
    const torch::Tensor loss =
        model_.loss(micro_batches[i], context, [this](int block) { before_block(block); });
    loss_sum += loss.item<double>();
    (loss * scale).backward();
  }
  last_micro_ = false;
  send_the_rest();
  parallel_->step_end();
  under_way_ = true;
  settled_blocks_ = 0;
  step_ = context.step;
  loss_sum_ = loss_sum;
  tokens_ = tokens;
  outcome_.tokens = static_cast<std::int64_t>(tokens);
  return outcome_;
}

StepOutcome Replica::settle() {
  outcome_ = {};
  if (tokens_ > 0) agree_on_tokens(0);
  for (std::size_t b = 0; b < model_.blocks().size(); ++b) before_block(static_cast<int>(b));
  return outcome_;
}

void Replica::abandon(std::exception_ptr cause) noexcept {
  engine_.abandon(std::move(cause));
  for (const Ticket& ticket : parallel_->tickets()) {
    try {
      ticket.wait();
    } catch (...) {  // the cause, or what came before it
    }
  }
}

void Replica::set_density(double density) { density_ = density; }

void Replica::finished(const StepResult& result) {
  under_way_ = false;
  if (density_) parallel_->set_density(*std::exchange(density_, std::nullopt));
  if (options_.parallel.clip_local > 0) outcome_.gradient_norm = parallel_->local_norm();
  if (!result.committed && !options_.skip_not_finite) throw Error(result.text);
  for (int b = 0; b < parallel_->plan().num_buckets(); ++b)
    outcome_.sent_bytes += parallel_->result(b).entry_bytes_sent();
}

void Replica::before_block(int block) {
  if (!under_way_) return;
  const bool whole = options_.clip_norm > 0 || options_.skip_not_finite || options_.parallel.find_unused;
  if (whole) return finish_whole_step();
  for (const Ticket& ticket : parallel_->tickets_for(block)) wait(ticket);
  update_block(block, 1);
  if (++settled_blocks_ == model_.blocks().size()) finish_step();
}

void Replica::finish_step() {
  for (const Ticket& ticket : parallel_->tickets()) wait(ticket);
  finished(parallel_->finish());
}

void Replica::finish_whole_step() {
  for (const Ticket& ticket : parallel_->tickets()) wait(ticket);
  const StepResult result = parallel_->finish();
  finished(result);
  if (!result.committed) {
    outcome_.skipped = result.text;
    ++skipped_steps_;
    for (const Mine& mine : parameters_) mine.gradient.zero_();
    return;
  }
  double scale = 1;
  if (options_.clip_norm > 0) {
    double squares = 0;
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      fetch(static_cast<int>(i));
      squares += squared_sum(parameters_[i].gradient);
    }
    outcome_.gradient_norm = std::sqrt(squares);
    // torch's rule, with its small number against a division by zero.
    scale = std::min(1.0, options_.clip_norm / (outcome_.gradient_norm + 1e-6));
  }
  for (std::size_t b = 0; b < model_.blocks().size(); ++b) update_block(static_cast<int>(b), scale);
}

void Replica::update_block(int block, double scale) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].block == block) update(static_cast<int>(i), scale);
  }
}

void Replica::fetch(int index) {
  const Mine& mine = parameters_[static_cast<std::size_t>(index)];
  if (wide_)
    parallel_->result_of(index, span_of<double>(mine.host));
  else
    parallel_->result_of(index, span_of<float>(mine.host));
  // (The next gradient comes down behind it on the same stream, so the host memory is free again by then.)
  if (!mine.gradient.is_cpu()) mine.gradient.copy_(mine.host, /*non_blocking=*/true);
}

void Replica::update(int index, double scale) {
  const torch::NoGradGuard no_grad;
  Mine& mine = parameters_[static_cast<std::size_t>(index)];
  const torch::Tensor& value = mine.parameter.tensor;
  torch::Tensor& gradient = mine.gradient;
  if (!options_.parallel.find_unused || parallel_->used(index)) {
    fetch(index);
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

void Replica::set_lr(double lr) {
  if (torch_optimizer_)
    torch_optimizer_->set_lr(lr);
  else
    optimizer_->set_lr(lr);
}

}  // namespace weft
