// Pairwise all-to-all(-v), for long messages: at hop h every rank sends to rank + h + 1 and receives from
// rank - h - 1. Each hop is a permutation, so no port is shared; a few hops are under way at once, so that
// latencies overlap.
//   Step 1  post the receive and the send of the next hops
//   Step 2  copy the own part
//   Step 3  await the oldest hop, post the next one
// Rounds: size-1. Bytes sent by a rank: all but its own part, n (size-1)/size where parts are equal.
#include "collectives/pieces.h"
#include "collectives/registry.h"
#include "patterns/alltoall.h"

namespace weft {

namespace {

constexpr int kHopsAhead = 4;  // as many as receives in pieces.h, for the same reason

class Part {
 public:
  Part(const Exchange& exchange, std::size_t micro_op_bytes, const Comm& comm)
      : exchange_(exchange), micro_op_bytes_(micro_op_bytes), rank_(comm.rank()), size_(comm.size()) {}
  int to(int hop) const { return pairwise_to(rank_, size_, hop); }
  int from(int hop) const { return pairwise_from(rank_, size_, hop); }
  Pieces sent(int hop) const {
    return {block_of(exchange_.send, exchange_.send_blocks, to(hop)), micro_op_bytes_};
  }
  Pieces received(int hop) const {
    return {block_of(exchange_.recv, exchange_.recv_blocks, from(hop)), micro_op_bytes_};
  }

 private:
  const Exchange& exchange_;
  std::size_t micro_op_bytes_;
  int rank_;
  int size_;
};

}  // namespace

Task<void> all_to_all_pairwise(Comm comm, Exchange exchange, std::size_t micro_op_bytes) {
  const int hops = comm.size() - 1;
  const Part part(exchange, micro_op_bytes, comm);
  TransferQueue receives(comm);
  TransferQueue sends(comm);
  int posted = 0;
  const auto post_next = [&] {
    const auto number = static_cast<std::uint32_t>(posted);
    const Pieces in = part.received(posted);
    const Pieces out = part.sent(posted);
    for (std::int64_t i = 0; i < in.size(); ++i) receives.add(comm.recv(part.from(posted), number, in[i]));
    for (std::int64_t i = 0; i < out.size(); ++i) sends.add(comm.send(part.to(posted), number, out[i]));
    ++posted;
  };

  // Step 1
  while (posted < std::min(hops, kHopsAhead)) post_next();
  // Step 2
  const Dense own = block_of(exchange.send, exchange.send_blocks, comm.rank());
  const Dense place = block_of(exchange.recv, exchange.recv_blocks, comm.rank());
  co_await copy_bytes(comm, own.bytes(), place.bytes());
  // Step 3
  for (int hop = 0; hop < hops; ++hop) {
    for (std::int64_t left = part.received(hop).size(); left > 0; --left) co_await receives.next();
    for (std::int64_t left = part.sent(hop).size(); left > 0; --left) co_await sends.next();
    if (posted < hops) post_next();
  }
}

}  // namespace weft
