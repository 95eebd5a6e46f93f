// The shape of a model: what tables of moves are made from, what LibTorch builds a model from, and what an
// outline adds seconds to. Without tensors.
//
//   Parameters   in order of first use; one that several parts share (a tied table) is there once
//   Parts        take and give activations by name. A name is given by one part and taken by parts behind it;
//                the last part gives kLoss. Autograd works inside a part only
//
// A parameter belongs to the block of its first user: that block updates it. Its gradient is complete after
// the backward of that part (backward visits its other users before) in the last micro-batch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace weft {

struct Piece;  // of a step: a part, forward or backward (src/patterns/schedule.h)

inline constexpr const char* kLoss = "loss";

struct ParameterShape {
  std::string name;  // unique and stable: state and checkpoints depend on it
  std::vector<std::int64_t> dims;
  bool table = false;  // rows are looked up and nothing else is done with it: few rows get a gradient
  std::int64_t shared_lookups = 0;  // of a table: ids of a step that are the same on all ranks
  double rows_per_step = 0;         // of a table: that a rank's batch reads; 0: nobody has said
  bool tied = false;  // rows are looked up, and it is a matrix of another part as well: every row gets one
  // Of experts that are dealt to several ranks: `dims` are of this rank's, which are [first, first + dims[0])
  // of so many. 0: all of it is here.
  std::int64_t of_experts = 0;
  std::int64_t first = 0;
  // Stages of a pipeline that use it, where they are several: each has a copy, and the gradient is the sum of
  // all of theirs.
  std::vector<int> stages = {};
  // Tensor-parallel ranks cut it along this dimension; -1: each has all of it. In the shape of one of them its
  // part begins at `cut_first` of `cut_of`; 0: nobody has cut it.
  int cut = -1;
  std::int64_t cut_first = 0, cut_of = 0;

  std::int64_t count() const {
    std::int64_t product = 1;
    for (const std::int64_t d : dims) product *= d;
    return product;
  }
  std::int64_t rows() const { return dims.size() < 2 ? 0 : dims.front(); }  // 0: a vector
  // Of all ranks' together.
  std::vector<std::int64_t> whole_dims() const {
    std::vector<std::int64_t> out = dims;
    if (of_experts > 0) out.front() = of_experts;
    if (cut_of > 0) out[static_cast<std::size_t>(cut)] = cut_of;
    return out;
  }
  friend bool operator==(const ParameterShape&, const ParameterShape&) = default;
};

// What is left of a part that tensor-parallel ranks cut (src/step/tensor.h).
enum class PartRole : std::uint8_t { whole, before, product, behind };

struct PartShape {
  std::string name;
  std::vector<std::string> takes, gives;  // activations
  std::vector<int> parameters;            // that it uses: places in the model's list
  double flops_per_token = 0;             // of its forward pass; backward takes twice as many
  bool of_others = false;  // what it takes comes from all ranks: it computes also where this one has no token
  bool cut = false;        // tensor-parallel ranks cut it, as its parameters say
  PartRole role = PartRole::whole;
  int origin = -1;  // of one that they have cut: its number in the block of the whole model; -1: its own
  friend bool operator==(const PartShape&, const PartShape&) = default;
};

struct BlockShape {
  std::string name;
  std::vector<PartShape> parts;
  friend bool operator==(const BlockShape&, const BlockShape&) = default;
};

// A layer of experts: parts of a block that follow one another, the gate, one for each slice of the tokens'
// copies, the merge (src/experts/experts.h). What they give and take, beside the tokens themselves:
//   weights      gate to merge: of each token's each choice
//   rows         gate to merge: of each copy, its row among those of all slices; -1: it was dropped
//   router       of the gate: what the losses of the router need
//   dispatch.S   gate to the experts of slice S: its rows
//   counts.S     as well: of them, of each expert; of rows from several ranks, of each rank and own expert
//   combine.S    experts of slice S to merge: what they made of them
struct ExpertShape {
  std::string name;  // "layer.1.experts"
  int block = 0;
  int gate = 0, first_slice = 0;  // parts
  int slices = 1;
  std::int64_t width = 0;  // of a row
  int experts = 1, choices = 1;
  double capacity_factor = 0;

