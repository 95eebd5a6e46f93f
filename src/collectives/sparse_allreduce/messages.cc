#include "collectives/sparse_allreduce/messages.h"

#include <algorithm>
#include <string>

#include "collectives/pieces.h"
#include "weft/error.h"

namespace weft {

// Pieces of micro_op bytes, and a last shorter one, which may be empty.
void post_message(const Comm& comm, int to, std::uint32_t hop, std::span<const std::byte> outgoing,
                  TransferQueue& sends) {
  const std::size_t piece = comm.micro_op_bytes();
  for (;;) {
    const std::size_t length = std::min(piece, outgoing.size());
    sends.add(comm.send(to, hop, outgoing.first(length)));
    outgoing = outgoing.subspan(length);
    if (length < piece) return;
  }
}

Task<void> recv_message(Comm comm, int from, std::uint32_t hop, std::vector<std::byte>& incoming,
                        std::size_t limit) {
  const std::size_t piece = comm.micro_op_bytes();
  incoming.clear();
  auto append = [&incoming](std::span<const std::byte> bytes) {
    incoming.insert(incoming.end(), bytes.begin(), bytes.end());
  };
  for (std::size_t before = 0;; before = incoming.size()) {
    Transfer part =
        comm.recv_with(from, hop, std::min(piece, limit - before), append, comm.kernels().copy_byte);
    co_await part;
    if (incoming.size() - before < piece) co_return;
  }
}

Task<void> send_message(Comm comm, int to, std::uint32_t hop, std::span<const std::byte> outgoing) {
  TransferQueue sends(comm);
  post_message(comm, to, hop, outgoing, sends);
  while (!sends.empty()) co_await sends.next();
}

Task<void> exchange_messages(Comm comm, BagRoute route, std::span<const std::byte> outgoing,
                             std::vector<std::byte>& incoming, std::size_t limit) {
  TransferQueue sends(comm);
  post_message(comm, route.to, route.hop, outgoing, sends);
  co_await recv_message(comm, route.from, route.hop, incoming, limit);
  while (!sends.empty()) co_await sends.next();
}

void BagReader::next(std::int64_t length, std::int64_t max_count, Entries& out, bool& non_finite) {
  const wire::Decoded decoded =
      wire::decode(codec_, bytes_, {.length = length, .max_count = max_count, .peer = peer_}, out);
  bytes_ = bytes_.subspan(decoded.bytes);
  non_finite |= decoded.non_finite;
}

void BagReader::end() const {
  if (bytes_.empty()) return;
  throw TransportError(TransportError::Kind::corrupt, peer_,
                       "a bag of blocks from rank " + std::to_string(peer_) + " is " +
                           std::to_string(bytes_.size()) + " bytes too long");
}

}  // namespace weft
