// The verifier of tables: what must hold before anything is run, checked once for the distinct tables of a
// plan.
//
// The tables are walked as training does: first, steady three times, settle, first, settle; all ranks side
// by side, each wait held until what it names can have ended. One sentence for each breach of:
//   1  every exchange has a slot of its own in its group, and all members of the group have it: collectives
//      on all of them, with the same members, codec and class; every send with its receive
//   2  an exchange is started once in every step (in all but the first, where it is only started ahead) and
//      awaited once. A wait ends when everybody whom the exchange needs has started it; so does that for a
//      send. Ranks do not wait for each other in a circle. What is announced starts, once for each time
//   3  every part goes forward and backward once in each micro-batch: forward after whatever it takes was
//      given, by a part or by an exchange that was awaited, and its parameters had their last update;
//      backward after all readers of what it gives, here and elsewhere; whole, or in halves, the gradient of
//      its input first
//   4  an exchange reads what is there: an activation that was given, a gradient when the backward of the
//      parameter's last user in the last micro-batch is over and before the next step adds to it. Nobody
//      touches a parameter or an activation that an exchange under way writes, or writes what it reads
//   5  the gradient of every parameter is written by one exchange (by none, perhaps, on a rank that is
//      alone). An update comes when that has ended (and, where updates wait for it, the verdict is known);
//      every parameter is updated once a step
#pragma once

#include <span>
#include <string>
#include <vector>

#include "step/move.h"
#include "weft/train/shape.h"

namespace weft {

struct VerifiedRank {
  const Tables* tables = nullptr;
  const ModelShape* shape = nullptr;
  int micro_batches = 1;
  int verdict = -1;  // the exchange that updates wait for; -1: none
};

struct Verification {
  std::vector<std::string> breaches;  // empty: the tables hold
  int distinct = 0;                   // ranks that differ in their tables
};

// All ranks of a world, in order.
Verification verify(std::span<const VerifiedRank> ranks);
// One rank alone: its peers are taken to do what it waits for.
Verification verify_alone(const VerifiedRank& rank);

}  // namespace weft
