// Direct all-reduce: two hops, whatever the size. Where ranks share memory each value is read once, straight
// from the rank that has it.
//   Step 1  offer every rank its block: block b goes to rank b, piece by piece for all ranks in turn
//   Step 2  for each piece of the own block: add the ranks' values in rank order, then offer the sum
//           to everybody
//   Step 3  once the offers of step 1 are taken, place the sums of the other blocks
// Order of additions: ((x[0] + x[1]) + x[2]) + ..., whatever the length, so that cutting a vector elsewhere
// changes no bit. The ranks before this one are summed in a scratch piece, which stays in the cache.
// Rounds: 2. Bytes sent by a rank: n - block + (size-1) block, 2 n (size-1)/size.
#include "collectives/pieces.h"
#include "collectives/registry.h"
#include "kernels/fold.h"

namespace weft {

namespace {

constexpr std::uint32_t kOffers = 0;
constexpr std::uint32_t kSums = 1;

// own = x[0] + .. + x[me-1] + own + x[me+1] + .., as a left fold; `prefix` is as long as `own`.
Task<void> fold_in_rank_order(Comm comm, Dense own, Dense prefix, Reduction reduction) {
  const int me = comm.rank();
  if (me == 1) co_await comm.recv_fold(0, kOffers, own, reduction);  // x[1] + x[0] is x[0] + x[1] to the bit
  if (me > 1) {
    co_await comm.recv(0, kOffers, prefix);
    for (int source = 1; source < me; ++source) co_await comm.recv_fold(source, kOffers, prefix, reduction);
    fold_into(own, prefix.bytes(), reduction);
    co_await comm.charge(comm.kernels().fold(own.dtype) * static_cast<double>(own.size_bytes()));
  }
  for (int source = me + 1; source < comm.size(); ++source)
    co_await comm.recv_fold(source, kOffers, own, reduction);
}

}  // namespace

Task<void> all_reduce_direct(Comm comm, Dense data, Reduction reduction, Shape shape) {
  if (comm.size() == 1) co_return;
  const Blocks blocks(comm.size(), data.count);
  const auto pieces_of = [&](int rank) { return Pieces(block_of(data, blocks, rank), shape.micro_op_bytes); };

  // Step 1
  TransferQueue offers(comm);
  const std::int64_t most_pieces = pieces_of(0).size();
  for (std::int64_t i = 0; i < most_pieces; ++i) {
    for (int gap = 1; gap < comm.size(); ++gap) {
      const Pieces pieces = pieces_of(comm.after(gap));
      if (i < pieces.size()) offers.add(comm.send(comm.after(gap), kOffers, pieces[i]));
    }
  }

  // Step 2
  TransferQueue sums(comm);
  const Pieces own = pieces_of(comm.rank());
  const Buffer scratch = comm.buffer(comm.rank() > 1 ? own[0].size_bytes() : 0);
  for (std::int64_t i = 0; i < own.size(); ++i) {
    const Dense piece = own[i];
    const Dense prefix(scratch.data(), piece.count, piece.dtype);
    co_await fold_in_rank_order(comm, piece, prefix, reduction);
    for (int gap = 1; gap < comm.size(); ++gap) sums.add(comm.send(comm.after(gap), kSums, piece));
  }

  // Step 3
  while (!offers.empty()) co_await offers.next();
  TransferQueue receives(comm);
  for (int gap = 1; gap < comm.size(); ++gap) {
    const Pieces pieces = pieces_of(comm.before(gap));
    for (std::int64_t i = 0; i < pieces.size(); ++i)
      receives.add(comm.recv(comm.before(gap), kSums, pieces[i]));
  }
  while (!receives.empty()) co_await receives.next();
  while (!sums.empty()) co_await sums.next();
}

}  // namespace weft
