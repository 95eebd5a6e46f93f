// Dissemination barrier: after hop h a rank knows that the 2^(h+1) ranks up to itself have entered.
//   Step 1  for gap = 1, 2, 4 ..: tell rank + gap, wait for rank - gap
// Rounds: ceil(log2 size). Bytes: none, messages are empty. Hensgen, Finkel and Manber, IJPP 17(1), 1988.
#include "collectives/registry.h"
#include "patterns/bruck.h"

namespace weft {

Task<void> barrier_dissemination(Comm comm) {
  for (const Hop& hop : gather_hops(comm.size())) {
    Transfer heard = comm.recv(comm.before(hop.gap), hop.number, std::span<std::byte>());
    Transfer told = comm.send(comm.after(hop.gap), hop.number, std::span<const std::byte>());
    co_await heard;
    co_await told;
  }
}

}  // namespace weft
