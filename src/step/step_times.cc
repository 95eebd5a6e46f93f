#include "step/step_times.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/statistics.h"

namespace weft {

namespace {

template <class Times, class F>
void for_each_number(Times& times, F&& f) {
  for (auto* values : {&times.forward, &times.backward, &times.update, &times.ready}) {
    for (auto& value : *values) f(value);
  }
  f(times.waited);
  f(times.handed_over);
  f(times.other);
}

}  // namespace

double StepTimes::computed() const {
  double sum = 0;
  for (const std::vector<double>* values : {&forward, &backward, &update})
    sum = std::accumulate(values->begin(), values->end(), sum);
  return sum;
}

std::vector<double> numbers_of(const StepTimes& times) {
  std::vector<double> out;
  for_each_number(times, [&out](double value) { out.push_back(value); });
  return out;
}

StepTimes with_numbers(StepTimes like, std::span<const double> numbers) {
  std::size_t i = 0;
  for_each_number(like, [&](double& value) { value = numbers[i++]; });
  return like;
}

StepTimes median_of(std::span<const StepTimes> steps) {
  std::vector<std::vector<double>> of_number(numbers_of(steps.front()).size());
  for (const StepTimes& step : steps) {
    const std::vector<double> numbers = numbers_of(step);
    for (std::size_t i = 0; i < numbers.size(); ++i) of_number[i].push_back(numbers[i]);
  }
  std::vector<double> medians;
  medians.reserve(of_number.size());
  for (std::vector<double>& values : of_number) medians.push_back(median(std::move(values)));
  return with_numbers(steps.front(), medians);
}

StepClock::StepClock(const ModelShape& shape) : blocks_(shape.blocks.size()), experts_(shape.experts) {
  for (std::size_t p = 0; p < shape.parameters.size(); ++p)
    block_of_.push_back(static_cast<std::size_t>(shape.block_of(static_cast<int>(p))));
}

void StepClock::begin(const Table& table) {
  settles_ = table.phase == Phase::settle;
  if (settles_) return;
  times_ = {};
  for (std::vector<double>* values : {&times_.forward, &times_.backward, &times_.update})
    values->assign(blocks_, 0);
  times_.steady = table.phase == Phase::steady;
  ready_seconds_.assign(block_of_.size(), -1);
  last_micro_batch_ = expert_slices_ = 0;
  in_backward_ = false;
  for (const Move& move : table.moves) {
    if (move.kind == Move::Kind::compute)
      last_micro_batch_ = std::max(last_micro_batch_, move.piece.micro_batch);
  }
}

void StepClock::computed(const Piece& piece, Time now) {
  if (settles_) return;
  in_backward_ = goes_back(piece.work) || adds_gradients(piece.work);
  const double took = seconds(now - piece_began_) - handed_in_piece_;
  const auto block = static_cast<std::size_t>(piece.block);
  const auto is_slice = [&](const ExpertShape& layer) {
    return layer.block == piece.block && piece.part >= layer.first_slice && piece.part < layer.merge();
  };
  if (piece.work == Work::forward && std::ranges::any_of(experts_, is_slice)) {
    times_.expert_slice += took;
    ++expert_slices_;
  }
  switch (piece.work) {
    case Work::update:
      times_.update[block] += took;
      break;
    case Work::forward:
      (piece.micro_batch == 0 ? times_.forward[block] : times_.forward.back()) += took;
      break;
    case Work::backward:
    case Work::input_gradient:
    case Work::weight_gradient:
      (piece.micro_batch == last_micro_batch_ ? times_.backward[block] : times_.forward.back()) += took;
      break;
  }
}

// Inside of the backward of the block that it belongs to.
void StepClock::handed_over(int parameter, Time from, Time to) {
  const auto p = static_cast<std::size_t>(parameter);
  ready_seconds_[p] = times_.backward[block_of_[p]] + seconds(from - piece_began_) - handed_in_piece_;
  handed_in_piece_ += seconds(to - from);
  times_.handed_over += seconds(to - from);
}

void StepClock::waited(bool between_parts, Time from, Time to) {
  if (settles_) return;
  const double took = seconds(to - from);
  times_.waited += took;
  if (between_parts) (in_backward_ ? times_.waited_backward : times_.waited_forward) += took;
}

void StepClock::end(Time now) {
  const Time before = std::exchange(ended_, now);
  if (settles_) return;
  if (expert_slices_ > 0) times_.expert_slice /= expert_slices_;
  if (times_.steady) {
    const double named = times_.computed() + times_.waited + times_.handed_over;
    times_.other = std::max(0.0, seconds(now - before) - named);
  }
  for (std::size_t p = 0; p < ready_seconds_.size(); ++p) {
    const double whole = times_.backward[block_of_[p]];
    const bool known = ready_seconds_[p] >= 0 && whole > 0;
    times_.ready.push_back(known ? std::clamp(ready_seconds_[p] / whole, 0.0, 1.0) : 1);
  }
}

}  // namespace weft
