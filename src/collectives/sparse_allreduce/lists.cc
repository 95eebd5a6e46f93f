#include "collectives/sparse_allreduce/lists.h"

#include <algorithm>
#include <array>
#include <bit>
#include <utility>
#include <variant>

#include "collectives/pieces.h"
#include "collectives/registry.h"
#include "collectives/sparse_allreduce/messages.h"
#include "patterns/bruck.h"

namespace weft {

namespace {

std::size_t limit_of(const SparseCall& call, const ListBounds& bounds) {
  return wire::max_encoded_bytes(call.codec, bounds.max_count, bounds.length);
}

// A message of unknown length that is under way: where its pieces go.
struct Arriving {
  std::vector<std::byte> bytes;
  void operator()(std::span<const std::byte> piece) { bytes.insert(bytes.end(), piece.begin(), piece.end()); }
};

// Codes the lists that go out; bytes[j] is rank j's message.
std::vector<std::vector<std::byte>> code_all(const SparseCall& call, const ListExchange& exchange, int me) {
  std::vector<std::vector<std::byte>> bytes(exchange.outgoing.size());
  for (std::size_t j = 0; j < bytes.size(); ++j) {
    if (static_cast<int>(j) == me || exchange.sent[j].length == ListBounds::kNone) continue;
    const EntriesView list = exchange.non_finite ? EntriesView{} : exchange.outgoing[j].view();
    wire::encode(call.codec, list, exchange.sent[j].length, exchange.non_finite, bytes[j]);
    call.result->entries_sent += list.size();
    call.result->entry_bytes_sent += bytes[j].size();
    call.spend_encoding(list.size());
  }
  return bytes;
}

}  // namespace

Task<void> gather_lists(Comm comm, const SparseCall& call, ListGather& gather) {
  const GatherRing ring =
      gather.ring.size > 0 ? gather.ring : GatherRing{.size = comm.size(), .me = comm.rank()};
  const auto list_at = [&](int distance) {
    return static_cast<std::size_t>((ring.me + distance) % ring.size);
  };
  // Lists of the ring from this rank on, as coded, one after the other; where each ends.
  std::vector<std::byte> held;
  std::vector<std::size_t> ends;
  auto code = [&] {
    const Stopwatch watch(call.result->select_seconds);
    if (gather.non_finite) gather.lists[list_at(0)].clear();
    wire::encode(call.codec, gather.lists[list_at(0)], gather.bounds[list_at(0)].length, gather.non_finite,
                 held);
    ends.push_back(held.size());
    call.spend_encoding(gather.lists[list_at(0)].size());
    return call.spent();
  };
  co_await comm.compute(code);
  std::vector<std::byte> incoming;
  for (const Hop& hop : gather_hops(ring.size)) {
    const BagRoute route{.to = ring.rank_at(-hop.gap), .from = ring.rank_at(hop.gap), .hop = hop.number};
    std::size_t limit = 0;
    for (int i = 0; i < hop.count; ++i) {
      call.result->entries_sent += gather.lists[list_at(i)].size();
      limit += limit_of(call, gather.bounds[list_at(hop.received + i)]);
    }
    const auto outgoing =
        std::span<const std::byte>(held).first(ends[static_cast<std::size_t>(hop.count - 1)]);
    call.result->entry_bytes_sent += outgoing.size();
    co_await exchange_messages(comm, route, outgoing, incoming, limit);
    auto decode = [&] {
      BagReader bag(call.codec, incoming, route.from);
      for (int i = 0; i < hop.count; ++i) {
        const std::size_t r = list_at(hop.received + i);
        bag.next(gather.bounds[r].length, gather.bounds[r].max_count, gather.lists[r], gather.non_finite);
        call.spend_decoding(gather.lists[r].size());
        ends.push_back(held.size() + incoming.size() - bag.rest().size());
      }
      bag.end();
      held.insert(held.end(), incoming.begin(), incoming.end());
      call.spend(call.kernels->copy_byte, incoming.size());
      return call.spent();
    };
    co_await comm.compute(decode);
  }
}

Task<void> exchange_lists(Comm comm, const SparseCall& call, ListExchange& exchange) {
  const int size = comm.size();
  std::vector<std::vector<std::byte>> outgoing;
  auto code = [&] {
    const Stopwatch watch(call.result->select_seconds);
    outgoing = code_all(call, exchange, comm.rank());
    return call.spent();
  };
  co_await comm.compute(code);
  TransferQueue sends(comm);
  TransferQueue firsts(comm);  // the first piece of each message, some sources ahead
  std::vector<Arriving> arriving(static_cast<std::size_t>(size));
  std::vector<std::uint64_t> posted(static_cast<std::size_t>(size));  // sends up to this distance
  const std::size_t piece = comm.micro_op_bytes();
  const auto source = [&](int distance) { return static_cast<std::size_t>(comm.before(distance)); };
  const auto comes = [&](int distance) {
    return exchange.received[source(distance)].length != ListBounds::kNone;
  };
  const auto post = [&](int distance) {
    if (distance >= size) return;
    const auto hop = static_cast<std::uint32_t>(distance - 1);
    if (comes(distance)) {
      const std::size_t limit = limit_of(call, exchange.received[source(distance)]);
      firsts.add(comm.recv_with(comm.before(distance), hop, std::min(piece, limit),
                                arriving[source(distance)], comm.kernels().copy_byte));
    }
    const auto to = static_cast<std::size_t>(comm.after(distance));
    if (exchange.sent[to].length != ListBounds::kNone)
      post_message(comm, comm.after(distance), hop, outgoing[to], sends);
    posted[static_cast<std::size_t>(distance)] = sends.added();
  };
  for (int distance = 1; distance < kReceivesAhead; ++distance) post(distance);
  for (int distance = 1; distance < size; ++distance) {
    post(distance + kReceivesAhead - 1);
    // A send of `done` ends when its receiver has come to that distance: all do, whoever is last waits for
    // nobody ahead of it.
    const int done = std::max(0, distance - kReceivesAhead);
    while (sends.released() < posted[static_cast<std::size_t>(done)]) co_await sends.next();
    if (!comes(distance)) continue;
    co_await firsts.next();
    const std::size_t from = source(distance);
    Arriving& message = arriving[from];
    const std::size_t limit = limit_of(call, exchange.received[from]);
    for (std::size_t last = message.bytes.size(); last == piece;) {
      const std::size_t before = message.bytes.size();
      Transfer more = comm.recv_with(static_cast<int>(from), static_cast<std::uint32_t>(distance - 1),
                                     std::min(piece, limit - before), message, comm.kernels().copy_byte);
      co_await more;
      last = message.bytes.size() - before;
    }
    auto decode = [&] {
      BagReader bag(call.codec, message.bytes, static_cast<int>(from));
      bag.next(exchange.received[from].length, exchange.received[from].max_count, exchange.incoming[from],
               exchange.non_finite);
      bag.end();
      message.bytes = {};
      call.spend_decoding(exchange.incoming[from].size());
      return call.spent();
    };
    co_await comm.compute(decode);
  }
  while (!sends.empty()) co_await sends.next();
}

Task<void> gather_numbers(Comm comm, const SparseCall& call, std::vector<std::int64_t>& values) {
  const Dense data(std::span<std::int64_t>{values});
  const std::uint64_t before = comm.bytes_sent();
  AllGatherRun* const run = std::get<AllGatherRun*>(find_algorithm(Family::all_gather, "bruck").run);
  const Blocks blocks(comm.size(), data.count);
  const Shape shape{.size = comm.size(), .count = data.count, .micro_op_bytes = comm.micro_op_bytes()};
  co_await run(comm, data, blocks, shape);
  call.result->entry_bytes_sent += comm.bytes_sent() - before;
}

// Chunk by chunk of the block, so that the dense sums stay in the cache; a bit for each element that somebody
// has.
bool sum_lists(std::span<const Entries> lists, std::int64_t length, Entries& out) {
  constexpr std::size_t kChunk = std::size_t{1} << 14;
  std::vector<float> sums(std::min(kChunk, static_cast<std::size_t>(length)));
  std::array<std::uint64_t, kChunk / 64> marks{};
  std::vector<std::size_t> at(lists.size());
  std::size_t total = 0;
  for (const Entries& list : lists) total += list.size();
  out.resize(std::min(total, static_cast<std::size_t>(length)));
  std::size_t count = 0;
  std::uint32_t largest = 0;
  for (;;) {
    std::size_t next = static_cast<std::size_t>(length);
    for (std::size_t l = 0; l < lists.size(); ++l) {
      if (at[l] < lists[l].size()) next = std::min<std::size_t>(next, lists[l].indices[at[l]]);
    }
    if (next >= static_cast<std::size_t>(length)) break;
    const std::size_t base = next / kChunk * kChunk;
    for (std::size_t l = 0; l < lists.size(); ++l) {
      const Entries& list = lists[l];
      std::size_t i = at[l];
      for (; i < list.size() && list.indices[i] - base < kChunk; ++i) {
        const std::size_t place = list.indices[i] - base;
        sums[place] += list.values[i];
        marks[place / 64] |= std::uint64_t{1} << (place % 64);
      }
      at[l] = i;
    }
    for (std::size_t word = 0; word < marks.size(); ++word) {
      for (std::uint64_t bits = std::exchange(marks[word], 0); bits != 0; bits &= bits - 1) {
        const std::size_t place = word * 64 + static_cast<std::size_t>(std::countr_zero(bits));
        const float sum = std::exchange(sums[place], 0.0F);
        const std::uint32_t key = magnitude_key(sum);
        largest = std::max(largest, key);
        out.indices[count] = static_cast<std::uint32_t>(base + place);
        out.values[count] = sum;
        count += key != 0 ? 1 : 0;
      }
    }
  }
  out.resize(count);
  return largest < kInfinityKey;
}

void spend_sum(const SparseCall& call, std::span<const Entries> lists) {
  for (const Entries& list : lists) call.spend(call.kernels->sum_entry, list.size());
}

}  // namespace weft
