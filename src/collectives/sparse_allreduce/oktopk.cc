// Ok-Topk: thresholds that are kept for many steps, regions that are moved so that all owners get equal
// shares.
//   Step 1  entries of gradient + residual that reach the local threshold: about k. Every 32 steps it is set
//           to the k-th magnitude. Between, it is raised by 3 % (up to 5 times) while more than 4k/3 entries
//           reach it, and moves by 1.2 % for the next step if fewer than 2k/3 or more than 5k/4 did
//   Step 2  every 64 steps new regions: boundary i is the mean over ranks of the index of their (i s/P)-th
//           of s entries (all-reduce, 64-bit)
//   Step 3  split and reduce: entries of region j go straight to rank j, destinations rotated; it adds them,
//           in rank order
//   Step 4  every 32 steps all sums are gathered and the global threshold is set to their k-th magnitude:
//           that is the result. Between, an owner keeps the sums that reach the global threshold
//   Step 5  the counts are gathered; entries move until all ranks have the same number
//   Step 6  Bruck all-gather of these lists. The global threshold moves by 0.8 % for the next step if the
//           result has fewer than 3k/4 or more than 5k/4 entries
//   Step 7  the residual rule
//
// Rounds of a step that evaluates nothing: 2 (P-1) + 2 L, L = ceil(log2 P). Entries sent by a rank:
// 3k (P-1)/P if k are selected and k are in the result, k (P-1)/P in each of steps 3, 5 and 6. Both are only
// about k, so the bound is soft; balanced data needs little of step 5. Beside the heads of lists, 8 (P-1)
// bytes of counts. A step that evaluates the global threshold gathers all sums instead.
//
// Thresholds and regions are state of the vector (call.h), staged until the step commits. The global
// threshold and the regions come from what all ranks know, so they are the same everywhere; the local one is
// a rank's own business.
//
// Beyond the paper: a threshold that is far off (fewer than k/2 entries or more than 2k) is evaluated at
// once, the local one in the same step, the global one in the next; so is everything when the number of ranks
// has changed, or k to more than twice or less than half. Where k moves by less, as adaptive quotas do every
// step, thresholds follow it half of the way, by the tail that quotas assume (base/tail.h). The global
// threshold turns at 3k/4 and 5k/4 instead of 2k/3 and 4k/3: before the result leaves that band, not after.
//
// Residuals: pres is the published rule, and exact, as an entry that an owner drops comes back to all who
// sent it; so is gres. drop leaves it with the owner and conserves too; lres loses it. With packed-bf16 only
// gres and drop keep the rounding errors.
//
// Li and Hoefler, PPoPP 2022.
#include <algorithm>
#include <string>
#include <utility>
#include <variant>

#include "collectives/registry.h"
#include "collectives/sparse_allreduce/lists.h"
#include "collectives/sparse_allreduce/oktopk_operation.h"
#include "patterns/bruck.h"
#include "weft/error.h"

