// Bruck all-to-all, for short messages of equal length: each part travels by the binary digits of its
// distance, and all parts that jump at a hop go in one message.
//   Step 1  slot i = the part for rank + i
//   Step 2  for h = 0, 1 ..: the slots with bit h set go to rank + 2^h, and those of rank - 2^h take
//           their place
//   Step 3  slot i now holds the part from rank - i
// Rounds: ceil(log2 size). Bytes sent by a rank: about n/2 ceil(log2 size), as each part goes as often as its
// distance has bits.
// Bruck et al., IEEE TPDS 8(11), 1997.
#include "collectives/pieces.h"
#include "collectives/registry.h"
#include "patterns/alltoall.h"

namespace weft {

namespace {

void copy_block(const Dense& from, const Dense& into) {
  std::copy(from.data, from.data + from.size_bytes(), into.data);
}

}  // namespace

Task<void> all_to_all_bruck(Comm comm, AllToAllParts exchange, std::size_t micro_op_bytes) {
  const int size = comm.size();
  const std::int64_t part = exchange.send.count / size;
  const DType dtype = exchange.send.dtype;
  const Buffer slot_memory = comm.buffer(exchange.send.size_bytes());
  const Buffer out_memory = comm.buffer(exchange.send.size_bytes());
  const Buffer in_memory = comm.buffer(exchange.send.size_bytes());
  const Dense slots(slot_memory.data(), exchange.send.count, dtype);
  const Dense out(out_memory.data(), exchange.send.count, dtype);
  const Dense in(in_memory.data(), exchange.send.count, dtype);

  // Step 1
  auto rotate = [&] {
    for (int i = 0; i < size; ++i)
      copy_block(exchange.send.sub(comm.after(i) * part, part), slots.sub(i * part, part));
  };
  co_await run_local(comm, exchange.send.size_bytes(), rotate);

  // Step 2
  for (int hop = 0; hop < log2_ceil(size); ++hop) {
    const std::int64_t jumping = bruck_slots(size, hop) * part;
    auto pack = [&] {
      for (int i = 0, n = 0; i < size; ++i) {
        if (bruck_slot_jumps(i, hop)) copy_block(slots.sub(i * part, part), out.sub(n++ * part, part));
      }
    };
    auto unpack = [&] {
      for (int i = 0, n = 0; i < size; ++i) {
        if (bruck_slot_jumps(i, hop)) copy_block(in.sub(n++ * part, part), slots.sub(i * part, part));
      }
    };
    const BagExchange swap{.to = comm.after(1 << hop),
                           .from = comm.before(1 << hop),
                           .hop = static_cast<std::uint32_t>(hop),
                           .micro_op_bytes = micro_op_bytes};
    const Blocks whole(1, jumping);
    const Bag outgoing(out.sub(0, jumping), whole, 0, 1);
    const Bag incoming(in.sub(0, jumping), whole, 0, 1);
    co_await run_local(comm, out.size_bytes(), pack);
    co_await exchange_bags(comm, swap, outgoing, incoming);
    co_await run_local(comm, in.size_bytes(), unpack);
  }

  // Step 3
  auto place = [&] {
    for (int i = 0; i < size; ++i)
      copy_block(slots.sub(i * part, part), exchange.recv.sub(comm.before(i) * part, part));
  };
  co_await run_local(comm, exchange.recv.size_bytes(), place);
}

}  // namespace weft
