#include "kernels/select.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <functional>
#include <string>
#include <thread>

#include "base/identity.h"
#include "kernels/radix.h"
#include "kernels/scan.h"
#include "weft/error.h"

namespace weft {

namespace {

using kernels::Bar;
using kernels::find_bar;

// How much is looked at to estimate thresholds: enough for the number that passes to be known within a few
// per cent. Elements are taken by eight, since a cache line costs the same; more at a time would see too few
// places of data that comes in rows.
constexpr std::int64_t kHitsWanted = 256;  // sampled elements above the threshold
constexpr std::int64_t kLeastSample = 4096;
constexpr std::int64_t kMostSample = 1 << 18;
constexpr std::int64_t kTogether = 8;
static_assert(Deal::kRun % kTogether == 0, "elements taken together are neighbours in the vector");

// A block with more candidates than this is read again instead.
std::int64_t most_candidates(std::int64_t quota, std::int64_t count) {
  return std::min(count, 4 * quota + 4096);
}

void check(const StagedStep& step, const Deal& deal) {
  const auto n = static_cast<std::size_t>(deal.total());
  if (step.gradient.size() != n || step.staged.size() != n ||
      (step.residual.size() != n && !step.residual.empty())) {
    throw UsageError("selection over " + std::to_string(n) + " elements got a gradient of " +
                     std::to_string(step.gradient.size()) + ", a residual of " +
                     std::to_string(step.residual.size()) + " and room for " +
                     std::to_string(step.staged.size()));
  }
  if (deal.longest() > 0xffff'ffffll) {
    throw UsageError("a block of " + std::to_string(deal.longest()) +
                     " elements is too long: 2^32 - 1 at most");
  }
}

std::uint32_t key_at(const StagedStep& step, std::size_t at) {
  return magnitude_key(step.residual.empty() ? step.gradient[at] : step.gradient[at] + step.residual[at]);
}

// Keys of a fixed sample of `count` elements with `quota` to be found: one group of neighbours from each of
// many equal parts, at a hashed place, so that every layer is seen in proportion. Of few elements all are
// taken. `at` gives the place of the n-th element; eight from a multiple of eight are neighbours.
template <class At>
void take_sample(const StagedStep& step, std::int64_t count, std::int64_t quota, const At& at,
                 std::vector<std::uint32_t>& keys) {
  const std::int64_t wanted = static_cast<std::int64_t>(
      static_cast<double>(kHitsWanted) * static_cast<double>(count) / static_cast<double>(quota));
  const std::int64_t size = std::clamp(wanted, kLeastSample, kMostSample);
  keys.clear();
  if (size >= count / 2) {
    for (std::int64_t i = 0; i < count; ++i) keys.push_back(key_at(step, at(i)));
    return;
  }
  const std::int64_t groups = count / kTogether;
  const std::int64_t parts = size / kTogether;
  constexpr std::int64_t kBatch = 32;
  std::array<std::size_t, kBatch> places;
  for (std::int64_t first = 0; first < parts; first += kBatch) {
    const std::int64_t batch = std::min(kBatch, parts - first);
    for (std::int64_t i = 0; i < batch; ++i) {
      const std::int64_t begin = (first + i) * groups / parts;
      const std::int64_t end = (first + i + 1) * groups / parts;
      const std::uint64_t hash = mix(static_cast<std::uint64_t>(first + i)) >> 32;
      const auto jitter = static_cast<std::int64_t>((hash * static_cast<std::uint64_t>(end - begin)) >> 32);
      const std::size_t place = at((begin + jitter) * kTogether);
      places[static_cast<std::size_t>(i)] = place;
      __builtin_prefetch(&step.gradient[place]);
      if (!step.residual.empty()) __builtin_prefetch(&step.residual[place]);
    }
    for (std::int64_t i = 0; i < batch; ++i) {
      const std::size_t place = places[static_cast<std::size_t>(i)];
      for (std::size_t j = 0; j < static_cast<std::size_t>(kTogether); ++j)
        keys.push_back(key_at(step, place + j));
    }
  }
}

// Which of the sample's keys, counted from the largest, somewhat more than `wanted` of a block's `count`
// elements reach. The margin is three standard deviations of the hits in the sample, and of those in the
// block if the sample is not its own.
std::int64_t rank_in_sample(std::size_t sample, double wanted, std::int64_t count, bool shared) {
  const double hits = static_cast<double>(sample) * wanted / static_cast<double>(count);
  const double variance = hits + (shared ? hits * hits / wanted : 0.0);
  return static_cast<std::int64_t>(hits + 3 * std::sqrt(variance)) + 2;
}

// The thresholds of blocks [first, last) from one sample: its largest keys are put in order, and each block
// takes its rank.
void set_thresholds(std::span<BlockCandidates> blocks, const Deal& deal, int first,
                    std::vector<std::uint32_t>& sample) {
  const bool shared = blocks.size() > 1;
  std::int64_t deepest = 0;
  const auto rank_of = [&](std::size_t b) {
    const double wanted = blocks[b].aim * static_cast<double>(blocks[b].quota);
    return rank_in_sample(sample.size(), wanted, deal.count(first + static_cast<int>(b)), shared);
  };
  const auto size = static_cast<std::int64_t>(sample.size());
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    if (blocks[b].quota == 0) continue;
    if (const std::int64_t rank = rank_of(b); rank < size) deepest = std::max(deepest, rank);
  }
  const auto end = sample.begin() + deepest;
  std::nth_element(sample.begin(), end, sample.end(), std::greater<>());
  std::sort(sample.begin(), end, std::greater<>());
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    const std::int64_t rank = blocks[b].quota == 0 ? 0 : rank_of(b);
    if (rank == 0)
      blocks[b].threshold = kInfinityKey;  // nothing is wanted
    else
      blocks[b].threshold = rank < size ? std::max(sample[static_cast<std::size_t>(rank) - 1], 1u) : 1u;
  }
}

