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

  std::int64_t count() const {
    std::int64_t product = 1;
    for (const std::int64_t d : dims) product *= d;
    return product;
  }
  std::int64_t rows() const { return dims.size() < 2 ? 0 : dims.front(); }  // 0: a vector
  friend bool operator==(const ParameterShape&, const ParameterShape&) = default;
};

struct PartShape {
  std::string name;
  std::vector<std::string> takes, gives;  // activations
  std::vector<int> parameters;            // that it uses: places in the model's list
  double flops_per_token = 0;             // of its forward pass; backward takes twice as many
  friend bool operator==(const PartShape&, const PartShape&) = default;
};

struct BlockShape {
  std::string name;
  std::vector<PartShape> parts;
  friend bool operator==(const BlockShape&, const BlockShape&) = default;
};

struct ModelShape {
  std::string model;
  std::vector<ParameterShape> parameters;
  std::vector<BlockShape> blocks;

  // Throws UsageError of one sentence: a name twice or empty, a part that takes what no part before it
  // gives, a parameter that nobody uses or that is not in the list, parameters out of the order of use.
  void check() const;

  int num_blocks() const { return static_cast<int>(blocks.size()); }
  std::int64_t num_elements() const;
  double flops_per_token() const;
  std::vector<int> parts() const;  // of each block
  // The backward of the first user of a parameter in the last of so many micro-batches.
  Piece ready_after(int parameter, int micro_batches) const;
  int block_of(int parameter) const;  // that updates it
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
