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
#include "workload/table_draws.h"

namespace weft {

namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::span<float> span_of(const torch::Tensor& tensor) {
  return {tensor.data_ptr<float>(), static_cast<std::size_t>(tensor.numel())};
}

// Rows of tables that nobody holds: each with the values that it begins with.
class FirstRows final : public TableHolder {
 public:
  explicit FirstRows(const Model& model) : model_(model) {}

  void prepare(const Batch& batch, const StepContext& context) {
    asked_ = model_.lookups(batch, context);
    rows_.clear();
    for (const TableIds& lookup : asked_) {
      const Parameter& parameter = model_.parameters()[static_cast<std::size_t>(lookup.parameter)];
      const torch::Tensor ids = std::get<0>(at::_unique(lookup.ids));
      const std::int64_t columns = parameter.tensor.size(1);
      const torch::Tensor rows = torch::empty({ids.size(0), columns}, torch::kFloat32);
      const std::span<float> values = span_of(rows);
      for (std::int64_t r = 0; r < ids.size(0); ++r) {
        parameter.initial(
            ids.data_ptr<std::int64_t>()[r] * columns,
            values.subspan(static_cast<std::size_t>(r * columns), static_cast<std::size_t>(columns)));
      }
      rows_.push_back({ids, rows.set_requires_grad(true)});
    }
  }
  torch::Tensor rows(int parameter, const torch::Tensor& ids) const override {
    for (std::size_t t = 0; t < asked_.size(); ++t) {
      if (asked_[t].parameter != parameter) continue;
      const torch::Tensor places = torch::searchsorted(rows_[t].ids, ids.flatten());
      return torch::embedding(rows_[t].values, places.view(ids.sizes()));
    }
    return {};
  }
  const std::vector<TableIds>& asked() const { return asked_; }  // of the last step

