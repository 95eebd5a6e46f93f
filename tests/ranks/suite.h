// The rank suite: every row of every table, checked on one rank against the reference. Each rank knows all
// ranks' inputs, so it needs nobody to compare: equal to the reference on every rank is the same bits on
// every rank. Runs on any transport.
//
// As soon as an operation is done its memory is poisoned, so that a rank that still reads it fails.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "collectives/registry.h"
#include "ranks/spawn.h"
#include "reference/reductions.h"
#include "weft/collective.h"
#include "weft/error.h"

namespace weft::test {

inline bool full_grid() {
  const char* grid = std::getenv("WEFT_TEST_GRID");
  return grid != nullptr && std::string(grid) == "full";
}

inline constexpr DType kNumbers[] = {DType::float32, DType::float64, DType::bfloat16,
                                     DType::float16, DType::int32,   DType::int64};
inline constexpr Reduction kReductions[] = {Reduction::sum, Reduction::min, Reduction::max};
inline std::vector<std::int64_t> lengths() { return {0, 1, 7, 64, 1000, full_grid() ? 33333 : 4099}; }
inline constexpr std::size_t kMicroOps[] = {0, 1, 24, 1000};  // 0: one piece here; 1: one element a piece

struct Case {
  std::string_view algorithm;
  DType dtype = DType::float32;
  Reduction reduction = Reduction::sum;
  std::int64_t length = 0;
  std::size_t micro_op_bytes = 0;
  bool whole = false;  // whole numbers, which sum exactly
  std::uint64_t seed = 0;
  int node_size = 0;  // 0: the group's, which is 1

