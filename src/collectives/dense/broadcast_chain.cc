// Chain broadcast, for very long vectors: every rank passes on each piece as soon as it has it. Ranks are
// counted from the root, v = rank - root.
//   Step 1  receive each piece from v - 1, at hop v - 1
//   Step 2  give it to v + 1, at hop v
// Rounds of a rank: 2 (it receives and sends at the same time; the first piece takes size-1 hops to the end).
// Bytes sent by a rank: n.
#include "collectives/pieces.h"
#include "collectives/registry.h"

namespace weft {

Task<void> broadcast_chain(Comm comm, Dense data, int root, std::size_t micro_op_bytes) {
  const int v = comm.before(root);
  const auto hop = static_cast<std::uint32_t>(v);
  const Pieces pieces(data, micro_op_bytes);
  TransferQueue receives(comm);
  TransferQueue sends(comm);
  for (std::int64_t i = 0; i < pieces.size() && v > 0; ++i)
    receives.add(comm.recv(comm.before(1), hop - 1, pieces[i]));
  for (std::int64_t i = 0; i < pieces.size(); ++i) {
    if (!receives.empty()) co_await receives.next();                               // Step 1
    if (v + 1 < comm.size()) sends.add(comm.send(comm.after(1), hop, pieces[i]));  // Step 2
  }
  while (!sends.empty()) co_await sends.next();
}

}  // namespace weft
