// TopkDSA, SparCML's split and all-gather. The vector is dealt to P regions, region j belongs to rank j.
//   Step 1  the k largest of gradient + residual; the rest is the residual
//   Step 2  entries of region j go straight to rank j, destinations rotated; it adds them, in rank order
//   Step 3  Bruck all-gather of the regions' coded sizes, with the verdict on finite values
//   Step 4  Bruck all-gather of the regions: as coded lists if all of them together take less than 2/3 of the
//           bytes of the dense vector (in the paper's codec: fewer than 2n/3 words), else dense. All ranks
//           know the sizes, so all decide alike
//   Step 5  the residual rule
// Rounds: (P-1) + 2 L, L = ceil(log2 P). Entries sent by a rank: at most k in step 2; in step 4 P-1 regions
// (the own one at every hop) of k to k P entries in all of them, or n (P-1)/P dense values. Beside a head for
// each list, step 3 sends 8 (P-1) bytes. The result has up to k P entries and is not cut again.
// Regions are contiguous as published, or dealt (`blocks`). Values are float32 in both branches, bfloat16
// with packed-bf16.
//
// Residuals: nothing is dropped after the selection, so every rule conserves, as in topka; rounding errors of
// packed-bf16, the senders' and the owner's, are kept by gres and drop only.
//
// Renggli et al., SC 2019.
#include <algorithm>
#include <iterator>
#include <utility>
#include <variant>

#include "collectives/registry.h"
#include "collectives/sparse_allreduce/lists.h"
#include "collectives/sparse_allreduce/residual_rules.h"
#include "collectives/sparse_allreduce/whole_operation.h"
#include "kernels/sparse.h"
#include "patterns/bruck.h"

namespace weft {

namespace {

constexpr std::int64_t kNotFinite = std::int64_t{1} << 62;  // in the number that says a region's size

struct RegionOperation : WholeOperation {
  RegionOperation(const Comm& comm, const SparseCall& c)
      : WholeOperation(c),
        me(static_cast<std::size_t>(comm.rank())),
        regions(c.blocks, comm.size(), c.work->length),
        exchange(comm.size()) {
    const auto size = static_cast<std::size_t>(comm.size());
    call.work->lists.resize(size);
    call.work->touched.resize(size);
    for (Entries& touched : call.work->touched) touched.clear();
    exchange.incoming = call.work->lists;
    for (std::size_t j = 0; j < size; ++j) {
      const std::int64_t count = regions.count(static_cast<int>(j));
      exchange.sent[j] = {.length = count, .max_count = std::min(count, call.k)};
    }
    exchange.received.assign(size, exchange.sent[me]);
    call.result->deal = regions;
    call.result->blocks.resize(size);
  }

  // Step 1, and the selected entries by region.
  void split() {
    select();
    const Stopwatch watch(call.result->select_seconds);
    if (!non_finite) round_selected();
    // By region from here on; with rounded values, what was selected is among what was touched.
    const Entries own = std::exchange(call.work->touched[0], {});
    const EntriesView all = selected();
    for (std::size_t i = 0; i < all.size(); ++i) {
      const Deal::Place place = regions.place(all.indices[i]);
      exchange.outgoing[static_cast<std::size_t>(place.block)].push_back(
          static_cast<std::uint32_t>(place.local), all.values[i]);
      if (!own.empty())
        call.work->touched[static_cast<std::size_t>(place.block)].push_back(
            static_cast<std::uint32_t>(place.local), own.values[i]);
    }
    exchange.non_finite = non_finite;
    exchange.incoming[me] = exchange.outgoing[me];
    call.spend(call.kernels->move_entry, all.size());
  }
  // The end of step 2: the own region's sum, as it will be sent.
  void add() {
    Entries& sum = call.result->blocks[me];
    non_finite |= exchange.non_finite || !sum_lists(exchange.incoming, regions.count(rank()), sum);
    spend_sum(call, exchange.incoming);
    if (non_finite || call.codec != wire::SparseCodec::packed_bf16) return;
    std::vector<float>& errors = call.work->errors;
    wire::round_to_bfloat16(sum.values, errors);
    call.spend(call.kernels->round_element, sum.size());
    add_and_touch(call, regions, rank(), {sum.indices, errors}, {});
  }
  std::int64_t coded_size() const {
    if (non_finite) return kNotFinite;
    return static_cast<std::int64_t>(
        wire::encoded_bytes(call.codec, call.result->blocks[me], regions.count(rank())));
  }
  int rank() const { return static_cast<int>(me); }
  DType dense_type() const {
    return call.codec == wire::SparseCodec::packed_bf16 ? DType::bfloat16 : DType::float32;
  }

