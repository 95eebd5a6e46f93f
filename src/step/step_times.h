// How long the pieces of a step took the rank that walks it, told by the walker for every driver alike: from
// them a run can say what it would take elsewhere (workload/outline.h).
//
// Waiting and the hand-over of gradients are in no piece. Of several micro-batches, only the last one's
// backward lets gradients go: whatever lies between the first forward and that backward counts as the last
// block's forward, which is where it stands in a step of one micro-batch.
#pragma once

#include <span>
#include <vector>

#include "step/move.h"
#include "weft/clock.h"
#include "weft/train/shape.h"

namespace weft {

struct StepTimes {
  std::vector<double> forward, backward, update;  // seconds of each block
  std::vector<double> ready;  // of each parameter: share of its block's backward after which its gradient is
                              // there; 1 where it has none
  double waited = 0;          // for exchanges
  double waited_forward = 0, waited_backward = 0;  // of it: for what travels between parts
  double handed_over = 0;                          // to the strategies, inside of backward
  double other = 0;         // all else since the step before ended; 0 where nothing was under way then
  bool steady = false;      // the step before was under way
  double expert_slice = 0;  // of a slice of tokens: forward of its experts, on the mean; 0: there are none

  double computed() const;  // by the blocks
};

// Every number of `times`, in an order that depends on the model alone, and back: for means over ranks.
std::vector<double> numbers_of(const StepTimes& times);
StepTimes with_numbers(StepTimes like, std::span<const double> numbers);

// Each number's median. REQUIRES: at least one step, all of one model.
StepTimes median_of(std::span<const StepTimes> steps);

// Thread: one at a time, that of the driver.
class StepClock {
 public:
  explicit StepClock(const ModelShape& shape);

  void begin(const Table& table);
  void computing(Time now) { piece_began_ = now, handed_in_piece_ = 0; }
  void computed(const Piece& piece, Time now);
  void handed_over(int parameter, Time from, Time to);
  void waited(bool between_parts, Time from, Time to);
  void end(Time now);

  // Of the step that was walked last; settling is none.
  const StepTimes& times() const { return times_; }

 private:
  std::size_t blocks_;
  std::vector<std::size_t> block_of_;  // of each parameter
  std::vector<ExpertShape> experts_;
  StepTimes times_;
  std::vector<double> ready_seconds_;  // of each parameter: in its block's backward; negative: not yet
  int last_micro_batch_ = 0, expert_slices_ = 0;
  bool settles_ = false, in_backward_ = false;
  Time piece_began_{}, ended_{};  // ended_: the table that was walked last
  double handed_in_piece_ = 0;
};

}  // namespace weft