namespace weft {

namespace {

constexpr std::int64_t kNotFinite = std::int64_t{1} << 62;  // in a count

[[noreturn]] void refuse(const std::string& what, int peer) {
  throw TransportError(TransportError::Kind::corrupt, peer, "oktopk: a " + what + " that cannot be");
}

// Steps 5 and 6.
Task<void> gather_kept(Comm comm, OkOperation& op) {
  std::vector<std::int64_t> counts(static_cast<std::size_t>(op.size));
  counts[op.me] = op.non_finite ? kNotFinite : static_cast<std::int64_t>(op.kept.size());
  co_await gather_numbers(comm, op.call, counts);
  op.non_finite = std::find(counts.begin(), counts.end(), kNotFinite) != counts.end();
  if (op.non_finite) co_return;
  for (std::size_t r = 0; r < counts.size(); ++r) {
    if (counts[r] < 0 || counts[r] > op.region_length(r)) refuse("count", static_cast<int>(r));
  }
  const Balance balance(counts, op.next);
  ListExchange exchange(op.size);
  auto part = [&] {
    exchange = balancing(op, balance);
    op.call.spend(op.call.kernels->move_entry, op.kept.size());
    return op.call.spent();
  };
  co_await comm.compute(part);
  auto hop = static_cast<std::uint32_t>(log2_ceil(op.size));
  co_await exchange_lists(comm.hops_from(hop), op.call, exchange);
  // Step 6
  hop += static_cast<std::uint32_t>(op.size - 1);
  ListGather gather{.lists = op.call.work->lists};
  std::vector<std::int64_t> bases;
  for (std::size_t r = 0; r < counts.size(); ++r) {
    const auto [begin, end] = balance.range(r);
    gather.bounds.push_back({.length = end - begin, .max_count = balance.wanted[r + 1] - balance.wanted[r]});
    bases.push_back(begin);
  }
  auto join = [&] {
    Entries mine;
    append_lists(exchange.incoming, op.next.regions, mine);
    op.call.spend(2 * op.call.kernels->move_entry, mine.size());
    for (std::uint32_t& i : mine.indices) i -= static_cast<std::uint32_t>(bases[op.me]);
    gather.lists[op.me] = std::move(mine);
    return op.call.spent();
  };
  co_await comm.compute(join);
  co_await gather_lists(comm.hops_from(hop), op.call, gather);
  op.non_finite = gather.non_finite;
  auto finish = [&] {
    append_lists(gather.lists, bases, op.result());
    op.call.spend(op.call.kernels->move_entry, op.result().size());
    return op.call.spent();
  };
  co_await comm.compute(finish);
  const std::int64_t total = balance.total();
  if (4 * total < 3 * op.call.k) op.next.global /= 1.008F;
  if (4 * total > 5 * op.call.k) op.next.global *= 1.008F;
  if (op.far_off(total)) op.next.global = 0;
}

// Step 4 with evaluation.
Task<void> gather_sums(Comm comm, OkOperation& op) {
  ListGather gather{.lists = op.call.work->lists, .non_finite = op.non_finite};
  for (std::size_t r = 0; r < static_cast<std::size_t>(op.size); ++r) {
    gather.bounds.push_back({.length = op.region_length(r), .max_count = op.region_length(r)});
  }
  gather.lists[op.me] = op.sums;
  co_await gather_lists(comm, op.call, gather);
  op.non_finite = gather.non_finite;
  if (op.non_finite) co_return;
  auto finish = [&] {
    op.finish_evaluation(gather.lists);
    return op.call.spent();
  };
  co_await comm.compute(finish);
}

// Step 2: the mean of what the ranks propose. Fewer than 2 size hops.
Task<void> agree_on_regions(Comm comm, OkOperation& op) {
  const std::span<std::int64_t> inner =
      std::span(op.next.regions).subspan(1, static_cast<std::size_t>(op.size - 1));
  const Dense data(inner);
  const Shape shape{.size = op.size,
                    .count = data.count,
                    .element_bytes = 8,
                    .node_size = comm.node_size(),
                    .micro_op_bytes = comm.micro_op_bytes()};
  AllReduceRun* const run = std::get<AllReduceRun*>(choose(Family::all_reduce, shape, comm.cost()).run);
  const std::uint64_t before = comm.bytes_sent();
  co_await run(comm, data, Reduction::sum, shape);
  op.call.result->entry_bytes_sent += comm.bytes_sent() - before;
  for (std::int64_t& boundary : inner) boundary /= op.size;
  const std::vector<std::int64_t>& regions = op.next.regions;
  if (!std::is_sorted(regions.begin(), regions.end())) refuse("boundary", -1);
}

}  // namespace

Task<void> oktopk(Comm comm, SparseCall call) {
  OkOperation op(comm, call);
  // Step 1
  auto select = [&op] {
    op.select_local();
    return op.call.spent();
  };
  co_await comm.compute(select);
  // Step 2
  std::uint32_t hop = 0;
  if (op.repartition) {
    op.propose_regions();
    co_await agree_on_regions(comm, op);
    hop += static_cast<std::uint32_t>(2 * comm.size());
  }
  // Step 3
  auto split = [&op] {
    op.split();
    return op.call.spent();
  };
  co_await comm.compute(split);
  co_await exchange_lists(comm.hops_from(hop), call, op.exchange);
  hop += static_cast<std::uint32_t>(comm.size() - 1);
  auto add = [&op] {
    op.add();
    return op.call.spent();
  };
  co_await comm.compute(add);
  // Steps 4 to 6
  if (op.evaluate_global) {
    co_await gather_sums(comm.hops_from(hop), op);
  } else {
    auto filter = [&op] {
      op.filter();
      return op.call.spent();
    };
    co_await comm.compute(filter);
    co_await gather_kept(comm.hops_from(hop), op);
  }
  // Step 7
  call.result->finite = !op.non_finite;
  if (op.non_finite) co_return;
  auto settle = [&op] {
    op.keep_what_was_dropped();
    op.settle();
    return op.call.spent();
  };
  co_await comm.compute(settle);
}

}  // namespace weft
