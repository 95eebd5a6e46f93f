// The front door: checks the call, picks the row, declares what this operation is, and runs the row's
// coroutine.
#include "weft/collective.h"

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/identity.h"
#include "collectives/dense/finish.h"
#include "collectives/dense/ring_pass.h"
#include "collectives/dense/two_level.h"
#include "collectives/pieces.h"
#include "collectives/registry.h"
#include "transports/endpoint.h"
#include "weft/error.h"
#include "wire/frame.h"

namespace weft {

AllReduceRun all_reduce_ring, all_reduce_two_level;

namespace {

[[noreturn]] void refuse(Family family, const std::string& what) {
  throw UsageError(std::string(name_of(family)) + ": " + what);
}

void check_vector(Family family, const Dense& data) {
  if (static_cast<std::size_t>(data.dtype) > static_cast<std::size_t>(DType::int64))
    refuse(family, "unknown element type");
  if (data.count < 0) refuse(family, "a vector of " + std::to_string(data.count) + " elements");
  if (data.data == nullptr && data.count > 0) refuse(family, "a vector without memory");
}

void check_reduction(Family family, const Dense& data, Reduction reduction) {
  check_vector(family, data);
  if (data.dtype == DType::bytes)
    refuse(family, "bytes have no sum, minimum or maximum: name the element type");
  if (static_cast<std::size_t>(reduction) > static_cast<std::size_t>(Reduction::max))
    refuse(family, "unknown reduction");
}

std::size_t micro_op(const Comm& comm, std::size_t asked) {
  return asked != 0 ? asked : comm.micro_op_bytes();
}

// `node_size` and `micro_op_bytes` as in the options: 0 is what the group has.
Shape shape_of(Family family, const Comm& comm, const Dense& data, std::size_t micro_op_bytes,
               int node_size = 0) {
  if (node_size < 0 || (node_size > 0 && comm.size() % node_size != 0)) {
    refuse(family, "nodes of " + std::to_string(node_size) + " ranks do not divide " +
                       std::to_string(comm.size()) + " ranks");
  }
  return {.size = comm.size(),
          .count = data.count,
          .element_bytes = size_of(data.dtype),
          .node_size = node_size != 0 ? node_size : comm.node_size(),
          .micro_op_bytes = micro_op(comm, micro_op_bytes)};
}

// `agreed` is what else must be equal on all ranks: ranks of a node, counts of blocks, a root.
void declare(const Comm& comm, const wire::Fingerprint& fingerprint, std::int64_t count,
             std::uint64_t agreed) {
  wire::Fingerprint whole = fingerprint;
  whole.count = wire::count_hash(static_cast<std::uint64_t>(count) ^ agreed);
  comm.declare(wire::pack(whole));
}

wire::Fingerprint fingerprint(Family family, const Algorithm& row, DType dtype,
                              Reduction reduction = Reduction::sum) {
  return {.family = static_cast<std::uint8_t>(family),
          .algorithm = row_of(family, row),
          .dtype = static_cast<std::uint8_t>(dtype),
          .reduction = static_cast<std::uint8_t>(reduction)};
}

// Where blocks of these counts begin, in `memory`; the counts must fit the vector.
Blocks uneven_blocks(Family family, std::span<const std::int64_t> counts, const Dense& data,
                     const Buffer& memory) {
  const std::span<std::int64_t> offsets = memory.as<std::int64_t>();
  if (counts.size() + 1 != offsets.size()) {
    refuse(family,
           std::to_string(counts.size()) + " counts for " + std::to_string(offsets.size() - 1) + " ranks");
  }
  offsets[0] = 0;
  for (std::size_t b = 0; b < counts.size(); ++b) {
    if (counts[b] < 0 || counts[b] > data.count - offsets[b])
      refuse(family, "the counts do not fit the vector");
    offsets[b + 1] = offsets[b] + counts[b];
  }
  if (offsets[counts.size()] != data.count) refuse(family, "the counts do not add up to the vector's length");
  return {static_cast<int>(counts.size()), offsets.data()};
}

Buffer offsets_memory(const Comm& comm) {
  return comm.buffer((static_cast<std::size_t>(comm.size()) + 1) * sizeof(std::int64_t));
}

// Of what must be equal on all ranks beside the length.
std::uint64_t hash_of(const Shape& shape) { return static_cast<std::uint64_t>(shape.node_size - 1) << 48; }

std::uint64_t hash_of(const Shape& shape, std::span<const std::int64_t> counts) {
  std::uint64_t hash = 1 ^ hash_of(shape);
  for (const std::int64_t count : counts) hash = mix(hash ^ static_cast<std::uint64_t>(count));
  return hash;
}

Task<void> run_all_to_all(Comm comm, AllToAllParts exchange, AllToAllOptions options) {
  constexpr Family kFamily = Family::all_to_all;
  const Shape shape = exchange.uneven
                          ? uneven_shape(comm, exchange.send.dtype, options)
                          : shape_of(kFamily, comm, exchange.send, options.micro_op_bytes, options.node_size);
  exchange.node_size = shape.node_size;
  const Algorithm& row = pick(kFamily, options.algorithm, shape, comm.cost());
  declare(comm, fingerprint(kFamily, row, exchange.send.dtype), exchange.uneven ? 0 : exchange.send.count,
          hash_of(shape));
  co_await std::get<AllToAllRun*>(row.run)(comm, exchange, shape.micro_op_bytes);
}

}  // namespace

// It must choose alike on all ranks, and they agree on no length but an expected one.
Shape uneven_shape(const Comm& comm, DType dtype, const AllToAllOptions& options) {
  const Dense none(nullptr, 0, dtype);
  Shape shape = shape_of(Family::all_to_all, comm, none, options.micro_op_bytes, options.node_size);
  shape.uneven = true;
  const std::int64_t as_long = static_cast<std::int64_t>(shape.micro_op_bytes) * comm.size();
  shape.count = options.expected_count != 0 ? options.expected_count : as_long;
  return shape;
}

BlockRange block_of(std::int64_t count, int size, int rank) {
  if (count < 0 || size < 1 || rank < 0 || rank >= size) throw UsageError("block_of: no such block");
  const Blocks blocks(size, count);
  return {blocks.begin(rank), blocks.count(rank)};
}

Task<void> all_reduce(Comm comm, Dense data, AllReduceOptions options) {
  return all_reduce_and_finish(std::move(comm), data, nullptr, options);
}

Task<void> all_reduce_and_finish(Comm comm, Dense data, Finish* finish, AllReduceOptions options) {
  constexpr Family kFamily = Family::all_reduce;
  check_reduction(kFamily, data, options.reduction);
  const Shape shape = shape_of(kFamily, comm, data, options.micro_op_bytes, options.node_size);
  const Algorithm& row = pick(kFamily, options.algorithm, shape, comm.cost());
  declare(comm, fingerprint(kFamily, row, data.dtype, options.reduction), data.count, hash_of(shape));
  AllReduceRun* const run = std::get<AllReduceRun*>(row.run);
  const bool alone = comm.size() == 1;
  if (finish != nullptr && run == all_reduce_ring && !alone) {
    RingPass pass = all_reduce_pass(comm.size(), data, options.reduction, shape.micro_op_bytes);
    pass.finish = finish;
    co_await ring_pass(comm, pass);
    co_return;
  }
  if (finish != nullptr && run == all_reduce_two_level && !alone) {
    co_await all_reduce_levels(comm, data, options.reduction, shape, finish);
    co_return;
  }
  co_await run(comm, data, options.reduction, shape);
  if (finish == nullptr) co_return;
  auto all = [&] { return finish->sum(data); };
  co_await comm.compute(all);
}

Task<void> reduce_scatter(Comm comm, Dense data, ReduceScatterOptions options) {
  constexpr Family kFamily = Family::reduce_scatter;
  check_reduction(kFamily, data, options.reduction);
  const Shape shape = shape_of(kFamily, comm, data, options.micro_op_bytes, options.node_size);
  const Algorithm& row = pick(kFamily, options.algorithm, shape, comm.cost());
  declare(comm, fingerprint(kFamily, row, data.dtype, options.reduction), data.count, hash_of(shape));
  const Blocks blocks(comm.size(), data.count);
  co_await std::get<ReduceScatterRun*>(row.run)(comm, data, blocks, options.reduction, shape);
}

Task<void> reduce_scatter_v(Comm comm, Dense data, std::span<const std::int64_t> counts,
                            ReduceScatterOptions options) {
  constexpr Family kFamily = Family::reduce_scatter;
  check_reduction(kFamily, data, options.reduction);
  const Buffer memory = offsets_memory(comm);
  const Blocks blocks = uneven_blocks(kFamily, counts, data, memory);
  Shape shape = shape_of(kFamily, comm, data, options.micro_op_bytes, options.node_size);
  shape.uneven = true;
  const Algorithm& row = pick(kFamily, options.algorithm, shape, comm.cost());
  declare(comm, fingerprint(kFamily, row, data.dtype, options.reduction), data.count, hash_of(shape, counts));
  co_await std::get<ReduceScatterRun*>(row.run)(comm, data, blocks, options.reduction, shape);
}

Task<void> all_gather(Comm comm, Dense data, AllGatherOptions options) {
  constexpr Family kFamily = Family::all_gather;
  check_vector(kFamily, data);
  const Shape shape = shape_of(kFamily, comm, data, options.micro_op_bytes, options.node_size);
  const Algorithm& row = pick(kFamily, options.algorithm, shape, comm.cost());
  declare(comm, fingerprint(kFamily, row, data.dtype), data.count, hash_of(shape));
  const Blocks blocks(comm.size(), data.count);
  co_await std::get<AllGatherRun*>(row.run)(comm, data, blocks, shape);
}

Task<void> all_gather_v(Comm comm, Dense data, std::span<const std::int64_t> counts,
                        AllGatherOptions options) {
  constexpr Family kFamily = Family::all_gather;
  check_vector(kFamily, data);
  const Buffer memory = offsets_memory(comm);
  const Blocks blocks = uneven_blocks(kFamily, counts, data, memory);
  Shape shape = shape_of(kFamily, comm, data, options.micro_op_bytes, options.node_size);
  shape.uneven = true;
  const Algorithm& row = pick(kFamily, options.algorithm, shape, comm.cost());
  declare(comm, fingerprint(kFamily, row, data.dtype), data.count, hash_of(shape, counts));
  co_await std::get<AllGatherRun*>(row.run)(comm, data, blocks, shape);
}

Task<void> broadcast(Comm comm, Dense data, BroadcastOptions options) {
  constexpr Family kFamily = Family::broadcast;
  check_vector(kFamily, data);
  if (options.root < 0 || options.root >= comm.size()) {
    refuse(kFamily, "root " + std::to_string(options.root) + " is outside the group of " +
                        std::to_string(comm.size()) + " ranks");
  }
  const Shape shape = shape_of(kFamily, comm, data, options.micro_op_bytes);
  const Algorithm& row = pick(kFamily, options.algorithm, shape, comm.cost());
  declare(comm, fingerprint(kFamily, row, data.dtype), data.count,
          static_cast<std::uint64_t>(options.root) << 40);
  co_await std::get<BroadcastRun*>(row.run)(comm, data, options.root, shape.micro_op_bytes);
}

Task<void> barrier(Comm comm) {
  constexpr Family kFamily = Family::barrier;
  const Shape shape{.size = comm.size()};  // named: what is chosen refers to no temporary
  const Algorithm& row = choose(kFamily, shape, comm.cost());
  declare(comm, fingerprint(kFamily, row, DType::bytes), 0, 0);
  co_await std::get<BarrierRun*>(row.run)(comm);
}

Task<void> all_to_all(Comm comm, Dense send, Dense recv, AllToAllOptions options) {
  constexpr Family kFamily = Family::all_to_all;
  check_vector(kFamily, send);
  check_vector(kFamily, recv);
  if (send.dtype != recv.dtype || send.count != recv.count)
    refuse(kFamily, "send and recv differ in type or length");
  if (send.count % comm.size() != 0) {
    refuse(kFamily, std::to_string(send.count) + " elements are no multiple of " +
                        std::to_string(comm.size()) + " ranks");
  }
  const Blocks blocks(comm.size(), send.count);
  const AllToAllParts exchange{send, blocks, recv, blocks, 1, false};
  co_await run_all_to_all(comm, exchange, options);
}

Task<void> all_to_all_v(Comm comm, Parts send, Parts recv, AllToAllOptions options) {
  constexpr Family kFamily = Family::all_to_all;
  check_vector(kFamily, send.data);
  check_vector(kFamily, recv.data);
  if (send.data.dtype != recv.data.dtype) refuse(kFamily, "send and recv differ in type");
  const Buffer send_memory = offsets_memory(comm);
  const Buffer recv_memory = offsets_memory(comm);
  const bool same = send.counts.empty();
  const Blocks send_blocks =
      same ? Blocks(1, send.data.count) : uneven_blocks(kFamily, send.counts, send.data, send_memory);
  const Blocks recv_blocks = uneven_blocks(kFamily, recv.counts, recv.data, recv_memory);
  const auto me = static_cast<std::size_t>(comm.rank());
  if ((same ? send.data.count : send.counts[me]) != recv.counts[me])
    refuse(kFamily, "this rank sends itself another count than it receives");
  const AllToAllParts exchange{send.data, send_blocks, recv.data, recv_blocks, 1, true, same};
  co_await run_all_to_all(comm, exchange, options);
}

namespace {
wire::Fingerprint message_fingerprint(const Dense& data) {
  return {.family = static_cast<std::uint8_t>(Family::message),
          .dtype = static_cast<std::uint8_t>(data.dtype)};
}
}  // namespace

Task<void> send(Comm comm, int peer, Dense data, MessageOptions options) {
  check_vector(Family::message, data);
  declare(comm, message_fingerprint(data), data.count, 0);
  const Pieces pieces(data, micro_op(comm, options.micro_op_bytes));
  TransferQueue sends(comm);
  for (std::int64_t i = 0; i < pieces.size(); ++i) sends.add(comm.send(peer, 0, pieces[i]));
  while (!sends.empty()) co_await sends.next();
}

Task<void> recv(Comm comm, int peer, Dense data, MessageOptions options) {
  check_vector(Family::message, data);
  declare(comm, message_fingerprint(data), data.count, 0);
  const Pieces pieces(data, micro_op(comm, options.micro_op_bytes));
  TransferQueue receives(comm);
  for (std::int64_t i = 0; i < pieces.size(); ++i) receives.add(comm.recv(peer, 0, pieces[i]));
  while (!receives.empty()) co_await receives.next();
}

Task<Comm> split(Comm comm, int color, int key) {
  const auto size = static_cast<std::size_t>(comm.size());
  const auto me = static_cast<std::size_t>(comm.rank());
  const Buffer memory = comm.buffer(2 * size * sizeof(std::int64_t));
  const std::span<std::int64_t> pairs = memory.as<std::int64_t>();
  pairs[2 * me] = color;
  pairs[2 * me + 1] = key;
  co_await all_gather(comm, Dense(pairs));
  if (color < 0) co_return Comm();

  std::vector<int> ranks;
  for (std::size_t r = 0; r < size; ++r) {
    if (pairs[2 * r] == color) ranks.push_back(static_cast<int>(r));
  }
  std::sort(ranks.begin(), ranks.end(), [&](int a, int b) {
    return std::tuple(pairs[2 * static_cast<std::size_t>(a) + 1], a) <
           std::tuple(pairs[2 * static_cast<std::size_t>(b) + 1], b);
  });
  // The new group without this operation, which ends here.
  const std::uint64_t id = comm.subgroup(ranks).group_id();
  for (int& r : ranks) r = comm.world_rank(r);
  co_return Comm(comm.endpoint().group(id, ranks));
}

}  // namespace weft
