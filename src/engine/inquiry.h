// What a slow operation asks its group: are we in the same operation?
//
// Ranks that call different operations may each wait for a peer that waits for another, and no message ever
// meets a receive that could compare the two. So an operation that has used up half of its time sends an
// empty message to every other rank of its group, at a hop that no algorithm uses, and expects one from each.
// Its frame carries the fingerprint that the operation declared first, and the transport compares it on
// arrival as it does for all messages: on every transport alike, whoever disagrees is found out before the
// deadline.
//
// Cost: size - 1 empty messages of a rank, only for operations that are half way to a time-out. One that a
// rank sends to a peer which has already ended the operation stays unread there.
#pragma once

#include <exception>
#include <vector>

#include "weft/comm.h"

namespace weft {

class Inquiry {
 public:
  // Asks at once. `comm`: the group; `about`: the operation, which outlives this.
  Inquiry(const Comm& comm, const Operation& about);

  // The first answer that disagrees, as a TransportError(mismatch) that names the peer; null if there is
  // none.
  std::exception_ptr disagreement() const;
  // World ranks that have not answered: they are not in this operation yet, or have ended it.
  std::vector<int> silent() const;

 private:
  struct Asked {
    int world_rank = 0;
    Transfer answer;
    Transfer question;
  };
  Operation operation_;  // outlives the transfers
  std::vector<Asked> asked_;
};

}  // namespace weft
