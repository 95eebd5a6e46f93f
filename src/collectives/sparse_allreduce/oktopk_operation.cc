#include "collectives/sparse_allreduce/oktopk_operation.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/tail.h"
#include "kernels/sparse.h"

namespace weft {

namespace {

constexpr std::int64_t kEvaluateEvery = 32;
constexpr std::int64_t kRegionsEvery = 64;

// The least magnitude of a list; 0 if it is empty.
float least_magnitude(EntriesView entries) {
  std::uint32_t least = kInfinityKey;
  for (const float v : entries.values) least = std::min(least, magnitude_key(v));
  return entries.empty() ? 0.0F : std::bit_cast<float>(least);
}

// By how much a threshold moves when `k` of n elements shall reach it instead of `before`, by the tail that
// quotas assume. Only half of the way, as a quota moves where its data has: if that has grown, more elements
// reach the threshold anyway. (All of the way, quotas and thresholds chase each other.)
float follow(std::int64_t before, std::int64_t k, std::int64_t n) {
  const auto scales = [n](std::int64_t count) {
    return tail_inverse(static_cast<double>(count) / static_cast<double>(n));
  };
  return static_cast<float>(std::sqrt(scales(k) / scales(before)));
}

// Whether thresholds for `before` entries say something about k of them.
bool comparable(std::int64_t before, std::int64_t k, std::int64_t n) {
  return std::max(before, k) < n && before <= 2 * k && k <= 2 * before;
}

}  // namespace

void append_lists(std::span<const Entries> lists, std::span<const std::int64_t> bases, Entries& out) {
  for (std::size_t j = 0; j < lists.size(); ++j) {
    const auto base = static_cast<std::uint32_t>(bases[j]);
    for (const std::uint32_t index : lists[j].indices) out.indices.push_back(index + base);
    out.values.insert(out.values.end(), lists[j].values.begin(), lists[j].values.end());
  }
}

OkOperation::OkOperation(const Comm& comm, const SparseCall& c)
    : WholeOperation(c),
      size(comm.size()),
      me(static_cast<std::size_t>(comm.rank())),
      next(c.work->next_thresholds),
      exchange(comm.size()) {
  const bool same_k = next.k == call.k;
  const bool other_call = !(same_k || comparable(next.k, call.k, length())) ||
                          next.regions.size() != static_cast<std::size_t>(size) + 1;
  if (!same_k && !other_call) {
    const float moved = follow(next.k, call.k, length());
    next.local *= moved;
    next.global *= moved;
  }
  evaluate_local = other_call || next.steps % kEvaluateEvery == 0 || next.local == 0;
  evaluate_global = other_call || next.steps % kEvaluateEvery == 0 || next.global == 0;
  repartition = other_call || next.steps % kRegionsEvery == 0;
  next.k = call.k;
  ++next.steps;
  call.work->lists.resize(static_cast<std::size_t>(size));
}

void OkOperation::select_local() {
  if (evaluate_local) {
    select();
    next.local = least_magnitude(selected());
    return round_selected();
  }
  const Stopwatch watch(call.result->select_seconds);
  SparseWork& work = *call.work;
  std::uint32_t bar = std::max(magnitude_key(next.local), 1u);
  work.candidates.blocks.resize(1);
  BlockCandidates& found = work.candidates.blocks[0];
  found.threshold = bar;
  found.quota = call.k;
  non_finite = !accumulate(call.step(), whole, work.candidates, call.threads).finite;
  call.spend_pass();
  if (non_finite) return;
  if (!found.complete || far_off(static_cast<std::int64_t>(found.count))) {
    const std::int64_t readings = call.readings(0);
    non_finite = !cut(work.staged, whole, 0, call.k, work.candidates, selected());
    call.spend_cut(0, length(), readings);
    next.local = least_magnitude(selected());
    return round_selected();
  }
  const auto reach = [&](std::uint32_t key) {
    return std::count_if(found.indices().begin(), found.indices().end(),
                         [&](std::uint32_t i) { return magnitude_key(work.staged[i]) >= key; });
  };
  auto count = static_cast<std::int64_t>(found.count);
  for (int raised = 0; raised < 5 && 3 * count > 4 * call.k; ++raised) {
    next.local *= 1.03F;
    bar = magnitude_key(next.local);
    count = reach(bar);
  }
  for (const std::uint32_t i : found.indices()) {
    if (magnitude_key(work.staged[i]) < bar) continue;
    selected().push_back(i, std::exchange(work.staged[i], 0.0F));
  }
  call.spend(call.kernels->scatter_entry, found.count);
  if (3 * count < 2 * call.k) next.local /= 1.012F;
  if (4 * count > 5 * call.k) next.local *= 1.012F;
  round_selected();
}

void OkOperation::propose_regions() {
  next.regions.assign(static_cast<std::size_t>(size) + 1, 0);
  next.regions.back() = length();
  const std::vector<std::uint32_t>& places = selected().indices;
  const auto count = static_cast<std::int64_t>(places.size());
  for (std::int64_t i = 1; i < size; ++i) {
    next.regions[static_cast<std::size_t>(i)] =
        count == 0 ? length() * i / size : std::int64_t{places[static_cast<std::size_t>(i * count / size)]};
  }
}

void OkOperation::split() {
  const Stopwatch watch(call.result->select_seconds);
  const EntriesView all = selected();
  std::size_t i = 0;
  for (std::size_t j = 0; j < static_cast<std::size_t>(size); ++j) {
    const std::int64_t begin = next.regions[j];
    for (; i < all.size() && all.indices[i] < next.regions[j + 1]; ++i) {
      exchange.outgoing[j].push_back(all.indices[i] - static_cast<std::uint32_t>(begin), all.values[i]);
    }
    exchange.sent[j] = {.length = region_length(j), .max_count = region_length(j)};
  }
  call.spend(call.kernels->move_entry, all.size());
  exchange.received.assign(static_cast<std::size_t>(size), exchange.sent[me]);
  exchange.incoming = call.work->lists;
  exchange.incoming[me] = exchange.outgoing[me];
  exchange.non_finite = non_finite;
}

void OkOperation::add() {
  non_finite |= exchange.non_finite || !sum_lists(exchange.incoming, region_length(me), sums);
  spend_sum(call, exchange.incoming);
  if (non_finite || call.codec != wire::SparseCodec::packed_bf16) return;
  Entries shifted = sums;
  for (std::uint32_t& i : shifted.indices) i += static_cast<std::uint32_t>(next.regions[me]);
  round(shifted);
  sums.values = shifted.values;
}

void OkOperation::filter() {
  const Stopwatch watch(call.result->select_seconds);
  const std::uint32_t bar = magnitude_key(next.global);
  call.spend(call.kernels->move_entry, sums.size());
  for (std::size_t i = 0; i < sums.size(); ++i) {
    if (magnitude_key(sums.values[i]) >= bar) kept.push_back(sums.indices[i], sums.values[i]);
  }
}

void OkOperation::finish_evaluation(std::span<const Entries> all_sums) {
  const Stopwatch watch(call.result->select_seconds);
  Entries& out = result();
  append_lists(all_sums, next.regions, out);
  call.spend(call.kernels->move_entry + call.kernels->keep_entry, out.size());
  Entries discards;
  keep_largest(out, call.k, discards);
  next.global = least_magnitude(out);
}

void OkOperation::keep_what_was_dropped() {
  Entries dropped;
  const auto base = static_cast<std::uint32_t>(next.regions[me]);
  const std::vector<std::uint32_t>& in_result = result().indices;
  auto at = in_result.begin();
  call.spend(call.kernels->unite_index, sums.size() + in_result.size());
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const std::uint32_t index = sums.indices[i] + base;
    at = std::lower_bound(at, in_result.end(), index);
    if (at == in_result.end() || *at != index) dropped.push_back(index, sums.values[i]);
  }
  keep(dropped);
}

