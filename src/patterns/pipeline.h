// Who computes what when in a pipeline: stage p of P has a part of the model's blocks, and every micro-batch goes
// through all stages and back. With v chunks a stage has v separate runs of blocks: chunk c of P v is on stage
// c mod P.
//
//   gpipe         all forwards, then all backwards
//   1f1b          stage p goes forward P-1-p times, then forward and backward in turns, then backward: at most P-p
//                 micro-batches are under way on it. With a doubled warm-up it goes forward 2 (P-1-p) times first,
//                 so that what travels in the steady part is awaited nowhere, and holds about twice as many
//   interleaved   1f1b over chunks, P micro-batches of one chunk at a time; M is a multiple of P
//   zb-h1         1f1b with backward cut in two: gradients of inputs at once, those of weights p micro-batches
//                 behind them on stage p, so that they fill what would be waited
//
// Idle time of a step where sending is free, every micro-batch takes f forward, b for gradients of inputs and w for
// those of weights, and M >= P:  gpipe and 1f1b (P-1)(f+b+w), interleaved that over v, zb-h1 (P-1)(f+b-w).
//
// Epilogue: backward messages whose sender has no forward left behind the backward that makes them. Of 1f1b these
// are the last P-p of stage p: micro-batches j >= M-P+p. (Huang et al. 2019; Narayanan et al. 2021; Qi et al.
// 2023; Song et al. 2023.)
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "patterns/schedule.h"

namespace weft {

enum class PipelineSchedule : std::uint8_t { gpipe, one_f_one_b, interleaved, zb_h1 };
inline constexpr std::string_view kPipelineSchedules[] = {"gpipe", "1f1b", "interleaved", "zb-h1"};
constexpr std::string_view name_of(PipelineSchedule schedule) {
  return kPipelineSchedules[static_cast<std::size_t>(schedule)];
}

struct PipelineShape {
  PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
  int stages = 1;
  int chunks = 1;  // of a stage; more than one only interleaved
  int micro_batches = 1;
  bool doubled = false;  // the warm-up, of 1f1b and zb-h1