// Runs work(0) .. work(tasks - 1), one of them on this thread.
template <class Work>
void run_all(int tasks, const Work& work) {
  std::vector<std::thread> others;
  for (int i = 1; i < tasks; ++i) others.emplace_back(work, i);
  work(0);
  for (std::thread& other : others) other.join();
}

// The pass over elements [begin, end); candidates go into `into`, one for each block. Returns the largest
// key.
std::uint32_t scan_range(const StagedStep& step, const Deal& deal, std::int64_t begin, std::int64_t end,
                         std::vector<BlockCandidates>& into, std::vector<kernels::ScanBlock>& blocks) {
  blocks.resize(into.size());
  for (std::size_t b = 0; b < into.size(); ++b) {
    const auto limit =
        static_cast<std::size_t>(most_candidates(into[b].quota, deal.count(static_cast<int>(b))));
    const std::size_t room = limit + static_cast<std::size_t>(kernels::kScanChunk);
    if (into[b].room.size() < room) into[b].room.resize(room);
    blocks[b] = {.threshold = into[b].threshold,
                 .indices = into[b].room.data(),
                 .count = 0,
                 .limit = limit,
                 .open = true};
  }
  kernels::ScanState state{.gradient = step.gradient.data(),
                           .residual = step.residual.empty() ? nullptr : step.residual.data(),
                           .staged = step.staged.data(),
                           .blocks = blocks.data(),
                           .largest = 0};
  const kernels::Scan scan = kernels::fastest_scan();
  std::array<Deal::Run, 128> batch;
  std::size_t filled = 0;
  deal.for_each_run(begin, end, [&](const Deal::Run& run) {
    batch[filled++] = run;
    if (filled < batch.size()) return;
    scan(batch, state);
    filled = 0;
  });
  scan(std::span(batch).first(filled), state);
  for (std::size_t b = 0; b < into.size(); ++b) {
    into[b].count = blocks[b].count;
    into[b].complete = blocks[b].open;
  }
  return state.largest;
}

// Appends what the other threads found, in the order of the vector.
void join(std::vector<BlockCandidates>& into, const std::vector<BlockCandidates>& more) {
  for (std::size_t b = 0; b < into.size(); ++b) {
    BlockCandidates& block = into[b];
    block.complete = block.complete && more[b].complete;
    if (!block.complete) continue;
    const std::size_t count = block.count + more[b].count;
    if (block.room.size() < count) block.room.resize(count);
    std::copy_n(more[b].room.begin(), more[b].count,
                block.room.begin() + static_cast<std::ptrdiff_t>(block.count));
    block.count = count;
  }
}

