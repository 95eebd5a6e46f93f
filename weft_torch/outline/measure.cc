#include "weft_torch/outline/measure.h"

#include <ATen/Parallel.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cmath>
#include <exception>
#include <thread>
#include <utility>

#include "base/mutex.h"
#include "data/batches.h"
#include "data/open.h"
#include "patterns/schedule.h"
#include "state/optimizer.h"
#include "weft/error.h"
#include "weft_torch/models/model.h"
#include "weft_torch/train/cut_model.h"

namespace weft {

namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::span<float> span_of(const torch::Tensor& tensor) {
  return {tensor.data_ptr<float>(), static_cast<std::size_t>(tensor.numel())};
}

// A model on one thread, driven as Replica drives it, with clocks where that has communication.
class MeasuredModel {
 public:
  MeasuredModel(const OutlineOptions& options, const ModelOptions& sizes, const Batches& batches)
      : options_(options), model_(make_model(options.train.model, sizes)), cut_(*model_), batches_(batches) {
    std::vector<OptimizerParameter> updated;
    for (std::size_t i = 0; i < model_->parameters().size(); ++i) {
      const Parameter& parameter = model_->parameters()[i];
      updated.push_back({.name = parameter.name, .count = parameter.tensor.numel()});
      tensors_.push_back({.parameter = parameter,
                          .block = static_cast<std::size_t>(model_->shape().block_of(static_cast<int>(i))),
                          .result = {},
                          .told = 0});
    }
    optimizer_ = std::make_unique<Optimizer>(options.train.optimizer, updated);
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      torch::Tensor& tensor = tensors_[i].parameter.tensor;
      tensor.mutable_grad() = torch::zeros_like(tensor);
      tensors_[i].result.assign(static_cast<std::size_t>(tensor.numel()), 0.0F);
      torch::autograd::impl::set_post_acc_grad_hooks(tensor, std::make_unique<Hook>(tensors_[i].told));
    }
  }

  StepTimes step(std::int64_t step);
  // Rows of a table that have a gradient, after a step.
  double rows_touched(const Parameter& table) const {
    return static_cast<double>(table.tensor.grad().ne(0).flatten(1).any(1).sum().item<std::int64_t>());
  }
  const Model& model() const { return *model_; }

 private:
  class Hook final : public torch::autograd::PostAccumulateGradHook {
   public:
    explicit Hook(double& told) : told_(told) {}
    void operator()(const torch::autograd::Variable&) override { told_ = now(); }

   private:
    double& told_;
  };
  struct Tensor {
    Parameter parameter;
    std::size_t block = 0;
    std::vector<float> result;  // as if it had come from the other ranks
    double told = 0;            // when torch had its gradient
  };

  void update(std::size_t block);

  const OutlineOptions& options_;
  std::unique_ptr<Model> model_;
  CutModel cut_;
  const Batches& batches_;
  std::vector<Tensor> tensors_;  // hooks point into it: it never grows
  std::unique_ptr<Optimizer> optimizer_;
};

void MeasuredModel::update(std::size_t block) {
  const torch::NoGradGuard no_grad;
  constexpr float kDivisor = 2;
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    const Tensor& tensor = tensors_[i];
    if (tensor.block != block) continue;
    const torch::Tensor& gradient = tensor.parameter.tensor.grad();
    const std::span<float> out = span_of(gradient);
    for (std::size_t e = 0; e < out.size(); ++e) out[e] = tensor.result[e] / kDivisor;
    optimizer_->update(static_cast<int>(i), span_of(tensor.parameter.tensor), out);
    gradient.zero_();
  }
}

StepTimes MeasuredModel::step(std::int64_t step) {
  const std::vector<int> parts = model_->shape().parts();
  const std::size_t blocks = parts.size();
  StepTimes times;
  for (std::vector<double>* values : {&times.forward, &times.backward, &times.update})
    values->assign(blocks, 0);
  const TokenBatch tokens = batches_.at(step);
  const StepContext context{.seed = options_.train.seed, .step = step};
  const double began = now();
  const Batch batch = to_batch(tokens);
  const double scale = 1.0 / static_cast<double>(std::max<std::int64_t>(1, counted(batch)));
  cut_.begin(std::span(&batch, 1), context);
  double at = now();
  times.other += at - began;
  for (Tensor& tensor : tensors_) tensor.told = 0;
  for (std::size_t b = 0; b < blocks; ++b) {
    update(b);
    const double updated = now();
    for (int p = 0; p < parts[b]; ++p) cut_.forward({Work::forward, static_cast<int>(b), p, 0});
    const double end = now();
    times.update[b] = updated - at;
    times.forward[b] = end - updated;
    at = end;
  }
  if (!std::isfinite(cut_.loss_sum())) throw Error("the loss is not finite while blocks are measured");
  std::vector<double> entered(blocks);  // when backward enters a block
  for (std::size_t b = blocks; b-- > 0;) {
    entered[b] = at;
    for (int p = parts[b]; p-- > 0;) cut_.backward({Work::backward, static_cast<int>(b), p, 0}, scale);
    at = now();
    times.backward[b] = at - entered[b];
  }
  for (const Tensor& tensor : tensors_) {
    const double seconds = times.backward[tensor.block];
    const bool known = tensor.told > 0 && seconds > 0;  // else it counts as zeros at the end
    const double share = known ? (tensor.told - entered[tensor.block]) / seconds : 1;
    times.ready.push_back(std::clamp(share, 0.0, 1.0));
  }
  return times;
}

