#include "measure/turns.h"

#include <algorithm>
#include <utility>

#include "weft/error.h"

namespace weft {

namespace {

constexpr std::int64_t kLongestTurn = 5;  // measured steps
constexpr std::int64_t kFewestRounds = 3;

}  // namespace

bool Turns::ends_behind(std::int64_t step) const {
  return std::find(ends.begin(), ends.end(), step + 1) != ends.end();
}

Turns plan_turns(std::int64_t warmup, std::int64_t wanted, bool drop_last) {
  const std::int64_t rounds =
      std::max(std::min(wanted, kFewestRounds), (wanted + kLongestTurn - 1) / kLongestTurn);
  Turns turns;
  for (std::int64_t r = 0; r < rounds; ++r) {
    const std::int64_t mine = wanted * (r + 1) / rounds - wanted * r / rounds;
    const auto add = [&](std::int64_t steps, bool measured) {
      turns.measured.insert(turns.measured.end(), static_cast<std::size_t>(steps), measured);
    };
    add(r == 0 ? warmup : 1, false);
    add(mine, true);
    if (drop_last) add(1, false);
    turns.ends.push_back(static_cast<std::int64_t>(turns.measured.size()));
  }
  return turns;
}

void Lane::before_step(std::int64_t step) {
  const Lock lock(mutex_);
  if (step >= end_ && !closed_) {
    ++arrived_;
    changed_.notify_all();
    while (step >= end_ && !closed_) lock.wait(changed_);
  }
  if (!closed_) return;
  if (cause_) std::rethrow_exception(cause_);
  throw Error("the comparison was ended before step " + std::to_string(step));
}

void Lane::run_until(std::int64_t end) {
  const Lock lock(mutex_);
  while (!ready()) lock.wait(changed_);
  if (end <= end_ || closed_) return;
  end_ = end;
  arrived_ = 0;
  changed_.notify_all();
  while (!ready()) lock.wait(changed_);
}

void Lane::close(std::exception_ptr cause) {
  const Lock lock(mutex_);
  if (!std::exchange(closed_, true)) cause_ = std::move(cause);
  changed_.notify_all();
}

}  // namespace weft
