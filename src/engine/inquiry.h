// What the ranks of a slow operation tell each other: what each of them runs, and when it last made progress.
//
// Ranks that call different operations may each wait for a peer that waits for another, and no message ever
// meets a receive that could compare the two. And a rank that waits for a subtree of others sees nothing of
// the bytes that these move. So a rank whose operation has used up half of its time sends a short note to
// every other rank of its group, at a hop that no algorithm uses, and again while it lasts. It carries
//   the fingerprint that the operation declared first, or none so far: unknown is not different
//   how long ago this rank's own part of the operation last made progress
// Only a rank's own progress is told, never what it has heard: a rumour must not keep itself alive.
//
// Cost: size - 1 notes of 16 bytes a rank and quarter of the timeout, only for operations that take longer
// than half of it. One that a rank sends to a peer which has already ended the operation stays unread there.
#pragma once

#include <array>
#include <exception>
#include <vector>

#include "transports/operation.h"
#include "weft/comm.h"

namespace weft {

class Inquiry {
 public:
  // `comm`: the group; `about`: the operation, which outlives this.
  Inquiry(const Comm& comm, const Operation& about);

  // Sends a note to whoever has taken the last one. `progressed`: when this rank's part last did.
  void tell(Time now, Time progressed);
  // Takes the notes that have come.
  void listen(Time now);

  // The first rank that runs something else, as a TransportError(mismatch) that names it; null for none.
  std::exception_ptr disagreement() const;
  // World ranks that were not heard of: they are not in this operation yet, or have ended it.
  std::vector<int> silent() const;
  // When another rank last made progress, as far as it was heard here.
  Time progressed() const { return progressed_; }

 private:
  using Note = std::array<std::byte, 16>;
  struct Peer {
    int rank = 0;  // in the group
    Note coming{}, going{};
    Transfer answer, question;
    bool heard = false;
    std::uint32_t opening = 0;  // that it has declared; 0: nothing so far
  };

  const Operation& about_;
  Operation operation_;  // outlives the transfers
  Comm comm_;            // bound to it
  std::vector<Peer> peers_;
  Time progressed_{};
};

}  // namespace weft
