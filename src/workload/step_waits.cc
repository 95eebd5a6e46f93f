#include "workload/step_waits.h"

#include <algorithm>
#include <iterator>

namespace weft {

Time Starts::waited_before(const Start& start) const {
  const Line& line = lines_[static_cast<std::size_t>(start.rank)];
  const auto next = std::ranges::lower_bound(line.gifts, start.at);
  const Time since = next == line.gifts.begin() ? Time{} : *std::prev(next);
  Time out{};
  for (auto wait = std::ranges::lower_bound(line.waits, since, {}, &Wait::from);
       wait != line.waits.end() && wait->from < start.at; ++wait)
    out += std::min(wait->to, start.at) - wait->from;
  return out;
}

StepWaits mean_of(const std::vector<StepWaits>& all) {
  StepWaits out;
  const auto count = static_cast<double>(all.size());
  for (const StepWaits& one : all) {
    out.computed += one.computed / count;
    out.under_way += one.under_way / count;
    out.for_others += one.for_others / count;
    for (const auto& [strategy, waited] : one.waited) {
      StepWaits::Waited& sum = out.waited[strategy];
      sum.seconds += waited.seconds / count;
      sum.for_others += waited.for_others / count;
    }
  }
  return out;
}

void WaitAccount::waited(std::string_view strategy, const Occasion& what, Time started, Time from, Time to) {
  starts_.add(what, {rank_, started});
  if (to > from) starts_.add_wait(rank_, from, to);
  if (to == from && !stretch_) return;  // it was over before the rank could have come sooner
  if (!stretch_) stretch_ = waits_.size();
  waits_.push_back({steps_.size() - 1, *stretch_, std::string(strategy), what, from, to});
}

Time WaitAccount::all_there(const Wait& wait, Time late, const std::set<int>& kept) const {
  Time out{};
  for (const Starts::Start& start : starts_.of(wait.what)) {
    if (start.rank == rank_) continue;
    const bool with_it = starts_.same_stage(start.rank, rank_) || kept.contains(start.rank);
    const Time earlier = with_it && late > Time{} ? std::min(late, starts_.waited_before(start)) : Time{};
    out = std::max(out, start.at - earlier);
  }
  return std::min(out, wait.to);
}

std::vector<StepWaits> WaitAccount::take() const {
  std::vector<StepWaits> out = steps_;
  Time again{};        // where the rank is that is walked again
  std::set<int> kept;  // by what has kept this one in this stretch
  for (std::size_t i = 0; i < waits_.size(); ++i) {
    const Wait& wait = waits_[i];
    StepWaits& step = out[wait.step];
    StepWaits::Waited& sum = step.waited[wait.strategy];
    sum.seconds += seconds(wait.to - wait.from);
    sum.for_others += seconds(std::max(all_there(wait, Time{}, kept), wait.from) - wait.from);
    if (wait.stretch == i) {
      again = wait.from;
      kept.clear();
    } else {
      again += wait.from - waits_[i - 1].to;
    }
    const Time goes_on = std::max(again, all_there(wait, wait.from - again, kept));
    const Time for_others = goes_on - again, under_way = wait.to - wait.from - for_others;
    step.for_others += seconds(for_others);
    step.under_way += seconds(under_way);
    again = goes_on;
    if (under_way <= Time{}) continue;
    for (const Starts::Start& start : starts_.of(wait.what)) kept.insert(start.rank);
  }
  return out;
}

}  // namespace weft
