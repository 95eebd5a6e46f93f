// Backward in halves (weft_torch/models/weight_queue.h) beside the plain one: what gradients of inputs and those of
// weights take together, over the backward that makes both at once. The two take turns, so that they meet the same
// machine; the ratio is the median of the turns' ratios, with the interval that holds it 95 times of 100.
//
//   bench_backward_halves [turns [layers [width [tokens]]]]      default 40 4 256 512; a gpt of 2,048 words, one thread
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "base/statistics.h"
#include "weft_torch/models/model.h"
#include "weft_torch/models/weight_queue.h"
#include "weft_torch/train/cut_model.h"

namespace weft {
namespace {

std::vector<Piece> pieces_of(const ModelShape& shape, Work work) {
  std::vector<Piece> out;
  for (int b = 0; b < shape.num_blocks(); ++b) {
    for (std::size_t p = 0; p < shape.blocks[static_cast<std::size_t>(b)].parts.size(); ++p)
      out.push_back({work, b, static_cast<int>(p), 0});
  }
  if (work != Work::forward) std::reverse(out.begin(), out.end());
  return out;
}

struct Bench {
  std::unique_ptr<Model> model;
  Batch batch;

  // Seconds of a backward; with a queue, of its two halves.
  std::vector<double> backward(WeightQueue* queue) const {
    using Clock = std::chrono::steady_clock;
    CutModel cut(*model);
    StepContext context{.seed = 1};
    context.weights = queue;
    cut.begin({&batch, 1}, context);
    for (const Piece& piece : pieces_of(model->shape(), Work::forward)) cut.forward(piece);
    std::vector<double> out;
    const auto timed = [&](const auto& work) {
      const Clock::time_point began = Clock::now();
      work();
      out.push_back(std::chrono::duration<double>(Clock::now() - began).count());
    };
    const Work first = queue == nullptr ? Work::backward : Work::input_gradient;
    timed([&] {
      for (const Piece& piece : pieces_of(model->shape(), first)) {
        if (queue != nullptr) queue->begin(piece);
        cut.backward(piece, 1);
      }
    });
    if (queue == nullptr) return out;
    timed([&] {
      for (const Piece& piece : pieces_of(model->shape(), Work::weight_gradient))
        queue->run(piece, [](const torch::Tensor&) {});
    });
    return out;
  }
};

int run(int argc, char** argv) {
  const auto argument = [&](int i, std::int64_t other) { return argc > i ? std::atoll(argv[i]) : other; };
  const std::int64_t turns = argument(1, 40), tokens = argument(4, 512);
  at::set_num_threads(1);
  ModelOptions options = model_options("gpt", "default");
  options.layers = static_cast<int>(argument(2, 4));
  options.width = argument(3, 256);
  options.heads = 4;
  options.vocabulary = 2048;
  options.context = 64;
  options.dropout = 0;
  const torch::Tensor words =
      torch::randint(0, options.vocabulary, {std::max<std::int64_t>(1, tokens / 64), 64}, torch::kInt64);
  const Bench bench{make_model("gpt", options), {.tokens = words, .targets = words}};
  for (const Parameter& p : bench.model->parameters())
    torch::Tensor(p.tensor).mutable_grad() = torch::zeros_like(p.tensor);
  std::vector<double> plain, inputs, weights, ratios;
  for (std::int64_t turn = -3; turn < turns; ++turn) {
    WeightQueue queue;
    std::vector<double> whole, halves;
    if (turn % 2 == 0) whole = bench.backward(nullptr);  // who goes first alternates
    halves = bench.backward(&queue);
    if (turn % 2 != 0) whole = bench.backward(nullptr);
    if (turn < 0) continue;
    plain.push_back(whole[0]);
    inputs.push_back(halves[0]);
    weights.push_back(halves[1]);
    ratios.push_back((halves[0] + halves[1]) / whole[0]);
  }
  std::ranges::sort(ratios);
  // Of the median: order statistics n/2 -+ 0.98 sqrt(n).
  const double reach = 0.98 * std::sqrt(static_cast<double>(ratios.size()));
  const double middle = static_cast<double>(ratios.size() - 1) / 2;
  const auto at = [&](double place) {
    return ratios[static_cast<std::size_t>(std::clamp(place, 0.0, static_cast<double>(ratios.size() - 1)))];
  };
  std::printf(
      "plain %.2f ms, inputs %.2f ms, weights %.2f ms; halves over plain %.3f (%.3f .. %.3f), %zu turns\n",
      1e3 * median(plain), 1e3 * median(inputs), 1e3 * median(weights), median(ratios), at(middle - reach),
      at(middle + reach), ratios.size());
  return 0;
}

}  // namespace
}  // namespace weft

int main(int argc, char** argv) { return weft::run(argc, argv); }
