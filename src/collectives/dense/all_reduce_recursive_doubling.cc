// All-reduce by recursive doubling, for short vectors: after h exchanges of whole vectors every rank has the
// sum of 2^h ranks.
//   Step 1  each rank beyond the largest power of two (an extra) sends its vector to rank - core, which
//           folds it
//   Step 2  for h = 0, 1 ..: exchange vectors with rank XOR 2^h; the sum goes to the other of two buffers,
//           because the peer may still be reading the first
//   Step 3  the extras get the result
// Order of additions: at each exchange local + arrived. Both partners add the same two values, and a + b is
// b + a to the bit (kernels/fold.h), so all ranks end with the same bits.
// Rounds: log2(core), and 2 more if there are extras.
// Bytes sent by a rank: n log2(core), and n more where it has an extra.
// Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005.
#include <cstring>

#include "collectives/pieces.h"
#include "collectives/registry.h"
#include "kernels/fold.h"
#include "patterns/recursive_doubling.h"
#include "weft/error.h"

namespace weft {

namespace {

struct Swap {
  int partner = 0;
  std::uint32_t hop = 0;
  Reduction reduction = Reduction::sum;
  std::size_t micro_op_bytes = 0;
};

// into = mine (reduction) the partner's, without touching `mine`.
Task<void> exchange_and_fold(Comm comm, Swap swap, Dense mine, Dense into) {
  const Pieces left(mine, swap.micro_op_bytes);
  const Pieces sum(into, swap.micro_op_bytes);
  TransferQueue sends(comm);
  Dense a;
  Dense b;
  auto fold = [&](std::span<const std::byte> arrived) {
    if (arrived.size() != b.size_bytes()) {
      throw TransportError(TransportError::Kind::mismatch, comm.world_rank(swap.partner),
                           "ranks disagree about a length");
    }
    fold_two(b, a.bytes(), arrived, swap.reduction);
  };
  for (std::int64_t i = 0; i < left.size(); ++i) {
    a = left[i];
    b = sum[i];
    Transfer received =
        comm.recv_with(swap.partner, swap.hop, b.size_bytes(), fold, comm.kernels().fold(mine.dtype));
    sends.add(comm.send(swap.partner, swap.hop, left[i].bytes()));
    co_await received;
  }
  while (!sends.empty()) co_await sends.next();
}

}  // namespace

Task<void> all_reduce_recursive_doubling(Comm comm, Dense data, Reduction reduction, Shape shape) {
  const int rank = comm.rank();
  const int core = doubling_core(comm.size());
  const int extra = doubling_extra_of(rank, comm.size());
  const auto last = static_cast<std::uint32_t>(doubling_hops(comm.size()) - 1);
  const Pieces pieces(data, shape.micro_op_bytes);
  TransferQueue transfers(comm);

  // Steps 1 and 3 of an extra
  if (rank >= core) {
    for (std::int64_t i = 0; i < pieces.size(); ++i) transfers.add(comm.send(rank - core, 0, pieces[i]));
    while (!transfers.empty()) co_await transfers.next();
    for (std::int64_t i = 0; i < pieces.size(); ++i) transfers.add(comm.recv(rank - core, last, pieces[i]));
    while (!transfers.empty()) co_await transfers.next();
    co_return;
  }

  // Step 1
  for (std::int64_t i = 0; i < pieces.size() && extra >= 0; ++i) {
    transfers.add(comm.recv_fold(extra, 0, pieces[i], reduction));
  }
  while (!transfers.empty()) co_await transfers.next();

  // Step 2
  const Buffer scratch = comm.buffer(core > 1 ? data.size_bytes() : 0);
  Dense mine = data;
  Dense other(scratch.data(), data.count, data.dtype);
  for (int h = 0; h < doubling_exchanges(comm.size()); ++h) {
    const Swap swap{.partner = doubling_partner(rank, h),
                    .hop = static_cast<std::uint32_t>(h + (doubling_has_extras(comm.size()) ? 1 : 0)),
                    .reduction = reduction,
                    .micro_op_bytes = shape.micro_op_bytes};
    co_await exchange_and_fold(comm, swap, mine, other);
    std::swap(mine, other);
  }
  if (mine.data != data.data) co_await copy_bytes(comm, mine.bytes(), data.bytes());

  // Step 3
  for (std::int64_t i = 0; i < pieces.size() && extra >= 0; ++i)
    transfers.add(comm.send(extra, last, pieces[i]));
  while (!transfers.empty()) co_await transfers.next();
}

}  // namespace weft
