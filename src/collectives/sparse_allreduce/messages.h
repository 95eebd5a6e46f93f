// Bags of coded blocks as messages. A message is cut into micro-ops; its length is not known to the receiver
// beforehand, so the last piece is the first one shorter than a micro-op (empty where the length is a
// multiple).
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "collectives/sparse_allreduce/call.h"
#include "weft/comm.h"

namespace weft {

class TransferQueue;

// What goes to one peer and comes from another in one hop.
struct BagRoute {
  int to = 0;
  int from = 0;
  std::uint32_t hop = 0;
};

// Sends `outgoing` and receives a message of at most `limit` bytes into `incoming` (resized). Both vectors
// live until it is done.
Task<void> exchange_messages(Comm comm, BagRoute route, std::span<const std::byte> outgoing,
                             std::vector<std::byte>& incoming, std::size_t limit);
// One direction only.
Task<void> send_message(Comm comm, int to, std::uint32_t hop, std::span<const std::byte> outgoing);
// Posts the sends of one; `outgoing` lives until they are done.
void post_message(const Comm& comm, int to, std::uint32_t hop, std::span<const std::byte> outgoing,
                  TransferQueue& sends);
Task<void> recv_message(Comm comm, int from, std::uint32_t hop, std::vector<std::byte>& incoming,
                        std::size_t limit);

// Reads the blocks of a bag one after the other.
class BagReader {
 public:
  BagReader(wire::SparseCodec codec, std::span<const std::byte> bytes, int peer)
      : codec_(codec), bytes_(bytes), peer_(peer) {}
  // The next block; `non_finite` is or-ed with its verdict. Throws TransportError(corrupt).
  void next(std::int64_t length, std::int64_t max_count, Entries& out, bool& non_finite);
  std::span<const std::byte> rest() const { return bytes_; }
  void end() const;  // throws TransportError(corrupt) if bytes are left

 private:
  wire::SparseCodec codec_;
  std::span<const std::byte> bytes_;
  int peer_;
};

}  // namespace weft