Balance::Balance(const std::vector<std::int64_t>& counts, const Thresholds& thresholds)
    : regions(thresholds.regions) {
  for (const std::int64_t count : counts) held.push_back(held.back() + count);
  const auto size = static_cast<std::int64_t>(counts.size());
  for (std::int64_t r = 0; r <= size; ++r)
    wanted.push_back(r * (total() / size) + std::min(r, total() % size));
}

std::pair<std::int64_t, std::int64_t> Balance::range(std::size_t r) const {
  if (wanted[r] == wanted[r + 1]) return {0, 0};
  const auto region_of = [&](std::int64_t entry) {
    return std::upper_bound(held.begin(), held.end(), entry) - held.begin() - 1;
  };
  return {regions[static_cast<std::size_t>(region_of(wanted[r]))],
          regions[static_cast<std::size_t>(region_of(wanted[r + 1] - 1) + 1)]};
}

ListExchange balancing(const OkOperation& op, const Balance& balance) {
  ListExchange exchange(op.size);
  exchange.incoming = op.call.work->lists;
  for (std::size_t j = 0; j < static_cast<std::size_t>(op.size); ++j) {
    const auto [first, last] = balance.moved(op.me, j);
    for (std::int64_t i = first; i < last; ++i) {
      const auto at = static_cast<std::size_t>(i - balance.held[op.me]);
      exchange.outgoing[j].push_back(op.kept.indices[at], op.kept.values[at]);
    }
    exchange.sent[j].length = first < last ? op.region_length(op.me) : ListBounds::kNone;
    const auto [begin, end] = balance.moved(j, op.me);
    exchange.received[j] = {.length = begin < end ? op.region_length(j) : ListBounds::kNone,
                            .max_count = end - begin};
    exchange.incoming[j].clear();
  }
  exchange.incoming[op.me] = exchange.outgoing[op.me];
  return exchange;
}

}  // namespace weft
