// A model of one's own, trained on two ranks: a table and a head that learn which token follows which.
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

class Bigram final : public weft::Model {
 public:
  Bigram()
      : Model(weft::chain_shape("bigram", {{"table", {{"table", {kWords, kWidth}}}},
                                           {"head", {{"head", {kWords, kWidth}}}}}),
              sizes()) {
    table_ = add({.name = "table", .tensor = values(1)});
    head_ = add({.name = "head", .tensor = values(2)});
  }
  std::vector<torch::Tensor> forward(int block, int, std::span<const torch::Tensor> taken,
                                     const weft::Batch& batch, const weft::StepContext&) const override {
    if (block == 0) return {at::embedding(table_, batch.tokens)};
    const torch::Tensor logits = at::linear(taken.front(), head_).reshape({-1, kWords});
    return {at::nll_loss(at::log_softmax(logits, 1), batch.targets.reshape({-1}), {}, at::Reduction::Sum)};
  }

 private:
  static torch::Tensor values(double seed) {
    const torch::Tensor grid = at::arange(kWords * kWidth, torch::kFloat32) * 0.7 + seed;
    return (at::sin(grid * grid) * 0.5).reshape({kWords, kWidth}).contiguous().requires_grad_(true);
  }
  torch::Tensor table_, head_;
};

// Token t is followed by 5 t + 1; sequences start anywhere.
weft::Batch batch_of(int rank, int step) {
  const torch::Tensor rows = at::arange(kSequences, torch::kInt64) + kSequences * (rank + kRanks * step);
  const torch::Tensor tokens = (rows.unsqueeze(1) * 3 + at::arange(kLength, torch::kInt64) * 7) % kWords;
  return {.tokens = tokens, .targets = (tokens * 5 + 1) % kWords, .first_sequence = kSequences * rank};
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
  return same && last[0] < 0.5 * first[0] ? 0 : 1;
}