  constexpr int all_chunks() const { return stages * chunks; }
  constexpr int stage_of(int chunk) const { return chunk % stages; }
};

// All parts of a chunk, for one micro-batch.
struct StageItem {
  Work work = Work::forward;
  int chunk = 0;  // of the model's
  int micro_batch = 0;
  friend constexpr bool operator==(const StageItem&, const StageItem&) = default;
};

constexpr int warm_up_of(const PipelineShape& shape, int stage) {
  const int behind = shape.stages - 1 - stage;
  const int all = shape.micro_batches * shape.chunks;
  switch (shape.schedule) {
    case PipelineSchedule::gpipe:
      return all;
    case PipelineSchedule::one_f_one_b:
    case PipelineSchedule::zb_h1:
      return std::min(all, shape.doubled ? 2 * behind : behind);
    case PipelineSchedule::interleaved:
      return std::min(all, 2 * behind + (shape.chunks - 1) * shape.stages);
  }
  return 0;
}

// REQUIRES: micro_batches is a multiple of stages where it is interleaved.
constexpr std::vector<StageItem> pipeline_order(const PipelineShape& shape, int stage) {
  const int all = shape.micro_batches * shape.chunks, group = shape.stages * shape.chunks;
  const bool interleaved = shape.schedule == PipelineSchedule::interleaved;
  const bool splits = shape.schedule == PipelineSchedule::zb_h1;
  const auto item = [&](Work work, int i) -> StageItem {
    if (!interleaved) return {work, stage, i};
    const int of_group = i % group / shape.stages;
    const int chunk = work == Work::forward ? of_group : shape.chunks - 1 - of_group;
    return {work, chunk * shape.stages + stage, i / group * shape.stages + i % shape.stages};
  };
  const int warm_up = warm_up_of(shape, stage);
  std::vector<StageItem> order;
  order.reserve(static_cast<std::size_t>(all) * (splits ? 3 : 2));
  for (int i = 0; i < warm_up; ++i) order.push_back(item(Work::forward, i));
  for (int i = 0; i < all; ++i) {
    if (warm_up + i < all) order.push_back(item(Work::forward, warm_up + i));
    order.push_back(item(splits ? Work::input_gradient : Work::backward, i));
    if (splits && i >= stage) order.push_back(item(Work::weight_gradient, i - stage));
  }
  for (int i = std::max(0, all - stage); splits && i < all; ++i)
    order.push_back(item(Work::weight_gradient, i));
  return order;
}

// Whether what goes back from that chunk to the one before it is in the epilogue.
constexpr bool in_epilogue(const PipelineShape& shape, int chunk, int micro_batch) {
  const std::vector<StageItem> order = pipeline_order(shape, shape.stage_of(chunk));
  bool made = false;
  for (const StageItem& item : order) {
    if (made && item.work == Work::forward) return false;
    made = made || (goes_back(item.work) && item.chunk == chunk && item.micro_batch == micro_batch);
  }
  return made;
}

// Micro-batches (of a chunk each) whose activations a stage holds at most.
constexpr int most_held(const PipelineShape& shape, int stage) {
  int held = 0, most = 0;
  for (const StageItem& item : pipeline_order(shape, stage)) {
    held += item.work == Work::forward ? 1 : adds_gradients(item.work) ? -1 : 0;
    most = std::max(most, held);
  }
  return most;
}

// Which blocks a chunk has: [first, first + count) of so many, the first ones one more where it does not divide.
struct ChunkBlocks {
  int first = 0, count = 0;
  friend constexpr bool operator==(const ChunkBlocks&, const ChunkBlocks&) = default;
};
constexpr ChunkBlocks even_chunk(int blocks, int chunks, int chunk) {
  const int each = blocks / chunks, more = blocks % chunks;
  return {chunk * each + std::min(chunk, more), each + (chunk < more ? 1 : 0)};
}

namespace detail {

// Every chunk of the stage goes forward and back once in every micro-batch, back after forward, weights behind
// inputs.
constexpr bool is_whole(const PipelineShape& shape) {
  for (int stage = 0; stage < shape.stages; ++stage) {
    const std::vector<StageItem> order = pipeline_order(shape, stage);
    const bool splits = shape.schedule == PipelineSchedule::zb_h1;
    if (order.size() != static_cast<std::size_t>(shape.micro_batches) *
                            static_cast<std::size_t>(shape.chunks) * (splits ? 3 : 2))
      return false;
    for (int k = 0; k < shape.chunks; ++k) {
      for (int m = 0; m < shape.micro_batches; ++m) {
        int done = 0;
        for (const StageItem& item : order) {
          if (item.chunk != k * shape.stages + stage || item.micro_batch != m) continue;
          const int expected = item.work == Work::forward ? 0 : item.work == Work::weight_gradient ? 2 : 1;
          if (done != expected) return false;
          ++done;
        }
        if (done != (splits ? 3 : 2)) return false;
      }
    }
  }
  return true;
}

// The last P-p messages of each stage, or all.
constexpr bool has_papers_epilogue(int stages, int micro_batches) {
  const PipelineShape shape{.stages = stages, .micro_batches = micro_batches};
  for (int p = 1; p < stages; ++p) {
    for (int j = 0; j < micro_batches; ++j) {
      if (in_epilogue(shape, p, j) != (j >= micro_batches - stages + p)) return false;
    }
  }
  return true;
}

static_assert(is_whole({PipelineSchedule::gpipe, 3, 1, 4}) &&
              is_whole({PipelineSchedule::one_f_one_b, 4, 1, 2}) &&
              is_whole({PipelineSchedule::one_f_one_b, 4, 1, 7, true}) &&
              is_whole({PipelineSchedule::interleaved, 2, 3, 4}) &&
              is_whole({PipelineSchedule::zb_h1, 4, 1, 6}) && is_whole({PipelineSchedule::zb_h1, 4, 1, 2}));
static_assert(has_papers_epilogue(4, 8) && has_papers_epilogue(4, 4) && has_papers_epilogue(4, 2) &&
              has_papers_epilogue(2, 1));
static_assert(most_held({.stages = 4, .micro_batches = 8}, 0) == 4 &&
              most_held({.stages = 4, .micro_batches = 8}, 3) == 1);
static_assert(even_chunk(7, 3, 0) == ChunkBlocks{0, 3} && even_chunk(7, 3, 2) == ChunkBlocks{5, 2});

}  // namespace detail

}  // namespace weft
