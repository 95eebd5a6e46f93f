// One trip around the ring, or two, pipelined: a piece of a block is sent on as soon as it has arrived, while
// later pieces are still under way.
//   Step 1  send every piece of the block that this rank starts with
//   Step 2  for each hop, for each piece: await it (folded or placed), finish it where it is the last hop of
//           the first trip or one of the second, send it on at the next hop; receives are posted a few pieces
//           ahead. A piece of the second trip lands where one lay that was sent in the first: that send is
//           awaited before the receive is posted. (It cannot wait for us: the peer posts its receives of the
//           first trip freely.)
//   Step 3  await the remaining sends
#include "collectives/dense/ring_pass.h"

#include "collectives/pieces.h"
#include "patterns/ring.h"

namespace weft {

namespace {

Pieces pieces_of(const RingPass& pass, int block, int run) {
  const RingBlocks& at = pass.places;
  const int place = at.first + block * at.stride + run * at.run_stride;
  return {block_of(pass.data, pass.blocks, place), pass.micro_op_bytes};
}

// This rank's place in the ring, and its neighbours in the group.
struct Ring {
  Ring(const Comm& comm, const RingRanks& ranks)
      : size(ranks.size == 0 ? comm.size() : ranks.size), rank((comm.rank() - ranks.first) / ranks.stride) {
    next = ranks.first + (rank + 1) % size * ranks.stride;
    previous = ranks.first + (rank + size - 1) % size * ranks.stride;
  }
  int size, rank;
  int next = 0, previous = 0;
};

// Walks over the pieces that a rank receives, hop by hop.
class Arrivals {
 public:
  Arrivals(const RingPass& pass, const Ring& ring) : pass_(pass), ring_(ring), hop_(pass.first_hop) {
    enter();
  }

  bool more() const { return hop_ < pass_.last_hop; }
  int hop() const { return hop_; }
  bool folds() const { return ring_folds(ring_.size, hop_); }
  Dense piece() const { return pieces_[piece_]; }
  void next() {
    if (++piece_ < pieces_.size()) return;
    piece_ = 0;
    if (++run_ == pass_.places.runs) {
      run_ = 0;
      ++hop_;
    }
    enter();
  }

 private:
  void enter() { pieces_ = pieces_of(pass_, ring_received_block(ring_.rank, ring_.size, hop_), run_); }
  const RingPass& pass_;
  const Ring& ring_;
  int hop_;
  int run_ = 0;
  std::int64_t piece_ = 0;
  Pieces pieces_;
};

}  // namespace

Task<void> ring_pass(Comm comm, RingPass pass) {
  const Ring ring(comm, pass.ranks);
  const bool two_trips = pass.first_hop == 0 && pass.last_hop == ring_hops(ring.size);
  const auto number = [&pass](int hop) { return static_cast<std::uint32_t>(hop - pass.first_hop); };
  if (pass.first_hop == pass.last_hop) co_return;

  // Step 1
  TransferQueue sends(comm);
  for (int run = 0; run < pass.places.runs; ++run) {
    const Pieces first = pieces_of(pass, ring_sent_block(ring.rank, ring.size, pass.first_hop), run);
    for (std::int64_t i = 0; i < first.size(); ++i) sends.add(comm.send(ring.next, 0, first[i]));
  }

  // Step 2
  TransferQueue receives(comm);
  Arrivals posting(pass, ring);
  std::uint64_t num_placed = 0;  // receives of the second trip: the k-th lands where the k-th send was read
  for (Arrivals arriving(pass, ring); arriving.more(); arriving.next()) {
    for (; posting.more() && receives.size() < kReceivesAhead; posting.next()) {
      if (posting.folds()) {
        receives.add(comm.recv_fold(ring.previous, number(posting.hop()), posting.piece(), pass.reduction));
      } else {
        if (two_trips && sends.added() <= num_placed) break;  // that send comes with a later arrival
        for (++num_placed; two_trips && sends.released() < num_placed;) co_await sends.next();
        receives.add(comm.recv(ring.previous, number(posting.hop()), posting.piece()));
      }
    }
    co_await receives.next();
    if (pass.finish != nullptr && arriving.hop() + 2 >= ring.size) {
      const bool is_sum = arriving.folds();
      const double spent =
          is_sum ? pass.finish->sum(arriving.piece()) : pass.finish->result(arriving.piece());
      co_await comm.charge(spent);
    }
    if (arriving.hop() + 1 < pass.last_hop)
      sends.add(comm.send(ring.next, number(arriving.hop() + 1), arriving.piece()));
  }

  // Step 3
  while (!sends.empty()) co_await sends.next();
}

}  // namespace weft