// Step 1 of a cut: candidates that still reach the threshold, to block.scratch and block.values. Returns how
// many. Their cache lines are fetched a batch ahead of their use.
std::size_t take_candidates(std::span<const float> staged, const Deal& deal, int number,
                            BlockCandidates& block) {
  constexpr std::size_t kBatch = 32;
  const std::size_t count = block.count;
  if (block.scratch.size() < count) block.scratch.resize(count);
  if (block.values.size() < count) block.values.resize(count);
  std::array<std::size_t, 2 * kBatch> places;
  const auto fetch = [&](std::size_t first) {
    for (std::size_t i = first; i < std::min(first + kBatch, count); ++i) {
      const auto at = static_cast<std::size_t>(deal.global(number, block.room[i]));
      places[i % (2 * kBatch)] = at;
      __builtin_prefetch(&staged[at]);
    }
  };
  fetch(0);
  std::size_t taken = 0;
  for (std::size_t first = 0; first < count; first += kBatch) {
    fetch(first + kBatch);
    for (std::size_t i = first; i < std::min(first + kBatch, count); ++i) {
      const float value = staged[places[i % (2 * kBatch)]];
      block.scratch[taken] = block.room[i];
      block.values[taken] = value;
      taken += magnitude_key(value) >= block.threshold ? 1 : 0;
    }
  }
  return taken;
}

// Step 2: takes those of `count` candidates that pass the bar, in the order of their indices. Returns the
// largest key.
std::uint32_t emit_candidates(std::span<float> staged, const Deal& deal, int number, Bar bar,
                              std::size_t count, const BlockCandidates& block, Entries& out) {
  std::size_t emitted = 0;
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t key = magnitude_key(block.values[i]);
    if (key < bar.key || (key == bar.key && bar.ties-- <= 0)) continue;
    largest = std::max(largest, key);
    staged[static_cast<std::size_t>(deal.global(number, block.scratch[i]))] = 0.0f;
    out.indices[emitted] = block.scratch[i];
    out.values[emitted] = block.values[i];
    ++emitted;
  }
  return largest;
}

// Visits the runs of a block that lies scattered in memory, fetching a few runs ahead: the processor would
// not guess them.
template <class Visit>
void read_runs(std::span<const float> staged, const Deal& deal, int number, const Visit& visit) {
  constexpr std::int64_t kAhead = 8 * Deal::kRun;
  constexpr std::size_t kLine = 16;
  const std::int64_t count = deal.count(number);
  deal.for_each_run_of(number, [&](const Deal::Run& run) {
    if (run.length == Deal::kRun && run.local + kAhead + Deal::kRun <= count) {
      const float* next = staged.data() + deal.global(number, run.local + kAhead);
      for (std::size_t i = 0; i < static_cast<std::size_t>(Deal::kRun); i += kLine)
        __builtin_prefetch(next + i);
    }
    visit(run);
  });
}

// Moves the block's aim, so that in the next step as many candidates reach its threshold at the cut as an
// estimate's margin says. A part of the way, as numbers of single steps scatter; and not below the quota: how
// many of those that arrive reach a threshold scatters more, and a block that is read again costs most.
void learn(std::size_t reached, std::int64_t quota, BlockCandidates& block) {
  const auto wanted = static_cast<double>(quota);
  const double margin = 3 * std::sqrt(wanted + wanted * wanted / kHitsWanted);
  const double ratio = (wanted + margin) / static_cast<double>(std::max(reached, std::size_t{1}));
  block.aim = std::clamp(block.aim * std::sqrt(std::sqrt(ratio)), 1.0, 16.0);
}

