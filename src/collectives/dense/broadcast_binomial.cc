// Binomial broadcast, for short vectors: the number of ranks that have the data doubles with every hop. Ranks
// are counted from the root, v = rank - root.
//   Step 1  receive each piece from the parent, at hop floor(log2 v)
//   Step 2  give it to the children v + 2^h of the later hops h
// Rounds: ceil(log2 size) at the root. Bytes sent by the root: n ceil(log2 size).
#include "collectives/pieces.h"
#include "collectives/registry.h"
#include "patterns/bruck.h"
#include "patterns/tree.h"

namespace weft {

Task<void> broadcast_binomial(Comm comm, Dense data, int root, std::size_t micro_op_bytes) {
  const int size = comm.size();
  const int v = comm.before(root);
  const int hops = log2_ceil(size);
  const auto rank_of = [root, size](int w) { return (w + root) % size; };
  const Pieces pieces(data, micro_op_bytes);
  TransferQueue receives(comm);
  TransferQueue sends(comm);
  for (std::int64_t i = 0; i < pieces.size() && v > 0; ++i) {
    receives.add(comm.recv(rank_of(tree_parent(v)), static_cast<std::uint32_t>(tree_hop(v)), pieces[i]));
  }
  for (std::int64_t i = 0; i < pieces.size(); ++i) {
    if (!receives.empty()) co_await receives.next();      // Step 1
    for (int hop = tree_hop(v) + 1; hop < hops; ++hop) {  // Step 2
      const int child = tree_child(v, hop, size);
      if (child >= 0) sends.add(comm.send(rank_of(child), static_cast<std::uint32_t>(hop), pieces[i]));
    }
  }
  while (!sends.empty()) co_await sends.next();
}

}  // namespace weft
