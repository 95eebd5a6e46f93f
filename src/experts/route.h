// Routes: where the copies of a micro-batch's tokens go, and in which order.
//
// A token has k choices among E experts, the best first. Its copies travel to the ranks of their experts and
// back. Experts of a rank follow one another, so ordered by expert the copies for a rank follow one another,
// too.
//
//   Places     an expert's copies of one source and micro-batch stand in a row: first choices of all tokens in
//              their order, then second ones
//   Capacity   an expert has C = ceil(k cf T / E) places for the T tokens of a source and micro-batch: whoever
//              comes later is dropped and gets nothing from that expert. All C places travel, empty ones as
//              zeros, so that nobody need tell how many there are. It depends on the source alone: a layout
//              of the experts over the ranks changes nothing
//   Dropless   capacity factor 0: as many places as there are copies
//   Slices     each expert's places are cut into as many blocks as there are slices (patterns/blocks.h). Slice
//              s has block s of every expert; rows of a slice are ordered by expert, then by place
//
// Lepikhin et al., "GShard", ICLR 2021, for the order of choices.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace weft {

struct RouteOptions {
  // affects results; equal on all ranks
  int experts = 1;
  int choices = 1;             // of a token
  double capacity_factor = 0;  // 0: nothing is dropped
  // affects speed only
  int slices = 1;
};
// Throws UsageError of one sentence.
void check(const RouteOptions& options);

// Places of an expert for so many tokens. REQUIRES: a capacity factor.
std::int64_t capacity_of(const RouteOptions& options, std::int64_t tokens);

struct Route {
  // Of each token's each choice: its row among those of all slices, one slice after the other; -1: dropped.
  std::vector<std::int64_t> row_of_copy;
  std::vector<std::int64_t> token_of_row;  // -1: an empty place
  std::vector<std::int64_t> counts;        // rows of each slice and expert: [slice * experts + expert]
  std::vector<std::int64_t> chosen;        // by how many copies, of each expert; dropped ones too
  std::int64_t num_dropped = 0;

  std::int64_t num_rows() const { return static_cast<std::int64_t>(token_of_row.size()); }
};

// `experts`: of each token's each choice. Throws UsageError for an expert that is not there.
Route route(std::span<const std::int64_t> experts, const RouteOptions& options);

// Rows of each slice of so many places: of one expert and source.
std::vector<std::int64_t> rows_of_slices(std::int64_t places, int slices);

// Rows that arrive are ordered by source, then by expert. `counts`: rows of [source * experts + expert].
// Where the row that is at a place when they are ordered by expert, then by source, stands among those that
// arrived.
std::vector<std::int64_t> by_expert(std::span<const std::int64_t> counts, std::int64_t experts);

}  // namespace weft
