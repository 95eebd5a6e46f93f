// What a rank of a simulated run waited for in its steps: for exchanges that are under way, or for other ranks that
// have not come so far. In virtual time all ranks are in one place, so that it can be told when each had started an
// exchange.
//
// Waiting for an exchange that is under way costs nothing where the rank would have waited for others right behind it:
// the last stage of a pipeline waits for its sum of gradients, and then for the first stage. So what a rank waits between
// two pieces of forward or backward is looked at together: it is walked again as if every exchange ended when the last
// of the other ranks had started it. By as much as the rank comes later it waited for what was under way; the rest it
// waited for others. (An update gives nothing to others, so it lies in between.)
//
// Ranks of one stage do the same: what has kept one of them until it starts the next exchange has kept the others,
// too, and so has an exchange those in it that waited for it. So these are taken to come earlier by as much as the rank
// itself, if they have waited for so long since they gave something.
//
// Thread: the world's.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "weft/clock.h"

namespace weft {

// An exchange of a step, and of a micro-batch where it happens in each: the same on all of its ranks.
struct Occasion {
  std::uint64_t group = 0;
  std::uint32_t slot = 0;
  std::int64_t step = 0;
  int micro_batch = 0;
  friend auto operator<=>(const Occasion&, const Occasion&) = default;
};

// When ranks have started their exchanges, waited, and given something to others.
class Starts {
 public:
  struct Start {
    int rank = 0;
    Time at{};
  };
  // `stages`: of each rank.
  explicit Starts(std::vector<int> stages) : stages_(std::move(stages)), lines_(stages_.size()) {}

  // Those of a rank come in order of time, but for starts.
  void add(const Occasion& what, const Start& start) { of_[what].push_back(start); }
  void add_wait(int rank, Time from, Time to) { line(rank).waits.push_back({from, to}); }
  void add_gift(int rank, Time at) { line(rank).gifts.push_back(at); }

  const std::vector<Start>& of(const Occasion& what) const { return of_.at(what); }
  bool same_stage(int a, int b) const {
    return stages_[static_cast<std::size_t>(a)] == stages_[static_cast<std::size_t>(b)];
  }
  // How long it had waited then since it gave something.
  Time waited_before(const Start& start) const;

 private:
  struct Wait {
    Time from{}, to{};
  };
  struct Line {
    std::vector<Wait> waits;
    std::vector<Time> gifts;
  };
  Line& line(int rank) { return lines_[static_cast<std::size_t>(rank)]; }

  std::vector<int> stages_;
  std::vector<Line> lines_;  // of each rank
  std::map<Occasion, std::vector<Start>> of_;
};

// Seconds of a rank in a step.
struct StepWaits {
  struct Waited {
    double seconds = 0;
    double for_others = 0;  // of them, until the last of the other ranks had started the exchange
  };
  double computed = 0;  // by the model, as its outline says: without what stood still or was copied meanwhile
  std::map<std::string, Waited, std::less<>> waited;  // by strategy (Strategies::strategy_of)
  // The same seconds, as they are told apart above.
  double under_way = 0, for_others = 0;
};

// The mean of some steps, or of some ranks. REQUIRES: at least one.
StepWaits mean_of(const std::vector<StepWaits>& all);

// Of one rank.
class WaitAccount {
 public:
  WaitAccount(Starts& starts, int rank) : starts_(starts), rank_(rank) {}  // `starts`: of all ranks

  void begin_step() { steps_.emplace_back(); }
  void computed(double seconds) { steps_.back().computed += seconds; }
  // Something to others from here on: what was waited for before has delayed them.
  void gives(Time now) {
    stretch_.reset();
    starts_.add_gift(rank_, now);
  }
  void waited(std::string_view strategy, const Occasion& what, Time started, Time from, Time to);
  // Of each step. REQUIRES: every exchange was awaited by all of its ranks.
  std::vector<StepWaits> take() const;

 private:
  struct Wait {
    std::size_t step = 0, stretch = 0;
    std::string strategy;
    Occasion what;
    Time from{}, to{};
  };

  // From where the rank that is walked again goes on, which comes to a wait `late` earlier than it did.
  Time all_there(const Wait& wait, Time late, const std::set<int>& kept) const;

  Starts& starts_;
  const int rank_;
  std::vector<StepWaits> steps_;
  std::optional<std::size_t> stretch_;  // since something was given: its first wait that took time
  std::vector<Wait> waits_;
};

}  // namespace weft
