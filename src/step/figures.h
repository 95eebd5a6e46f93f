// The figures of the link as state: a job that goes on from a checkpoint chooses the algorithms that it chose
// before, whatever is measured now, and so has the same bits.
//
//   figures   restart   what algorithms are chosen by (weft/comm.h). On another number of ranks the choice is
//                       another anyway: the job's own figures stay
//
// Thread: one at a time.
#pragma once

#include "state/registry.h"
#include "weft/engine.h"

namespace weft {

// Algorithms of operations that are submitted from now on are chosen by `figures`. The endpoint belongs to
// the engine's thread: it is done there.
Ticket plan_by(Engine& engine, const LinkCost& figures);

class LinkFigures {
 public:
  static constexpr const char* kOwner = "link";

  LinkFigures(Engine& engine, const Comm& world, StateRegistry& registry);  // they outlive it
  ~LinkFigures();
  LinkFigures(const LinkFigures&) = delete;
  LinkFigures& operator=(const LinkFigures&) = delete;

 private:
  LiveRow row();
  LinkCost current() const { return planned_.valid() && !planned_.done() ? loaded_ : world_.cost(); }

  Engine& engine_;
  Comm world_;
  StateRegistry& registry_;
  const LinkCost own_;  // of the job's start
  LinkCost loaded_;
  Ticket planned_;  // that these are gone by
};

}  // namespace weft