// What ranks that compute side by side have in common.
class SideBySide {
 public:
  explicit SideBySide(const OutlineOptions& options) : options_(options), barrier_(options.side_by_side) {
    check_train(options.train, options.side_by_side);
    if (options.side_by_side < 1) throw UsageError("at least one rank is measured");
    if (options.sequences < 1) throw UsageError("a rank must have at least one sequence in a step");
    if (options.steps < 1 || options.warmup < 0) throw UsageError("at least one step is measured");
    if (options.train.accumulate != 1) throw UsageError("an outline is of steps of one micro-batch");
    const OpenedData opened = open_data(data_options(options.train));
    sizes_ = model_sizes(options.train, *opened.source);
    for (int r = 0; r < options.side_by_side; ++r) {
      BatchOptions batch = batch_options(options.train, r, options.side_by_side);
      batch.sequences = options.sequences * options.side_by_side;
      batches_.emplace_back(opened.source, batch);
    }
  }

  // Seconds are of all ranks; tensors and tables of the first.
  Outline measure(int steps, int warmup);

 private:
  void run_rank(int rank, int steps, int warmup);
  void describe(const MeasuredModel& measured) WEFT_REQUIRES(mutex_);
  void summarise() WEFT_REQUIRES(mutex_);

  const OutlineOptions& options_;
  ModelOptions sizes_;
  std::vector<Batches> batches_;
  std::barrier<> barrier_;
  Mutex mutex_;
  std::vector<std::vector<StepTimes>> times_ WEFT_GUARDED_BY(mutex_);
  std::exception_ptr failure_ WEFT_GUARDED_BY(mutex_);
  Outline out_ WEFT_GUARDED_BY(mutex_);
};

void SideBySide::describe(const MeasuredModel& measured) {
  const ModelShape& shape = measured.model().shape();
  out_ = outline_of(shape, options_.sequences * sequence_length(options_.train));
  out_.side_by_side = options_.side_by_side;
  for (OutlineTable& table : out_.tables) {
    for (const Parameter& parameter : measured.model().parameters()) {
      if (parameter.name == table.name) table.rows_per_step = measured.rows_touched(parameter);
    }
  }
}

void SideBySide::run_rank(int rank, int steps, int warmup) {
  std::vector<StepTimes> times;
  try {
    at::set_num_threads(options_.train.threads);
    MeasuredModel measured(options_, sizes_, batches_[static_cast<std::size_t>(rank)]);
    for (int step = 0; step < warmup + steps; ++step) {
      barrier_.arrive_and_wait();
      StepTimes taken = measured.step(step);
      if (step >= warmup) times.push_back(std::move(taken));
    }
    barrier_.arrive_and_wait();
    const Lock lock(mutex_);
    if (rank == 0) describe(measured);
    times_.push_back(std::move(times));
  } catch (...) {
    barrier_.arrive_and_drop();
    const Lock lock(mutex_);
    if (!failure_) failure_ = std::current_exception();
  }
}

// Median over steps, mean over ranks.
void SideBySide::summarise() {
  std::vector<double> mean;
  for (const std::vector<StepTimes>& of_rank : times_) {
    const std::vector<double> typical = numbers_of(median_of(of_rank));
    mean.resize(typical.size());
    for (std::size_t i = 0; i < typical.size(); ++i)
      mean[i] += typical[i] / static_cast<double>(times_.size());
  }
  set_seconds(out_, with_numbers(times_.front().front(), mean));
}

Outline SideBySide::measure(int steps, int warmup) {
  at::set_num_threads(options_.train.threads);  // for threads that are not there yet
  std::vector<std::thread> threads;
  for (int r = 0; r < options_.side_by_side; ++r)
    threads.emplace_back([this, r, steps, warmup] { run_rank(r, steps, warmup); });
  for (std::thread& thread : threads) thread.join();
  const Lock lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
  summarise();
  return out_;
}

}  // namespace

Outline measure_outline(const OutlineOptions& options) {
  return SideBySide(options).measure(options.steps, options.warmup);
}

}  // namespace weft