// The whole block read again: three times for the bar, once to take what passes it. Returns the largest key.
std::uint32_t cut_by_reading(std::span<float> staged, const Deal& deal, int number, std::int64_t quota,
                             Entries& out) {
  Bar bar = find_bar(quota, [&](auto&& f) {
    read_runs(staged, deal, number, [&](const Deal::Run& run) {
      for (const float x :
           staged.subspan(static_cast<std::size_t>(run.first), static_cast<std::size_t>(run.length))) {
        f(magnitude_key(x));
      }
    });
  });
  out.clear();
  std::uint32_t largest = 0;
  read_runs(staged, deal, number, [&](const Deal::Run& run) {
    for (std::int64_t i = 0; i < run.length; ++i) {
      float& x = staged[static_cast<std::size_t>(run.first + i)];
      const std::uint32_t key = magnitude_key(x);
      if (key == 0 || key < bar.key || (key == bar.key && bar.ties-- <= 0)) continue;
      largest = std::max(largest, key);
      out.push_back(static_cast<std::uint32_t>(run.local + i), x);
      x = 0.0f;
    }
  });
  return largest;
}

Verdict find_non_finite(std::span<const float> staged) {
  const auto found =
      std::find_if(staged.begin(), staged.end(), [](float x) { return magnitude_key(x) >= kInfinityKey; });
  return {.finite = false, .first_non_finite = found - staged.begin()};
}

}  // namespace

void estimate_thresholds(const StagedStep& step, const Deal& deal, std::span<const std::int64_t> quotas,
                         Candidates& candidates) {
  check(step, deal);
  candidates.sampled = 0;
  const auto blocks = static_cast<std::size_t>(deal.blocks());
  if (quotas.size() != blocks) {
    throw UsageError(std::to_string(quotas.size()) + " quotas for " + std::to_string(blocks) + " blocks");
  }
  candidates.blocks.resize(blocks);
  std::int64_t wanted = 0;
  for (std::size_t b = 0; b < blocks; ++b) {
    candidates.blocks[b].quota = std::clamp(quotas[b], std::int64_t{0}, deal.count(static_cast<int>(b)));
    wanted += candidates.blocks[b].quota;
  }
  if (wanted == 0) return set_thresholds(candidates.blocks, deal, 0, candidates.sample);
  if (deal.kind() == Deal::Kind::dealt) {  // every block is a fair sample itself, so one will do
    take_sample(
        step, deal.total(), wanted, [](std::int64_t i) { return static_cast<std::size_t>(i); },
        candidates.sample);
    candidates.sampled = static_cast<std::int64_t>(candidates.sample.size());
    return set_thresholds(candidates.blocks, deal, 0, candidates.sample);
  }
  for (std::size_t b = 0; b < blocks; ++b) {
    const auto number = static_cast<int>(b);
    const std::int64_t quota = std::max(candidates.blocks[b].quota, std::int64_t{1});
    const auto at = [&](std::int64_t i) { return static_cast<std::size_t>(deal.global(number, i)); };
    take_sample(step, deal.count(number), quota, at, candidates.sample);
    candidates.sampled += static_cast<std::int64_t>(candidates.sample.size());
    set_thresholds(std::span(candidates.blocks).subspan(b, 1), deal, number, candidates.sample);
  }
}

Verdict accumulate(const StagedStep& step, const Deal& deal, Candidates& candidates, int threads) {
  check(step, deal);
  if (candidates.blocks.size() != static_cast<std::size_t>(deal.blocks())) {
    throw UsageError("selection without thresholds for its blocks");
  }
  // Ranges begin at whole runs, so that no chunk of the scan is cut.
  const std::int64_t runs = deal.total() / Deal::kRun;
  const int parts =
      static_cast<int>(std::clamp(runs, std::int64_t{1}, static_cast<std::int64_t>(std::max(threads, 1))));
  const Blocks ranges(parts, runs);
  const auto begin = [&](int part) { return part == parts ? deal.total() : ranges.begin(part) * Deal::kRun; };
  candidates.of_thread.resize(std::max(candidates.of_thread.size(), static_cast<std::size_t>(parts) - 1));
  candidates.scans.resize(std::max(candidates.scans.size(), static_cast<std::size_t>(parts)));
  std::vector<std::uint32_t>& largest = candidates.sample;  // free by now
  largest.assign(static_cast<std::size_t>(parts), 0);
  run_all(parts, [&](int part) {
    const auto p = static_cast<std::size_t>(part);
    if (part > 0) {
      candidates.of_thread[p - 1].resize(candidates.blocks.size());
      for (std::size_t b = 0; b < candidates.blocks.size(); ++b) {
        candidates.of_thread[p - 1][b].threshold = candidates.blocks[b].threshold;
        candidates.of_thread[p - 1][b].quota = candidates.blocks[b].quota;
      }
    }
    largest[p] = scan_range(step, deal, begin(part), begin(part + 1),
                            part > 0 ? candidates.of_thread[p - 1] : candidates.blocks, candidates.scans[p]);
  });
  for (int part = 1; part < parts; ++part)
    join(candidates.blocks, candidates.of_thread[static_cast<std::size_t>(part) - 1]);
  if (*std::max_element(largest.begin(), largest.end()) >= kInfinityKey) return find_non_finite(step.staged);
  return {};
}

