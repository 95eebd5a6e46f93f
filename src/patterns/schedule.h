// The order in which a rank computes the pieces of one training step.
//
// A model is a list of blocks, a block a list of parts. A piece is the forward or the backward of one part
// for one micro-batch, or the update of a block. A backward may be cut in two: gradients of what the part took,
// and those of its parameters, which nobody else waits for. What is exchanged around the pieces is not said
// here: step/weaver.h puts it there.
//
//   whole_batch   every rank has the whole model: each micro-batch forward through all parts, then backward
//                 through all of them in reverse, before the next one begins
//
// Orders of ranks that have a stage of the model each: patterns/pipeline.h.
// Updates are not in these orders: when a block is updated depends on what it waits for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace weft {

enum class Work : std::uint8_t { forward, backward, input_gradient, weight_gradient, update };

// What the part took has its gradient behind it.
constexpr bool goes_back(Work work) { return work == Work::backward || work == Work::input_gradient; }
// Gradients of parameters grow by it.
constexpr bool adds_gradients(Work work) { return work == Work::backward || work == Work::weight_gradient; }

struct Piece {
  Work work = Work::forward;
  int block = 0;
  int part = 0;         // of the block; 0 for an update
  int micro_batch = 0;  // 0 for an update
  friend constexpr bool operator==(const Piece&, const Piece&) = default;
};

// `parts`: of each block. REQUIRES: at least one micro-batch.
constexpr std::vector<Piece> whole_batch(std::span<const int> parts, int micro_batches) {
  std::vector<Piece> order;
  for (int m = 0; m < micro_batches; ++m) {
    const std::size_t first = order.size();
    for (std::size_t b = 0; b < parts.size(); ++b) {
      for (int p = 0; p < parts[b]; ++p) order.push_back({Work::forward, static_cast<int>(b), p, m});
    }
    for (std::size_t i = order.size(); i-- > first;) {
      const Piece& forward = order[i];
      order.push_back({Work::backward, forward.block, forward.part, m});
    }
  }
  return order;
}

namespace detail {

// Every part goes forward and backward once a micro-batch, backward comes after the forward of its own part
// and after the backward of every part behind it, and micro-batches do not mix.
constexpr bool is_whole_batch(std::span<const int> parts, int micro_batches) {
  const std::vector<Piece> order = whole_batch(parts, micro_batches);
  std::size_t in_one = 0;
  for (const int count : parts) in_one += static_cast<std::size_t>(count);
  if (order.size() != 2 * in_one * static_cast<std::size_t>(micro_batches)) return false;
  for (std::size_t i = 0; i < order.size(); ++i) {
    const std::size_t place = i % (2 * in_one);
    const Piece& twin = order[i - place + (2 * in_one - 1 - place)];  // its mirror in the same micro-batch
    const bool forward = place < in_one;
    if ((order[i].work == Work::forward) != forward) return false;
    if (order[i].block != twin.block || order[i].part != twin.part) return false;
    if (order[i].micro_batch != static_cast<int>(i / (2 * in_one))) return false;
    if (place == 0 || place >= in_one) continue;
    const Piece& before = order[i - 1];
    const bool next_part = order[i].block == before.block && order[i].part == before.part + 1;
    if (!next_part && !(order[i].block > before.block && order[i].part == 0)) return false;
  }
  return true;
}

inline constexpr int kSomeParts[] = {1, 2, 2, 1};
inline constexpr int kOnePart[] = {1};
static_assert(is_whole_batch(kSomeParts, 1) && is_whole_batch(kSomeParts, 3) && is_whole_batch(kOnePart, 2));
static_assert(whole_batch(kOnePart, 1) ==
              std::vector<Piece>{{Work::forward, 0, 0, 0}, {Work::backward, 0, 0, 0}});

}  // namespace detail

}  // namespace weft