  std::string text(int size) const {
    return std::string(algorithm) + " size " + std::to_string(size) + " " + std::string(name_of(dtype)) +
           " " + std::string(name_of(reduction)) + " length " + std::to_string(length) + " micro-op " +
           std::to_string(micro_op_bytes) + (whole ? " whole" : "") + " seed " + std::to_string(seed) +
           " node_size " + std::to_string(node_size);
  }
};

// Of a row that goes by nodes every divisor of the size, of others none.
inline std::vector<int> node_sizes_of(const Algorithm& row, int size) {
  const bool by_nodes = !row.supports({.size = 3, .node_size = 2});
  std::vector<int> sizes;
  for (int node_size = 1; by_nodes && node_size <= size; ++node_size) {
    if (size % node_size == 0) sizes.push_back(node_size);
  }
  return by_nodes ? sizes : std::vector<int>{0};
}

// All combinations, or one in `every` of them, the same on all ranks. One-element pieces only of short
// vectors.
inline std::vector<Case> cases_of(Family family, int size, std::uint64_t every) {
  std::vector<Case> cases;
  std::uint64_t number = 0;
  for (const Algorithm& row : algorithms(family)) {
    for (const DType dtype : kNumbers) {
      for (const Reduction reduction : kReductions) {
        for (const std::int64_t length : lengths()) {
          for (const std::size_t micro_op : kMicroOps) {
            for (const bool whole : {false, true}) {
              ++number;
              const bool tiny_pieces = micro_op != 0 && static_cast<std::size_t>(length) > 64 * micro_op;
              if (tiny_pieces || mix(number ^ mix(static_cast<std::uint64_t>(size))) % every != 0) continue;
              for (const int node_size : node_sizes_of(row, size))
                cases.push_back({row.name, dtype, reduction, length, micro_op, whole, number, node_size});
            }
          }
        }
      }
    }
  }
  return cases;
}

template <class T>
Dense dense(std::vector<T>& values) {
  return Dense(std::span<T>(values));
}
template <class T>
void poison(std::vector<T>& values) {
  std::ranges::fill(std::as_writable_bytes(std::span(values)), std::byte{0xab});
}
template <class T>
void expect_same_bits(const std::vector<T>& got, const std::vector<T>& expected, const Case& c, int size) {
  EXPECT_TRUE(reference::same_bits(got, expected)) << c.text(size);
}

template <class T>
void check_all_reduce(TestRank& rank, const Case& c) {
  const int size = rank.comm().size();
  const auto inputs = reference::make_inputs<T>(size, c.length, c.seed, c.whole);
  std::vector<T> data = inputs[static_cast<std::size_t>(rank.comm().rank())];
  rank.run([&](Comm comm) {
    return all_reduce(comm, dense(data),
                      {.reduction = c.reduction,
                       .algorithm = c.algorithm,
                       .node_size = c.node_size,
                       .micro_op_bytes = c.micro_op_bytes});
  });
  const std::vector<T> got = data;
  poison(data);
  expect_same_bits(got, reference::all_reduce(c.algorithm, inputs, c.reduction, c.node_size), c, size);
  for (std::size_t i = 0; i < got.size() && c.reduction == Reduction::sum; ++i) {
    const reference::Bound exact = reference::exact_sum(inputs, i);
    if (std::is_integral_v<T> && !c.whole) continue;  // wraps around
    const auto error = static_cast<double>(std::abs(reference::as_double(got[i]) - exact.sum));
    EXPECT_LE(error, c.whole ? 0 : exact.tolerance) << c.text(size) << " at " << i;
  }
  EXPECT_TRUE(size > 1 || rank.traffic().hops.empty()) << c.text(size);
}

// Counts of an uneven call: some empty, some long; equal on all ranks for equal (seed, row).
inline std::vector<std::int64_t> uneven_counts(int size, std::int64_t length, std::uint64_t seed) {
  std::vector<std::int64_t> counts(static_cast<std::size_t>(size), 0);
  for (std::size_t r = 0; r + 1 < counts.size(); ++r) {
    const auto share = static_cast<std::int64_t>(reference::hash(seed, r, 99) % 4);
    counts[r] = length * share / (4 * size);
    counts.back() -= counts[r];
  }
  counts.back() += length;
  return counts;
}

template <class T>
void check_reduce_scatter(TestRank& rank, const Case& c, bool uneven) {
  const int size = rank.comm().size();
  const int me = rank.comm().rank();
  const auto inputs = reference::make_inputs<T>(size, c.length, c.seed, c.whole);
  std::vector<T> data = inputs[static_cast<std::size_t>(me)];
  std::vector<std::int64_t> counts = uneven_counts(size, c.length, c.seed);
  for (int r = 0; r < size && !uneven; ++r)
    counts[static_cast<std::size_t>(r)] = block_of(c.length, size, r).count;
  const ReduceScatterOptions options{.reduction = c.reduction,
                                     .algorithm = c.algorithm,
                                     .node_size = c.node_size,
                                     .micro_op_bytes = c.micro_op_bytes};
  rank.run([&](Comm comm) {
    return uneven ? reduce_scatter_v(comm, dense(data), counts, options)
                  : reduce_scatter(comm, dense(data), options);
  });
  std::size_t first = 0;
  for (int r = 0; r < me; ++r) first += static_cast<std::size_t>(counts[static_cast<std::size_t>(r)]);
  const auto count = static_cast<std::size_t>(counts[static_cast<std::size_t>(me)]);
  const std::vector<T> got(data.begin() + static_cast<std::ptrdiff_t>(first),
                           data.begin() + static_cast<std::ptrdiff_t>(first + count));
  poison(data);
  std::vector<T> expected;
  for (std::size_t i = first; i < first + count; ++i) {
    std::vector<T> x;
    for (const std::vector<T>& input : inputs) x.push_back(input[i]);
    const int nodes = std::max(1, c.node_size);
    expected.push_back(c.node_size == 0
                           ? reference::ring_sum(x, me, c.reduction)
                           : reference::two_level_sum(x, nodes, me % nodes, me / nodes, c.reduction));
  }
  expect_same_bits(got, expected, c, size);
}

template <class T>
void check_all_gather(TestRank& rank, const Case& c, bool uneven) {
  const int size = rank.comm().size();
  const std::vector<T> expected = reference::make_inputs<T>(1, c.length, c.seed, c.whole)[0];
  std::vector<T> data(expected.size());
  poison(data);
  std::vector<std::int64_t> counts = uneven_counts(size, c.length, c.seed);
  for (int r = 0; r < size && !uneven; ++r)
    counts[static_cast<std::size_t>(r)] = block_of(c.length, size, r).count;
  std::int64_t first = 0;
  for (int r = 0; r < rank.comm().rank(); ++r) first += counts[static_cast<std::size_t>(r)];
  std::copy_n(expected.begin() + first, counts[static_cast<std::size_t>(rank.comm().rank())],
              data.begin() + first);
  const AllGatherOptions options{
      .algorithm = c.algorithm, .micro_op_bytes = c.micro_op_bytes, .node_size = c.node_size};
  rank.run([&](Comm comm) {
    return uneven ? all_gather_v(comm, dense(data), counts, options) : all_gather(comm, dense(data), options);
  });
  const std::vector<T> got = data;
  poison(data);
  expect_same_bits(got, expected, c, size);
}

template <class T>
void check_broadcast(TestRank& rank, const Case& c) {
  const int size = rank.comm().size();
  const int root = static_cast<int>(c.seed % static_cast<std::uint64_t>(size));
  const std::vector<T> expected = reference::make_inputs<T>(1, c.length, c.seed, c.whole)[0];
  std::vector<T> data(expected.size());
  if (rank.comm().rank() == root) data = expected;
  rank.run([&](Comm comm) {
    return broadcast(comm, dense(data),
                     {.root = root, .algorithm = c.algorithm, .micro_op_bytes = c.micro_op_bytes});
  });
  const std::vector<T> got = data;
  poison(data);
  expect_same_bits(got, expected, c, size);
}

// How much rank `from` has for rank `to`.
inline std::int64_t part_count(const Case& c, int from, int to, int size, bool uneven) {
  if (!uneven) return c.length / size;
  const std::uint64_t h =
      reference::hash(c.seed, static_cast<std::uint64_t>(from), static_cast<std::uint64_t>(to));
  return h % 3 == 0 ? 0 : static_cast<std::int64_t>(h % static_cast<std::uint64_t>(2 * c.length / size + 2));
}

template <class T>
void check_all_to_all(TestRank& rank, const Case& c, bool uneven) {
  const int size = rank.comm().size();
  const int me = rank.comm().rank();
  std::vector<T> out;
  std::vector<T> expected;
  std::vector<std::int64_t> out_counts;
  std::vector<std::int64_t> in_counts;
  for (int peer = 0; peer < size; ++peer) {
    out_counts.push_back(part_count(c, me, peer, size, uneven));
    in_counts.push_back(part_count(c, peer, me, size, uneven));
    for (std::int64_t i = 0; i < out_counts.back(); ++i)
      out.push_back(reference::any_number<T>(c.seed + static_cast<std::uint64_t>(peer), me, i));
    for (std::int64_t i = 0; i < in_counts.back(); ++i)
      expected.push_back(reference::any_number<T>(c.seed + static_cast<std::uint64_t>(me), peer, i));
  }
  std::vector<T> in(expected.size());
  poison(in);
  const AllToAllOptions options{
      .algorithm = c.algorithm, .micro_op_bytes = c.micro_op_bytes, .node_size = c.node_size};
  rank.run([&](Comm comm) {
    if (!uneven) return all_to_all(comm, dense(out), dense(in), options);
    return all_to_all_v(comm, {dense(out), out_counts}, {dense(in), in_counts}, options);
  });
  poison(out);
  expect_same_bits(in, expected, c, size);
  EXPECT_TRUE(size > 1 || rank.traffic().hops.empty()) << c.text(size);
}

inline void run_all_reduce_suite(TestRank& rank) {
  for (const Case& c : cases_of(Family::all_reduce, rank.comm().size(), full_grid() ? 1 : 29)) {
    scalar::with_type(c.dtype, [&]<class T>(T) { check_all_reduce<T>(rank, c); });
  }
}

inline void run_block_suite(TestRank& rank) {
  const int size = rank.comm().size();
  for (const bool uneven : {false, true}) {
    for (const Case& c : cases_of(Family::reduce_scatter, size, full_grid() ? 1 : 13)) {
      scalar::with_type(c.dtype, [&]<class T>(T) { check_reduce_scatter<T>(rank, c, uneven); });
    }
    for (const Case& c : cases_of(Family::all_gather, size, full_grid() ? 3 : 41)) {
      scalar::with_type(c.dtype, [&]<class T>(T) { check_all_gather<T>(rank, c, uneven); });
    }
  }
  for (const Case& c : cases_of(Family::broadcast, size, full_grid() ? 3 : 41)) {
    scalar::with_type(c.dtype, [&]<class T>(T) { check_broadcast<T>(rank, c); });
  }
}

inline void run_all_to_all_suite(TestRank& rank) {
  const int size = rank.comm().size();
  for (const bool uneven : {false, true}) {
    for (const Case& c : cases_of(Family::all_to_all, size, full_grid() ? 3 : 53)) {
      if (uneven && c.algorithm == "bruck") continue;
      scalar::with_type(c.dtype, [&]<class T>(T) { check_all_to_all<T>(rank, c, uneven); });
    }
  }
}

}  // namespace weft::test