void arrived(std::span<const std::uint32_t> indices, int block, Candidates& candidates) {
  BlockCandidates& into = candidates.blocks[static_cast<std::size_t>(block)];
  if (!into.complete || indices.empty()) return;  // it will be read anyway
  const std::size_t most = into.count + indices.size();
  if (into.scratch.size() < most) into.scratch.resize(most);
  // The union of two increasing lists, without a branch that could be guessed wrong.
  const std::span<const std::uint32_t> mine = into.indices();
  std::size_t i = 0;
  std::size_t j = 0;
  std::size_t count = 0;
  while (i < mine.size() && j < indices.size()) {
    const std::uint32_t a = mine[i];
    const std::uint32_t b = indices[j];
    into.scratch[count++] = std::min(a, b);
    i += a <= b ? 1 : 0;
    j += b <= a ? 1 : 0;
  }
  const auto end = std::copy(mine.begin() + static_cast<std::ptrdiff_t>(i), mine.end(),
                             into.scratch.begin() + static_cast<std::ptrdiff_t>(count));
  const auto last = std::copy(indices.begin() + static_cast<std::ptrdiff_t>(j), indices.end(), end);
  into.count = static_cast<std::size_t>(last - into.scratch.begin());
  std::swap(into.room, into.scratch);
}

bool cut(std::span<float> staged, const Deal& deal, int block, std::int64_t quota, Candidates& candidates,
         Entries& out) {
  quota = std::clamp(quota, std::int64_t{0}, deal.count(block));
  if (quota == 0) {
    out.clear();
    return true;
  }
  BlockCandidates& pool = candidates.blocks[static_cast<std::size_t>(block)];
  const std::size_t count = pool.complete ? take_candidates(staged, deal, block, pool) : pool.count;
  const auto wanted = static_cast<std::size_t>(quota);
  if (pool.threshold > 1) learn(count, quota, pool);
  if (!pool.complete || (count < wanted && pool.threshold > 1)) {
    ++pool.read_again;
    return cut_by_reading(staged, deal, block, quota, out) < kInfinityKey;
  }
  Bar bar;  // passed by all
  if (count > wanted) {
    bar = find_bar(quota, [&](auto&& f) {
      for (std::size_t i = 0; i < count; ++i) f(magnitude_key(pool.values[i]));
    });
  }
  out.resize(std::min(count, wanted));
  return emit_candidates(staged, deal, block, bar, count, pool, out) < kInfinityKey;
}

Verdict select_topk(const StagedStep& step, const Deal& deal, std::span<const std::int64_t> quotas,
                    Candidates& candidates, std::span<Entries> out, int threads) {
  if (out.size() != static_cast<std::size_t>(deal.blocks()))
    throw UsageError("selection needs a list for each block");
  estimate_thresholds(step, deal, quotas, candidates);
  const Verdict verdict = accumulate(step, deal, candidates, threads);
  if (!verdict.finite) return verdict;
  const int workers = std::clamp(threads, 1, deal.blocks());
  run_all(workers, [&](int worker) {
    for (int b = worker; b < deal.blocks(); b += workers) {
      const auto i = static_cast<std::size_t>(b);
      cut(step.staged, deal, b, quotas[i], candidates, out[i]);
    }
  });
  return verdict;
}

}  // namespace weft
