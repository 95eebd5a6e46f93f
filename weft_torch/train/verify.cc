#include "weft_torch/train/verify.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <map>
#include <numeric>
#include <utility>

#include "data/batches.h"
#include "data/open.h"
#include "data_parallel/schemes.h"
#include "weft/error.h"
#include "weft_torch/models/model.h"
#include "weft_torch/train/agree.h"
#include "weft_torch/train/replica.h"
#include "weft_torch/train/trainer.h"

namespace weft {

namespace {

double squares(const torch::Tensor& tensor) {
  return tensor.detach().to(torch::kFloat64).square().sum().item<double>();
}

// Squared lengths; those of a block are the sums of its parameters'.
struct Squares {
  double gradient_gap = 0, gradient = 0, gap = 0, value = 0, way = 0;
  Squares& operator+=(const Squares& o) {
    gradient_gap += o.gradient_gap;
    gradient += o.gradient;
    gap += o.gap;
    value += o.value;
    way += o.way;
    return *this;
  }
};

double relative(double gap, double of) {
  if (gap == 0) return 0;
  return of == 0 ? 1 : std::sqrt(gap / of);
}

Distance distance_of(const Squares& s) {
  return {.block = {},
          .name = {},
          .elements = 0,
          .gradient = relative(s.gradient_gap, s.gradient),
          .parameter = relative(s.gap, s.value),
          .drift = relative(s.gap, s.way)};
}

// A model in training.
struct Pupil {
  TrainOptions options;
  std::unique_ptr<Model> model;
  std::unique_ptr<Replica> replica;
  double loss = 0;

  Pupil(World& world, const Comm& comm, const TrainOptions& given, const ModelOptions& sizes)
      : options(given), model(make_model(given.model, sizes)) {
    replica = std::make_unique<Replica>(world.engine(), comm, *model, replica_options(options));
  }
  void step(const Batch& batch, std::int64_t step) {
    replica->set_density(density_at(options, step));
    replica->set_lr(lr_at(options, step));
    const StepContext context{.seed = options.seed, .step = step};
    replica->step(micro_batches_of(batch, options.accumulate), context);
    loss = replica->settle().last_loss.value_or(0);
  }
};

class Verifier {
 public:
  Verifier(World& world, const TrainOptions& options, const VerifyRun& run)
      : world_(world), options_(options), run_(run) {}

  VerifyReport verify() {
    try {
      open();
      for (std::int64_t step = 0; step < options_.steps; ++step) {
        const Batch batch = to_batch(batches_->at(step));
        subject_->step(batch, step);
        shadow_->step(batch, step);
      }
    } catch (...) {
      for (Pupil* pupil : {subject_.get(), shadow_.get()}) {
        if (pupil != nullptr) pupil->replica->abandon(std::current_exception());
      }
      throw;
    }
    return report();
  }

 private:
  void open();
  void watch();
  VerifyReport report();

  World& world_;
  const TrainOptions& options_;
  const VerifyRun& run_;
  std::unique_ptr<Batches> batches_;
  std::unique_ptr<Pupil> subject_, shadow_;
  std::vector<torch::Tensor> start_;
  std::map<std::string, torch::Tensor> gradient_;  // of the subject in this step, on rank 0
  std::map<std::string, Squares> squares_;         // of each parameter's gradients, on rank 0
};

void Verifier::open() {
  check_train(options_, world_.size());
  std::shared_ptr<const DataSource> source = run_.source;
  if (source == nullptr) source = open_data(data_options(options_)).source;
  const ModelOptions sizes = model_sizes(options_, *source);
  batches_ = std::make_unique<Batches>(source, batch_options(options_, world_.rank(), world_.size()));
  world_.plan_by(options_.planned_link);
  std::vector<int> everybody(static_cast<std::size_t>(world_.size()));
  std::iota(everybody.begin(), everybody.end(), 0);
  TrainOptions dense = options_;
  dense.scheme.name = lossless_scheme().name;
  dense.tables = {};
  subject_ = std::make_unique<Pupil>(world_, world_.comm(), options_, sizes);
  shadow_ = std::make_unique<Pupil>(world_, world_.subgroup(everybody, 1), dense, sizes);
  const std::vector<Parameter> parameters = subject_->model->parameters();
  const auto is_spoilt = [this](const Parameter& p) { return p.name == run_.spoil; };
  if (!run_.spoil.empty() && std::ranges::none_of(parameters, is_spoilt))
    throw UsageError("there is no parameter '" + run_.spoil + "' to spoil");
  start_ = subject_->replica->values();
  watch();
}

void Verifier::watch() {
  const bool compares = world_.rank() == 0;
  subject_->replica->watch([this, compares](const Parameter& p, torch::Tensor& gradient) {
    if (p.name == run_.spoil) gradient.mul_(2);
    if (compares) gradient_[p.name] = gradient.clone();
  });
  if (!compares) return;
  shadow_->replica->watch([this](const Parameter& p, torch::Tensor& gradient) {
    Squares& sums = squares_[p.name];
    const auto found = gradient_.find(p.name);
    // (What was not updated under the scheme had no gradient there.)
    sums.gradient_gap += squares(found == gradient_.end() ? gradient : found->second - gradient);
    sums.gradient += squares(gradient);
    if (found != gradient_.end()) gradient_.erase(found);
  });
}

VerifyReport Verifier::report() {
  VerifyReport out;
  out.steps = options_.steps;
  out.loss = subject_->loss;
  out.shadow_loss = shadow_->loss;
  const std::vector<torch::Tensor> mine = subject_->replica->values(), others = shadow_->replica->values();
  if (world_.rank() != 0) return out;
  const ModelShape& shape = subject_->model->shape();
  for (int b = 0; b < shape.num_blocks(); ++b) {
    Squares of_block;
    std::int64_t elements = 0;
    for (std::size_t i = 0; i < shape.parameters.size(); ++i) {
      if (shape.block_of(static_cast<int>(i)) != b) continue;
      const std::string& name = shape.parameters[i].name;
      const auto found = squares_.find(name);
      Squares sums = found == squares_.end() ? Squares{} : found->second;
      sums.gap = squares(mine[i] - others[i]);
      sums.value = squares(others[i]);
      sums.way = squares(others[i] - start_[i]);
      Distance distance = distance_of(sums);
      distance.block = shape.blocks[static_cast<std::size_t>(b)].name;
      distance.name = name;
      distance.elements = shape.parameters[i].count();
      elements += distance.elements;
      out.parameters.push_back(std::move(distance));
      of_block += sums;
    }
    Distance distance = distance_of(of_block);
    distance.block = shape.blocks[static_cast<std::size_t>(b)].name;
    distance.elements = elements;
    if (elements > 0) out.blocks.push_back(std::move(distance));
  }
  return out;
}

}  // namespace

const Distance* most_hurt(const std::vector<Distance>& distances) {
  const Distance* out = nullptr;
  for (const Distance& d : distances) {
    if (d.drift > (out == nullptr ? 0.0 : out->drift)) out = &d;
  }
  return out;
}

VerifyReport verify_rank(World& world, const TrainOptions& options, const VerifyRun& run) {
  set_torch_threads(options.threads);
  return Verifier(world, options, run).verify();
}

}  // namespace weft
