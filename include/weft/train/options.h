// What a training run is, without torch: every value that `weft train` takes, checked in one place.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "weft/comm.h"
#include "weft/train/data_options.h"
#include "weft/train/model_options.h"
#include "weft/train/optimizer_options.h"
#include "weft/train/scheme_options.h"
#include "weft/train/tables_options.h"

namespace weft {

struct TrainOptions {
  // affects results; equal on all ranks
  std::string model = "gpt";
  // vocabulary: at most so many words; the model gets as many as the data has. experts.ranks: that share a
  // layer's; stage.stages: that the layers are dealt to. Which place among them a rank has, follows from its number.
  ModelOptions sizes;
  DataOptions data;                // words and seed come from `sizes` and `seed`
  std::int64_t global_batch = 16;  // sequences of a step, of all ranks
  std::int64_t length = 0;         // tokens of a sequence; 0: the model's context
  std::int64_t steps = 200;
  int accumulate = 1;      // micro-batches that a rank's share of a step is cut into
  std::uint64_t seed = 1;  // of weights, order of the data and dropout

  // Its seed comes from `seed`. Momentum correction is for sgd; schemes that send everything take it as the
  // optimizer's momentum.
  SchemeOptions scheme;
  TablesOptions tables;
  BackwardOptions backward;       // of stages; its seed comes from `seed`
  std::int64_t warmup_steps = 0;  // over which the density falls from kWarmUpDensity; 0: none
  // What the cost model goes by: not what is measured, which differs from run to run, and bits with it.
  LinkCost planned_link{.hop_seconds = 50e-6, .seconds_per_byte = 1 / 125e6, .fold_seconds_per_byte = 0};

  // The recipe of sparse schemes: docs/recipe.md.
  bool clip_local = false;   // clip_norm holds for each rank's own gradient, before the sum
  bool find_unused = false;  // a parameter that no rank used in a step is not updated

  OptimizerOptions optimizer = default_options("adamw");
  std::string optimizer_from = "weft";   // or "torch"
  std::string lr_schedule = "constant";  // or "cosine"
  std::int64_t lr_warmup = 0;            // steps over which the learning rate rises
  double lr_final = 0.1;                 // cosine: share of the learning rate that is left at the end
  double clip_norm = 0;                  // 0: none
  bool skip_not_finite = false;

  // affects speed only
  int threads = 1;         // of torch, a rank
  bool recompute = false;  // forward again in backward: less memory, a third more to compute
};

inline constexpr double kWarmUpDensity = 0.25;
inline constexpr std::int64_t kMostSkipped = 10;  // steps in a row; then the run has failed

std::vector<std::string_view> lr_schedule_names();

// Throws UsageError of one sentence: an unknown name (with the nearest), a value that cannot be meant.
void check_train(const TrainOptions& options, int ranks);

}  // namespace weft
