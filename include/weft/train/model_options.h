// What a model is before it has tensors: its name and sizes. No torch here: the command checks names and
// sizes in every build.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "weft/train/expert_options.h"
#include "weft/train/stage_options.h"
#include "weft/train/tensor_options.h"

namespace weft {

struct ModelOptions {
  // affects results
  std::int64_t vocabulary = 24'000;
  std::int64_t context = 128;   // longest sequence
  std::int64_t width = 384;     // of embeddings and layers
  std::int64_t hidden = 0;      // lm: width of the LSTMs; 0: `width`
  std::int64_t projection = 0;  // lm: what an LSTM gives is projected to so many columns; 0: it is not
  int layers = 6;               // of pairs (gnmt, transformer ..): of the encoder, and as many of the decoder
  int heads = 6;                // of attention (not lm, gnmt): width must be a multiple of them
  double dropout = 0.1;         // in [0, 1)
  bool untied = false;          // gpt, gpt-moe: the head has a matrix of its own, not the embedding's table
  std::int64_t samples = 0;     // lm: negative samples of the softmax in training; 0: the full softmax
  ExpertOptions experts;        // gpt-moe, bert2gpt2-moe
  std::uint64_t seed = 1;       // of the weights
  // affects speed only
  bool sparse_gradients = false;  // gradients of tables have only the rows that were used
  // Who trains holds the tables: the model makes none, only their first values.
  bool tables_elsewhere = false;
  StageOptions stage;    // gpt, gpt-moe, bert: what the model has of its blocks
  TensorOptions tensor;  // as well: what it has of their matrices
};

std::vector<std::string_view> model_names();
std::vector<std::string_view> model_presets();
bool has_experts(std::string_view model);  // in some of its layers
// Sizes of a preset: "default" (about 20 M parameters), "tiny" (for tests), or "paper" (not of gpt): those of
// EmbRace's and of Lina's evaluation, for plans and simulations. Throws UsageError with the nearest name.
ModelOptions model_options(std::string_view model, std::string_view preset = "default");
// Of a model that so many ranks train together, as its stages, tensor-parallel ranks and experts' ranks say, what `rank`
// has: its stage, its part of matrices, its experts. Tensor-parallel ranks are neighbours; the ranks of a stage stand
// together, first stage first. REQUIRES: stages times tensor-parallel ranks divide `ranks`.
ModelOptions with_rank(ModelOptions sizes, int rank, int ranks);
// Which of the data-parallel ranks it is: all ranks of one pipeline have the same batches. REQUIRES: as above.
struct DataRank {
  int rank = 0, size = 1;
};
DataRank data_rank_of(const ModelOptions& sizes, int rank, int ranks);
// Throws UsageError that names the model, the option and what it must be.
void check_model(std::string_view model, const ModelOptions& options);

}  // namespace weft
