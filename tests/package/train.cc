// Models of one's own: a table and a head that learn which token follows which, trained on two ranks; and with layers
// between, in two stages.
#include <torch/types.h>
#include <weft/world.h>
#include <weft_torch/train/replica.h>

#include <cstdio>
#include <string>
#include <vector>

namespace {

constexpr std::int64_t kWords = 32, kWidth = 16, kSequences = 4, kLength = 8;
constexpr int kRanks = 2, kSteps = 40;

weft::ModelOptions sizes() {
  weft::ModelOptions options;
  options.vocabulary = kWords;
  options.context = kLength;
  return options;
}

torch::Tensor values(double seed, std::int64_t rows) {
  const torch::Tensor grid = at::arange(rows * kWidth, torch::kFloat32) * 0.7 + seed;
  return (at::sin(grid * grid) * 0.5).reshape({rows, kWidth}).contiguous().requires_grad_(true);
}

class Bigram final : public weft::Model {
 public:
  Bigram()
      : Model(weft::chain_shape("bigram", {{"table", {{"table", {kWords, kWidth}}}},
                                           {"head", {{"head", {kWords, kWidth}}}}}),
              sizes()) {
    table_ = add({.name = "table", .tensor = values(1, kWords)});
    head_ = add({.name = "head", .tensor = values(2, kWords)});
  }
  std::vector<torch::Tensor> forward(int block, int, std::span<const torch::Tensor> taken,
                                     const weft::Batch& batch, const weft::StepContext&) const override {
    if (block == 0) return {at::embedding(table_, batch.tokens)};
    const torch::Tensor logits = at::linear(taken.front(), head_).reshape({-1, kWords});
    return {at::nll_loss(at::log_softmax(logits, 1), batch.targets.reshape({-1}), {}, at::Reduction::Sum)};
  }

 private:
  torch::Tensor table_, head_;
};

// Token t is followed by 5 t + 1; sequences start anywhere.
weft::Batch batch_of(int rank, int step) {
  const torch::Tensor rows = at::arange(kSequences, torch::kInt64) + kSequences * (rank + kRanks * step);
  const torch::Tensor tokens = (rows.unsqueeze(1) * 3 + at::arange(kLength, torch::kInt64) * 7) % kWords;
  return {.tokens = tokens, .targets = (tokens * 5 + 1) % kWords, .first_sequence = kSequences * rank};
}

// The same with layers between, of which each rank has those of its stage.
class Layered final : public weft::Model {
 public:
  static constexpr int kLayers = 2;
  explicit Layered(const weft::ModelOptions& mine) : Model(weft::stage_shape(whole(), mine.stage), mine) {
    table_ = add({.name = "table", .tensor = values(1, kWords)});
    for (int n = 0; n < kLayers; ++n)
      layers_.push_back(
          add({.name = "layer." + std::to_string(n) + ".weight", .tensor = values(3 + n, kWidth)}));
    head_ = add({.name = "head", .tensor = values(2, kWords)});
  }
  std::vector<torch::Tensor> forward(int block, int, std::span<const torch::Tensor> taken,
                                     const weft::Batch& batch, const weft::StepContext&) const override {
    const int place = shape().origin_of(block);  // in the whole model
    if (place == 0) return {at::embedding(table_, batch.tokens)};
    const torch::Tensor& x = taken.front();
    if (place <= kLayers) return {x + at::tanh(at::linear(x, layers_[static_cast<std::size_t>(place - 1)]))};
    const torch::Tensor logits = at::linear(x, head_).reshape({-1, kWords});
    return {at::nll_loss(at::log_softmax(logits, 1), batch.targets.reshape({-1}), {}, at::Reduction::Sum)};
  }

 private:
  static weft::ModelShape whole() {
    std::vector<weft::ChainBlock> blocks{{"table", {{"table", {kWords, kWidth}}}}};
    for (int n = 0; n < kLayers; ++n) {
      const std::string name = "layer." + std::to_string(n);
      blocks.push_back({name, {{name + ".weight", {kWidth, kWidth}}}});
    }
    blocks.push_back({"head", {{"head", {kWords, kWidth}}}});
    weft::ModelShape shape = weft::chain_shape("layered", blocks);
    shape.width = kWidth;  // values of a token in what passes between stages
    return shape;
  }
  torch::Tensor table_, head_;
  std::vector<torch::Tensor> layers_;
};

// Two stages of two data-parallel ranks each; gradients go back between them as whole numbers of 4 bits.
bool learns_in_stages() {
  weft::ModelOptions options_of_all = sizes();
  options_of_all.stage.stages = 2;
  constexpr int kAll = 2 * kRanks;
  std::vector<double> first(kAll), last(kAll);
  weft::run_ranks(kAll, [&](weft::World& world) {
    Layered model(weft::with_rank(options_of_all, world.rank(), world.size()));
    weft::ReplicaOptions options;
    options.backward.bits = 4;
    options.optimizer.lr = 0.05;
    weft::Replica replica(world.engine(), world.comm(), model, options);
    const weft::DataRank data = weft::data_rank_of(options_of_all, world.rank(), world.size());
    const auto rank = static_cast<std::size_t>(world.rank());
    for (int step = 0; step < kSteps; ++step) {
      const std::vector<weft::Batch> batches = weft::micro_batches_of(batch_of(data.rank, step), 4);
      const weft::StepOutcome outcome = replica.step(batches, {.seed = 1, .step = step});
      if (step == 1) first[rank] = outcome.last_loss.value();
    }
    last[rank] = replica.settle().last_loss.value();
  });
  std::printf("in stages, loss %.3f -> %.3f\n", first[0], last[0]);
  return last == std::vector<double>(kAll, last[0]) && last[0] < 0.5 * first[0];
}

}  // namespace

int main() {
  std::vector<double> first(kRanks), last(kRanks), sums(kRanks);
  weft::run_ranks(kRanks, [&](weft::World& world) {
    Bigram model;
    weft::ReplicaOptions options;
    options.parallel.scheme.name = "spardl";
    options.parallel.scheme.density = 0.25;
    options.parallel.scheme.buckets.dense_below = 0;
    options.optimizer.lr = 0.05;
    weft::Replica replica(world.engine(), world.comm(), model, options);
    const auto rank = static_cast<std::size_t>(world.rank());
    for (int step = 0; step < kSteps; ++step) {
      const std::vector<weft::Batch> batches{batch_of(world.rank(), step)};
      const weft::StepOutcome outcome = replica.step(batches, {.seed = 1, .step = step});
      if (step == 1) first[rank] = outcome.last_loss.value();
    }
    last[rank] = replica.settle().last_loss.value();
    for (const weft::Parameter& p : model.parameters()) sums[rank] += p.tensor.detach().sum().item<double>();
  });
  std::printf("loss %.3f -> %.3f\n", first[0], last[0]);
  const bool same = sums[0] == sums[1] && last[0] == last[1];
  return same && last[0] < 0.5 * first[0] && learns_in_stages() ? 0 : 1;
}
