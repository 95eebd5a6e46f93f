// The outline of a model: what a training step computes and exchanges, as numbers. Whoever drives a step with
// timers instead of a model (workload/emulate.h) goes by it.
//
//   Blocks   in order of use. A step is: other_seconds; forward of every block, first to last, each after its
//            own update of the step before; backward of every block, last to first.
//   Tensors  in order of use; each belongs to the block that uses it first. A shared one is there once. Its
//            gradient is complete when `ready` of that block's backward is over: other users come later in
//            the forward, so earlier in the backward.
//   Tables   tensors whose rows are looked up; they are among the tensors too.
//   Experts  layers of experts at the end of blocks: the parts that the block's own seconds do not have
//
// Seconds are of one rank and one step, of `tokens_per_rank` tokens. They hold no communication and no copy
// of a gradient into its bucket; an update takes its result over, changes the parameters and clears the
// gradients. Those of blocks are of a model that is given the rows of its tables.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "step/step_times.h"
#include "weft/train/shape.h"
#include "weft/train/tensor_options.h"

namespace weft {

struct OutlineBlock {
  std::string name;
  double forward_seconds = 0, backward_seconds = 0, update_seconds = 0;
  // Of forward and backward, the shares of the products that tensor-parallel ranks cut, one behind the other;
  // empty: they cut none.
  std::vector<double> cuts = {};
};

struct OutlineTensor {
  std::string name;
  std::int64_t length = 0;             // elements
  std::int64_t rows = 0, columns = 0;  // of a matrix, row-major; 0: a vector
  int block = 0;                       // its first user
  double ready = 1;                    // share of that block's backward after which its gradient is there
  bool tied = false;                   // a table that is a matrix of another block as well
  // Whose it is where the block has experts; `ready` is then of that part. Of experts: all of a layer's, a row
  // each.
  enum class Of : std::uint8_t { block, gate, shared, experts };
  Of of = Of::block;
  int cut = -1;  // dimension along which tensor-parallel ranks cut it; -1: each has all of it
};

// A layer of experts, behind the other parts of its block. Seconds as the others', of all tokens of a rank; of
// experts, of one row and of one call.
struct OutlineExperts {
  std::string name;
  int block = 0;
  std::int64_t width = 0;
  int experts = 1, choices = 1;
  double capacity_factor = 0;
  double gate_forward_seconds = 0, gate_backward_seconds = 0;
  double shared_forward_seconds = 0, shared_backward_seconds = 0;  // 0: none is shared
  double row_forward_seconds = 0, row_backward_seconds = 0;
  // Of each expert in each slice, however few its rows are.
  double expert_forward_seconds = 0, expert_backward_seconds = 0;
  double merge_forward_seconds = 0, merge_backward_seconds = 0;
};
// How they are laid out: in so many slices, over so many ranks, of which this is one.
struct ExpertLayout {
  int slices = 1, ranks = 1, rank = 0;
};

struct OutlineTable {
  std::string name;  // of its tensor
  std::int64_t rows = 0, width = 0;
  double rows_per_step = 0;  // that one rank's batch touches
  // Ids that a rank looks up in a step, an id as often as it is there: of its own, and those that all ranks
  // have in common. workload/table_draws.h says how they are distributed.
  std::int64_t lookups_per_step = 0, shared_per_step = 0;
  double zipf = 1;
  // What a step takes in addition where the rank has all of it and every row gets a gradient.
  double dense_forward_seconds = 0, dense_backward_seconds = 0, dense_update_seconds = 0;
};

struct Outline {
  static constexpr std::string_view kMeasured = "measured", kFlops = "flops";

  std::string model;
  std::string source = std::string(kMeasured);  // of the seconds
  double flops_per_second = 0;                  // of "flops": the rate; else 0
  int side_by_side = 1;                         // of "measured": ranks that computed at the same time
  std::int64_t parameters = 0;                  // elements of all tensors
  std::int64_t tokens_per_rank = 0;
  std::int64_t width = 0;    // values of a token in what passes from block to block; 0: not known
  double other_seconds = 0;  // outside of blocks: batch, loss
  std::vector<OutlineBlock> blocks;
  std::vector<OutlineTensor> tensors;
  std::vector<OutlineTable> tables;
  std::vector<OutlineExperts> experts;
};

// Throws UsageError of one sentence that begins with `where`: names twice or empty, counts that are negative
// or do not add up, times that are negative, not finite or of more than a day, blocks and tensors that are not there.
void check(const Outline& outline, std::string_view where = "outline");

// Names and lengths without seconds. Of a table at most `tokens_per_rank` rows are touched. Throws UsageError
// for tokens that are not positive.
Outline outline_of(const ModelShape& shape, std::int64_t tokens_per_rank);

// Seconds from FLOPs: a block's forward takes its FLOPs a token times tokens over the rate, its backward
// twice as much, an update nothing; gradients are there at the end of their part's backward. Throws
// UsageError for a rate or tokens that are not positive.
Outline outline_from_flops(const ModelShape& shape, std::int64_t tokens_per_rank, double flops_per_second);

// The same model where a rank has so many times the tokens: forward, backward and what is outside of blocks take so
// many times as long, updates as long as they did.
Outline with_more_tokens(Outline outline, double times);

// Seconds that were measured, block by block: a layer of experts is not told apart from its block any more.
// REQUIRES: `times` are of the model that the outline was made of.
void set_seconds(Outline& outline, const StepTimes& times);
// Rows that a rank's experts compute in a step where all of them get as many.
double even_rows(const Outline& outline, const OutlineExperts& layer);

// The seconds of one step that communicates nothing.
double compute_seconds(const Outline& outline);
// What tables of moves are made from: every block has one part, and those of its experts. Of a tensor-parallel rank:
// its share of the tensors, and what becomes of the parts that are cut (step/tensor.h).
ModelShape shape_of(const Outline& outline, const ExpertLayout& layout = {}, const TensorOptions& share = {});

}  // namespace weft