  int merge() const { return first_slice + slices; }
  std::string weights() const { return name + ".weights"; }
  std::string rows() const { return name + ".rows"; }
  std::string router() const { return name + ".router"; }
  std::string dispatch(int slice) const { return name + ".dispatch." + std::to_string(slice); }
  std::string counts(int slice) const { return name + ".counts." + std::to_string(slice); }
  std::string combine(int slice) const { return name + ".combine." + std::to_string(slice); }
  friend bool operator==(const ExpertShape&, const ExpertShape&) = default;
};

// Its parts, without parameters and FLOPs: the gate, experts that all tokens share (where they have a name),
// a part for each slice, the merge. The gate takes `taken`, the merge gives `given`.
std::vector<PartShape> expert_parts(const ExpertShape& layer, const std::string& taken,
                                    const std::string& shared, const std::string& given);

// Blocks that a rank of a pipeline computes one behind the other: what the chunk before them gives arrives, what
// their last part gives leaves for the chunk behind them.
struct ChunkShape {
  int number = 0;               // among the chunks of the whole model
  int first = 0, count = 0;     // blocks of this shape
  int origin = 0;               // place of the first of them in the whole model
  std::string arrives, leaves;  // activations; empty at the ends of the model
  friend bool operator==(const ChunkShape&, const ChunkShape&) = default;
};

// What tensor-parallel ranks add up, in every micro-batch: shares of an activation that a part has given, or of
// the gradient of one that it took.
struct SumShape {
  std::string activation;
  bool gradient = false;
  int block = 0, part = 0;  // behind whose forward, or backward, the rank's share is there
  std::int64_t values = 0;  // of a token
  bool bf16 = false;        // they travel as bfloat16
  friend bool operator==(const SumShape&, const SumShape&) = default;
};

struct ModelShape {
  std::string model;
  std::vector<ParameterShape> parameters;
  std::vector<BlockShape> blocks;
  std::vector<ExpertShape> experts = {};
  std::vector<ChunkShape> chunks = {};  // of a stage; empty: it is the whole model
  std::vector<SumShape> sums = {};      // of a tensor-parallel rank
  std::int64_t width = 0;               // values of a token in what passes from block to block; 0: not known

  // Throws UsageError of one sentence: a name twice or empty, a part that takes what no part before it
  // gives and nobody sends, a parameter that nobody uses or that is not in the list, parameters out of the
  // order of use.
  void check() const;

  int num_blocks() const { return static_cast<int>(blocks.size()); }
  std::int64_t num_elements() const;
  double flops_per_token() const;
  std::vector<int> parts() const;  // of each block
  // The backward of the first user of a parameter in the last of so many micro-batches.
  Piece ready_after(int parameter, int micro_batches) const;
  int block_of(int parameter) const;       // that updates it
  int origin_of(int block) const;          // its place in the whole model
  bool is_last(const Piece& piece) const;  // of the last block's last part
  bool has_loss() const { return chunks.empty() || chunks.back().leaves.empty(); }
  // The same model with only those parameters that are trained.
  ModelShape trained(const std::vector<bool>& is_trained) const;
  // "forward layer.0.attention, micro-batch 1"
  std::string title(const Piece& piece, int micro_batches = 1) const;
  friend bool operator==(const ModelShape&, const ModelShape&) = default;
};

// A model whose blocks follow one another, each of one part with parameters of its own.
struct ChainBlock {
  std::string name;
  std::vector<ParameterShape> parameters;
  double flops_per_token = 0;
};
ModelShape chain_shape(std::string model, const std::vector<ChainBlock>& blocks);

}  // namespace weft
