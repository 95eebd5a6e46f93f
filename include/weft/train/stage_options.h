// Pipelines: ranks have consecutive parts of a model, stages, and micro-batches go through them. How a step is
// ordered: src/patterns/pipeline.h; what is done with what travels: src/pipeline/.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace weft {

// What goes back between stages: gradients of activations.
struct BackwardOptions {
  // affects results; equal on all ranks
  int columns = 0;  // of the factors that it travels as; 0: it does not
  int bits = 0;     // of the whole numbers that it travels as, 4 or 8; 0: it does not
  // Which of them do: epilogue (nobody could hide them), all, or those that are named (pipeline/message_set.h).
  std::string messages = "epilogue";
  bool lazy_error = true;  // what a message leaves behind joins the link's next one; false: it is lost
  std::uint64_t seed = 0;  // of the first factors

  bool compresses() const { return columns > 0 || bits > 0; }
};

inline constexpr int kAllStages = -1;
inline constexpr std::array<std::string_view, 5> kTiedSums{"auto", "fused", "two-step", "hierarchical",
                                                           "scheme"};

struct StageOptions {
  // affects results
  int stages = 1;                 // of the model
  int stage = 0;                  // which of them this is
  std::string schedule = "1f1b";  // gpipe, 1f1b, interleaved, zb-h1 (sums differ by rounding)
  int chunks = 1;                 // of a stage: separate runs of blocks; more than one only interleaved
  bool double_warmup = false;     // 1f1b, zb-h1: twice as many forwards first, so that sends hide
  std::vector<int> layers = {};   // of each chunk of the model; empty: evenly, the first ones one more
  // Gradients of so many stages, the first ones, are summed by the scheme of the run, those of the others dense;
  // kAllStages: of all. The first stages end a step last, so their sums are waited for.
  int compressed = kAllStages;
  // What passes between stages travels as bfloat16, rounded to nearest even; else as it is computed.
  bool bf16 = false;
  // So do sums of gradients beside a scheme that compresses: those that stay dense (what stages share, gradients of
  // stages that are not compressed), which else are exact, but for a scheme that rounds; and those of PowerSGD's
  // factors, where the scheme does not say itself what they travel as (SchemeOptions::wire).
  bool bf16_sums = false;
  // How a parameter that several stages have is summed, one of kTiedSums:
  //   auto          by predicted cost: fused or two-step
  //   fused         in one sum over all ranks that have a copy
  //   two-step      over the data-parallel ranks of each stage, then over the stages
  //   hierarchical  fused, inside nodes first: where nodes are known
  //   scheme        fused, by the scheme of the run, for comparison; all others are dense
  std::string tied_sum = "auto";

  bool is_whole() const { return stages == 1; }
};

struct ModelShape;

// What the rank has of the model. Blocks "layer.N" are dealt to the chunks, what stands before the first of them
// goes with the first chunk, what stands behind the last one with the last. Throws UsageError: fewer layers than
// chunks, layers that do not add up, a model between whose blocks more than one activation passes.
ModelShape stage_shape(const ModelShape& whole, const StageOptions& options);

}  // namespace weft
