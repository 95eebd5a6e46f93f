// The verifier of tables: what must hold before anything is run, checked once for the distinct tables of a
// plan.
//
// The tables are walked as training does: first, steady three times, settle, first, settle; all ranks side
// by side, each wait held until what it names can have arrived. One sentence for each breach of:
//   1  an exchange that is awaited was started, in the step that the wait names, and by everybody whom it
//      needs; nothing is started twice or left without a wait; ranks do not wait for each other in a circle
//   2  every send has its receive, in the same group and slot, with the same codec; ranks of one collective
//      agree on codec and class
//   3  a part goes forward after whatever it takes was given and its parameters had their last update, and
//      backward once, after all readers of what it gives
//   4  a gradient is read when the backward of the parameter's last user in the last micro-batch is over
//   5  an update comes when every exchange that writes a gradient of its block has ended (and, where updates
//      wait for it, the verdict is known); every parameter is updated once a step
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

// All ranks of a world, in order. Empty: they hold.
std::vector<std::string> verify(std::span<const VerifiedRank> ranks);
// One rank alone, of a plan whose exchanges are collectives: its peers are taken to have the same table.
std::vector<std::string> verify_alone(const VerifiedRank& rank);

}  // namespace weft
