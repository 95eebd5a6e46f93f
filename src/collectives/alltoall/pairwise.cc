// Pairwise all-to-all(-v), for long messages: at hop h every rank sends to rank + h + 1 and receives from
// rank - h - 1. Each hop is a permutation, so no port is shared. What is under way at once is counted in
// micro-ops: long hops follow each other, and of short ones a few overlap, which hides their latencies.
//   Step 1  post the receives and sends of the first micro-ops
//   Step 2  copy the own part
//   Step 3  await the oldest micro-op each way, post the next
// Nothing deadlocks, even where a send ends only when it is received: all ranks walk the same order (hop,
// micro-op), and whoever waits at one place of it has posted everything up to there.
// Rounds: size-1. Bytes sent by a rank: all but its own part, n (size-1)/size where parts are equal.
#include "collectives/pieces.h"
#include "collectives/registry.h"
#include "patterns/alltoall.h"

namespace weft {

namespace {

constexpr int kAhead = kReceivesAhead;  // micro-ops under way each way

// The exchange as a series of steps: a micro-op to send and one to receive, as far as the hop has them.
class Steps {
 public:
  Steps(const AllToAllParts& exchange, std::size_t micro_op_bytes, const Comm& comm)
      : exchange_(exchange), micro_op_bytes_(micro_op_bytes), rank_(comm.rank()), size_(comm.size()) {
    enter();
  }
  bool over() const { return hop_ == size_ - 1; }
  std::uint32_t hop() const { return static_cast<std::uint32_t>(hop_); }
  int to() const { return pairwise_to(rank_, size_, hop_); }
  int from() const { return pairwise_from(rank_, size_, hop_); }
  bool sends() const { return piece_ < out_.size(); }
  bool receives() const { return piece_ < in_.size(); }
  Dense out() const { return out_[piece_]; }
  Dense in() const { return in_[piece_]; }
  void next() {
    ++piece_;
    if (sends() || receives()) return;
    ++hop_;
    piece_ = 0;
    enter();
  }

 private:
  void enter() {
    if (over()) return;
    out_ = {exchange_.part_for(to()), micro_op_bytes_};
    in_ = {block_of(exchange_.recv, exchange_.recv_blocks, from()), micro_op_bytes_};
  }

  const AllToAllParts& exchange_;
  std::size_t micro_op_bytes_;
  int rank_;
  int size_;
  int hop_ = 0;
  std::int64_t piece_ = 0;
  Pieces out_, in_;
};

}  // namespace

Task<void> all_to_all_pairwise(Comm comm, AllToAllParts exchange, std::size_t micro_op_bytes) {
  Steps posted(exchange, micro_op_bytes, comm);
  TransferQueue receives(comm);
  TransferQueue sends(comm);
  const auto post_next = [&] {
    if (posted.receives()) receives.add(comm.recv(posted.from(), posted.hop(), posted.in()));
    if (posted.sends()) sends.add(comm.send(posted.to(), posted.hop(), posted.out()));
    posted.next();
  };

  // Step 1
  for (int i = 0; i < kAhead && !posted.over(); ++i) post_next();
  // Step 2
  const Dense own = exchange.part_for(comm.rank());
  const Dense place = block_of(exchange.recv, exchange.recv_blocks, comm.rank());
  co_await copy_bytes(comm, own.bytes(), place.bytes());
  // Step 3
  for (Steps done(exchange, micro_op_bytes, comm); !done.over(); done.next()) {
    if (done.receives()) co_await receives.next();
    if (done.sends()) co_await sends.next();
    if (!posted.over()) post_next();
  }
}

}  // namespace weft