 private:
  struct Rows {
    torch::Tensor ids, values;
  };
  const Model& model_;
  std::vector<TableIds> asked_;
  std::vector<Rows> rows_;  // of each
};

// Tables are part of the model, or the model is given their rows.
enum class Tables : std::uint8_t { own, given };

ModelOptions with_tables(ModelOptions sizes, Tables tables) {
  sizes.tables_elsewhere = tables == Tables::given;
  return sizes;
}

// What is timed apart: the parts of a block, or where it has experts those before them, the gate, what all
// tokens share, all slices, the merge.
struct Timed {
  int block = 0, first = 0, end = 0;
  enum class Of : std::uint8_t { block, gate, shared, experts, merge } of = Of::block;
};
std::vector<Timed> timed_apart(const ModelShape& shape) {
  using Of = Timed::Of;
  std::vector<Timed> out;
  for (int b = 0; b < shape.num_blocks(); ++b) {
    const int parts = static_cast<int>(shape.blocks[static_cast<std::size_t>(b)].parts.size());
    const auto experts = std::ranges::find(shape.experts, b, &ExpertShape::block);
    if (experts == shape.experts.end()) {
      out.push_back({b, 0, parts, Of::block});
      continue;
    }
    out.push_back({b, 0, experts->gate, Of::block});
    out.push_back({b, experts->gate, experts->gate + 1, Of::gate});
    if (experts->first_slice > experts->gate + 1)
      out.push_back({b, experts->gate + 1, experts->first_slice, Of::shared});
    out.push_back({b, experts->first_slice, experts->merge(), Of::experts});
    out.push_back({b, experts->merge(), parts, Of::merge});
  }
  return out;
}

// A model on one thread, driven as Replica drives it, with clocks where that has communication.
class MeasuredModel {
 public:
  MeasuredModel(const OutlineOptions& options, const ModelOptions& sizes, const Batches& batches,
                Tables tables)
      : options_(options),
        model_(make_model(options.train.model, with_tables(sizes, tables))),
        cut_(*model_),
        batches_(batches),
        given_(*model_),
        tables_(tables),
        timed_(timed_apart(model_->shape())) {
    std::vector<OptimizerParameter> updated;
    for (std::size_t i = 0; i < model_->parameters().size(); ++i) {
      const Parameter& parameter = model_->parameters()[i];
      updated.push_back({.name = parameter.name, .count = parameter.tensor.numel()});
      const Piece ready = model_->shape().ready_after(static_cast<int>(i), 1);
      const auto in = std::ranges::find_if(timed_, [&](const Timed& t) {
        return t.block == ready.block && ready.part >= t.first && ready.part < t.end;
      });
      tensors_.push_back({.parameter = parameter,
                          .block = static_cast<std::size_t>(ready.block),
                          .timed = static_cast<std::size_t>(in - timed_.begin()),
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

  // Of what is timed apart, in place of blocks.
  StepTimes step(std::int64_t step);
  const std::vector<Timed>& timed() const { return timed_; }
  // What the last step looked up. REQUIRES: tables are given.
  const std::vector<TableIds>& asked() const { return given_.asked(); }
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
    std::size_t block = 0, timed = 0;  // in which its gradient is complete
    std::vector<float> result;         // as if it had come from the other ranks
    double told = 0;                   // when torch had its gradient
  };

  void update(std::size_t block);

  const OutlineOptions& options_;
  std::unique_ptr<Model> model_;
  CutModel cut_;
  const Batches& batches_;
  FirstRows given_;
  Tables tables_;
  std::vector<Timed> timed_;
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
  const std::size_t count = timed_.size();
  StepTimes times;
  for (std::vector<double>* values : {&times.forward, &times.backward, &times.update})
    values->assign(count, 0);
  const TokenBatch tokens = batches_.at(step);
  StepContext context{.seed = options_.train.seed, .step = step};
  if (tables_ == Tables::given) {  // rows come from others
    given_.prepare(to_batch(tokens), context);
    context.tables = &given_;
  }
  const double began = now();
  const Batch batch = to_batch(tokens);
  const double scale = 1.0 / static_cast<double>(std::max<std::int64_t>(1, counted(batch)));
  cut_.begin(std::span(&batch, 1), context);
  double at = now();
  times.other += at - began;
  for (Tensor& tensor : tensors_) tensor.told = 0;
  for (std::size_t t = 0; t < count; ++t) {
    const Timed& timed = timed_[t];
    if (timed.first == 0) update(static_cast<std::size_t>(timed.block));
    const double updated = now();
    for (int p = timed.first; p < timed.end; ++p) cut_.forward({Work::forward, timed.block, p, 0});
    const double end = now();
    if (timed.first == 0) times.update[t] = updated - at;
    times.forward[t] = end - updated;
    at = end;
  }
  if (!std::isfinite(cut_.loss_sum())) throw Error("the loss is not finite while blocks are measured");
  std::vector<double> entered(count);  // when backward enters it
  for (std::size_t t = count; t-- > 0;) {
    entered[t] = at;
    for (int p = timed_[t].end; p-- > timed_[t].first;)
      cut_.backward({Work::backward, timed_[t].block, p, 0}, scale);
    at = now();
    times.backward[t] = at - entered[t];
  }
  for (const Tensor& tensor : tensors_) {
    const double seconds = times.backward[tensor.timed];
    const bool known = tensor.told > 0 && seconds > 0;  // else it counts as zeros at the end
    const double share = known ? (tensor.told - entered[tensor.timed]) / seconds : 1;
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
    sizes_.experts.ranks = 1;  // all experts of a layer, and rows of one rank
    sizes_.experts.policy = ExpertOptions{}.policy;
    for (int r = 0; r < options.side_by_side; ++r) {
      BatchOptions batch = batch_options(options.train, r, options.side_by_side);
      batch.sequences = options.sequences * options.side_by_side;
      batches_.emplace_back(opened.source, batch);
    }
  }

  // Seconds are of all ranks; tensors and tables of the first.
  Outline measure();

 private:
  Outline measure(Tables tables, int slices);
  void run_rank(int rank, Tables tables);
  void describe(const MeasuredModel& measured) WEFT_REQUIRES(mutex_);
  void summarise() WEFT_REQUIRES(mutex_);

  const OutlineOptions& options_;
  ModelOptions sizes_;
  std::vector<Batches> batches_;
  std::barrier<> barrier_;
  Mutex mutex_;
  std::vector<std::vector<StepTimes>> times_ WEFT_GUARDED_BY(mutex_);
  std::vector<Timed> timed_ WEFT_GUARDED_BY(mutex_);
  std::exception_ptr failure_ WEFT_GUARDED_BY(mutex_);
  Outline out_ WEFT_GUARDED_BY(mutex_);
};

void SideBySide::describe(const MeasuredModel& measured) {
  const ModelShape& shape = measured.model().shape();
  out_ = outline_of(shape, options_.sequences * sequence_length(options_.train));
  out_.side_by_side = options_.side_by_side;
  timed_ = measured.timed();
  for (const TableIds& lookup : measured.asked()) {
    const std::string& name = shape.parameters[static_cast<std::size_t>(lookup.parameter)].name;
    const auto table = std::ranges::find(out_.tables, name, &OutlineTable::name);
    const torch::Tensor ids = lookup.ids.contiguous();
    describe_lookups(*table, {ids.data_ptr<std::int64_t>(), static_cast<std::size_t>(ids.numel())},
                     lookup.shared);
  }
}

void SideBySide::run_rank(int rank, Tables tables) {
  const int warmup = options_.warmup, steps = options_.steps;
  std::vector<StepTimes> times;
  try {
    at::set_num_threads(options_.train.threads);
    MeasuredModel measured(options_, sizes_, batches_[static_cast<std::size_t>(rank)], tables);
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

// Of a layer's experts: all seconds are those of rows, until steps with more slices tell them apart.
void take_seconds(Outline& out, const Timed& timed, double forward, double backward) {
  if (timed.of == Timed::Of::block) {
    out.blocks[static_cast<std::size_t>(timed.block)].forward_seconds = forward;
    out.blocks[static_cast<std::size_t>(timed.block)].backward_seconds = backward;
    return;
  }
  OutlineExperts& layer = *std::ranges::find(out.experts, timed.block, &OutlineExperts::block);
  switch (timed.of) {
    case Timed::Of::block:
      break;
    case Timed::Of::gate:
      layer.gate_forward_seconds = forward;
      layer.gate_backward_seconds = backward;
      break;
    case Timed::Of::shared:
      layer.shared_forward_seconds = forward;
      layer.shared_backward_seconds = backward;
      break;
    case Timed::Of::experts:
      layer.row_forward_seconds = forward / even_rows(out, layer);
      layer.row_backward_seconds = backward / even_rows(out, layer);
      break;
    case Timed::Of::merge:
      layer.merge_forward_seconds = forward;
      layer.merge_backward_seconds = backward;
      break;
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
  const StepTimes times = with_numbers(times_.front().front(), mean);
  for (std::size_t t = 0; t < timed_.size(); ++t) {
    take_seconds(out_, timed_[t], times.forward[t], times.backward[t]);
    if (timed_[t].of == Timed::Of::block)
      out_.blocks[static_cast<std::size_t>(timed_[t].block)].update_seconds = times.update[t];
  }
  for (std::size_t i = 0; i < out_.tensors.size(); ++i) out_.tensors[i].ready = times.ready[i];
  out_.other_seconds = times.other;
  check(out_);
}

Outline SideBySide::measure(Tables tables, int slices) {
  sizes_.experts.slices = slices;
  {
    const Lock lock(mutex_);
    times_.clear();
  }
  at::set_num_threads(options_.train.threads);  // for threads that are not there yet
  std::vector<std::thread> threads;
  for (int r = 0; r < options_.side_by_side; ++r)
    threads.emplace_back([this, r, tables] { run_rank(r, tables); });
  for (std::thread& thread : threads) thread.join();
  const Lock lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
  summarise();
  return out_;
}

// What steps take longer with more slices are calls of experts; what is left are rows.
void tell_calls_apart(Outline& out, const Outline& sliced) {
  for (std::size_t l = 0; l < out.experts.size(); ++l) {
    OutlineExperts& layer = out.experts[l];
    const double rows = even_rows(out, layer);
    const auto split = [&](double OutlineExperts::* of_row, double OutlineExperts::* of_call) {
      const double one = layer.*of_row * rows, more = sliced.experts[l].*of_row * rows;
      const double calls = std::clamp((more - one) / (kMeasuredSlices - 1), 0.0, one);
      layer.*of_call = calls / layer.experts;
      layer.*of_row = (one - calls) / rows;
    };
    split(&OutlineExperts::row_forward_seconds, &OutlineExperts::expert_forward_seconds);
    split(&OutlineExperts::row_backward_seconds, &OutlineExperts::expert_backward_seconds);
  }
}

// What the steps of a model with its own tables take longer is theirs.
Outline SideBySide::measure() {
  Outline out = measure(Tables::given, 1);
  if (!out.experts.empty()) tell_calls_apart(out, measure(Tables::given, kMeasuredSlices));
  if (out.tables.empty()) return out;
  const Outline own = measure(Tables::own, 1);
  for (OutlineTable& table : out.tables) {
    const auto tensor = std::ranges::find(out.tensors, table.name, &OutlineTensor::name);
    const auto b = static_cast<std::size_t>(tensor->block);
    const auto more = [&](double OutlineBlock::* seconds) {
      return std::max(0.0, own.blocks[b].*seconds - out.blocks[b].*seconds);
    };
    table.dense_forward_seconds = more(&OutlineBlock::forward_seconds);
    table.dense_backward_seconds = more(&OutlineBlock::backward_seconds);
    table.dense_update_seconds = more(&OutlineBlock::update_seconds);
  }
  return out;
}

}  // namespace

Outline measure_outline(const OutlineOptions& options) { return SideBySide(options).measure(); }

}  // namespace weft
