// A training program: a small GPT on some text, its gradients summed by SparDL at a density of 5 %.
//
//   build/release/examples/02_train 2                                   two ranks, threads of one process
//   build/release/weft launch -n 2 -- build/release/examples/02_train   two processes, over tcp
//
// `weft train` does all of this and more (checkpoints, schedules, reports); here is what its core looks like.
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <exception>

#include "data/batches.h"
#include "data/open.h"
#include "weft/weft.h"
#include "weft_torch/train/replica.h"

namespace {

constexpr int kSteps = 60;
constexpr std::int64_t kLength = 32;

void train(weft::World& world) {
  torch::set_num_threads(1);  // of this rank: ranks share the machine

  // Data: an installed text, or synthetic tokens where there is none. Every rank reads its share of each
  // batch.
  weft::DataOptions source;
  source.words = 2000;
  const weft::OpenedData data = weft::open_data(source);
  const weft::Batches batches(
      data.source, {.sequences = 16, .length = kLength, .rank = world.rank(), .size = world.size()});

  // The model: equal on all ranks, because weights are functions of seed and name.
  weft::ModelOptions sizes = weft::model_options("gpt", "tiny");
  sizes.vocabulary = data.source->vocabulary();
  sizes.context = kLength;
  const std::unique_ptr<weft::Model> model = weft::make_model("gpt", sizes);

  // The exchange: what is sent and how, and the optimizer that gets the averages.
  weft::ReplicaOptions options;
  options.parallel.scheme.name = "spardl";
  options.parallel.scheme.density = 0.05;
  options.optimizer.lr = 3e-3;
  weft::Replica replica(world.engine(), world.comm(), *model, options);

  // Gradients leave while backward runs; the next forward waits, block by block, for what it needs.
  for (std::int64_t step = 0; step < kSteps; ++step) {
    const weft::Batch batch = weft::to_batch(batches.at(step));
    const weft::StepOutcome outcome = replica.step({&batch, 1}, {.seed = 1, .step = step});
    if (world.rank() == 0 && outcome.last_loss && step % 10 == 1)
      std::printf("step %2lld: loss %.3f, %.1f ms waited\n", static_cast<long long>(step - 1),
                  *outcome.last_loss, 1e3 * outcome.waited_seconds);
  }
  const weft::StepOutcome last = replica.settle();  // the last updates
  if (world.rank() == 0)
    std::printf("%lld parameters, loss %.3f; a rank sent %llu bytes of gradients in the last step\n",
                static_cast<long long>(model->shape().num_elements()), last.last_loss.value_or(0),
                static_cast<unsigned long long>(last.sent_bytes));
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc > 1)
      weft::run_ranks(std::atoi(argv[1]), train);
    else
      train(*weft::join_world());
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "02_train: %s\n", e.what());
    return 1;
  }
}