  // Step 5. What this rank selected lies in call.result's regions, or in its dense vector.
  void settle_regions() {
    Entries kept;
    std::vector<std::uint32_t> asked;
    for (std::size_t b = 0; b < exchange.outgoing.size(); ++b) {
      const auto block = static_cast<int>(b);
      const EntriesView sent = exchange.outgoing[b];
      if (!call.result->is_dense) {
        apply_residual_rule(call, regions, block, sent, call.work->touched[b], call.result->blocks[b]);
        continue;
      }
      const std::vector<std::uint32_t>& touched = call.work->touched[b].indices;
      asked.clear();
      std::set_union(sent.indices.begin(), sent.indices.end(), touched.begin(), touched.end(),
                     std::back_inserter(asked));
      kept.clear();
      for (const std::uint32_t local : asked) {
        const float value = call.result->dense[static_cast<std::size_t>(regions.global(block, local))];
        if (value != 0) kept.push_back(local, value);
      }
      apply_residual_rule(call, regions, block, sent, call.work->touched[b], kept);
    }
  }

  std::size_t me;
  Deal regions;
  ListExchange exchange;
};

Task<void> gather_sparse(Comm comm, RegionOperation& op) {
  ListGather gather{.lists = op.call.result->blocks};
  for (int j = 0; j < comm.size(); ++j) {
    gather.bounds.push_back({.length = op.regions.count(j), .max_count = op.regions.count(j)});
  }
  co_await gather_lists(comm, op.call, gather);
}

// Regions lie end to end in `laid`, each in its own order; then every element goes to its place.
Task<void> gather_dense(Comm comm, RegionOperation& op) {
  const SparseCall& call = op.call;
  const auto n = static_cast<std::size_t>(op.length());
  std::vector<std::byte> laid(n * size_of(op.dense_type()));
  std::vector<std::int64_t> firsts;
  for (int j = 0; j <= comm.size(); ++j) firsts.push_back(op.regions.first(j));
  const bool half = op.dense_type() == DType::bfloat16;
  auto* const halves = reinterpret_cast<bfloat16*>(laid.data());
  auto* const floats = reinterpret_cast<float*>(laid.data());
  auto spread = [&] {
    const EntriesView own = call.result->blocks[op.me];
    for (std::size_t i = 0; i < own.size(); ++i) {
      const std::size_t at = static_cast<std::size_t>(firsts[op.me]) + own.indices[i];
      if (half)
        halves[at] = to_bfloat16(own.values[i]);
      else
        floats[at] = own.values[i];
    }
    call.spend(call.kernels->scatter_entry, own.size());
    return call.spent();
  };
  co_await comm.compute(spread);
  const Dense data(laid.data(), static_cast<std::int64_t>(n), op.dense_type());
  const Blocks blocks(comm.size(), firsts.data());
  AllGatherRun* const run = std::get<AllGatherRun*>(find_algorithm(Family::all_gather, "bruck").run);
  const std::uint64_t before = comm.bytes_sent();
  const Shape shape{.size = comm.size(), .count = data.count, .micro_op_bytes = comm.micro_op_bytes()};
  co_await run(comm, data, blocks, shape);
  const std::uint64_t bytes = comm.bytes_sent() - before;
  call.result->entry_bytes_sent += bytes;
  call.result->entries_sent += bytes / size_of(data.dtype);
  auto place = [&] {
    call.result->dense.resize(n);
    for (int j = 0; j < comm.size(); ++j) {
      op.regions.for_each_run_of(j, [&](const Deal::Run& run_of) {
        for (std::int64_t i = 0; i < run_of.length; ++i) {
          const auto at = static_cast<std::size_t>(firsts[static_cast<std::size_t>(j)] + run_of.local + i);
          call.result->dense[static_cast<std::size_t>(run_of.first + i)] =
              half ? to_float(halves[at]) : floats[at];
        }
      });
    }
    call.result->is_dense = true;
    for (Entries& block : call.result->blocks) block.clear();
    call.spend(call.kernels->widen_element, n);
    return call.spent();
  };
  co_await comm.compute(place);
}

}  // namespace

Task<void> topkdsa(Comm comm, SparseCall call) {
  RegionOperation op(comm, call);
  // Step 1
  auto split = [&op] {
    op.split();
    return op.call.spent();
  };
  co_await comm.compute(split);
  // Step 2
  co_await exchange_lists(comm, call, op.exchange);
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(comm.size()));
  auto add = [&op, &sizes] {
    op.add();
    sizes[op.me] = op.coded_size();
    return op.call.spent();
  };
  co_await comm.compute(add);
  // Step 3
  auto hop = static_cast<std::uint32_t>(comm.size() - 1);
  co_await gather_numbers(comm.hops_from(hop), call, sizes);
  std::int64_t total = 0;
  for (const std::int64_t bytes : sizes) {
    op.non_finite |= bytes == kNotFinite;
    total += op.non_finite ? 0 : bytes;
  }
  call.result->finite = !op.non_finite;
  if (op.non_finite) co_return;
  // Step 4
  hop += static_cast<std::uint32_t>(log2_ceil(comm.size()));
  const auto dense_bytes = op.length() * static_cast<std::int64_t>(size_of(op.dense_type()));
  if (3 * total < 2 * dense_bytes)
    co_await gather_sparse(comm.hops_from(hop), op);
  else
    co_await gather_dense(comm.hops_from(hop), op);
  // Step 5
  auto settle = [&op] {
    op.settle_regions();
    return op.call.spent();
  };
  co_await comm.compute(settle);
}

}  // namespace weft
