// Broadcast of long vectors as a scatter and an all-gather: the root sends each block once, and then all
// ranks send. Ranks are counted from the root, v = rank - root; block v belongs to v.
//   Step 1  for gap = 2^(L-1) .. 1: who has blocks v .. gives the upper part, v+gap .., to v + gap
//   Step 2  Bruck all-gather of the blocks (all_gather_bruck.cc)
// Rounds: 2 L at the root, L = ceil(log2 size). Bytes sent by the root: 2 n (size-1)/size.
// van de Geijn's; Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005.
#include "collectives/dense/bruck_gather.h"
#include "collectives/pieces.h"
#include "collectives/registry.h"
#include "patterns/bruck.h"
#include "patterns/tree.h"

namespace weft {

Task<void> broadcast_scatter_allgather(Comm comm, Dense data, int root, std::size_t micro_op_bytes) {
  const int size = comm.size();
  const int v = comm.before(root);
  const Blocks blocks(size, data.count);
  const int hops = log2_ceil(size);
  TransferQueue transfers(comm);

  // Step 1
  for (int hop = 0; hop < hops; ++hop) {
    const int gap = 1 << (hops - 1 - hop);
    const auto number = static_cast<std::uint32_t>(hop);
    const bool sends = scatter_sends(v, gap, size);
    if (!sends && !scatter_receives(v, gap)) continue;
    const int first = sends ? v + gap : v;
    for (const Dense& run : Bag(data, blocks, first, scatter_count(first, gap, size))) {
      const Pieces pieces(run, micro_op_bytes);
      for (std::int64_t i = 0; i < pieces.size(); ++i) {
        if (sends)
          transfers.add(comm.send(comm.after(gap), number, pieces[i]));
        else
          transfers.add(comm.recv(comm.before(gap), number, pieces[i]));
      }
    }
    while (!transfers.empty()) co_await transfers.next();
  }

  // Step 2
  const Comm later = comm.hops_from(static_cast<std::uint32_t>(hops));
  co_await bruck_gather(later, data, blocks, v, micro_op_bytes);
}

}  // namespace weft
