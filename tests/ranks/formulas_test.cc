// Bytes and rounds of every row equal its formulas, as integers, at sizes 1 .. 33, with an eager limit of
// zero: so this is also the run without any buffer of every schedule at these sizes.
#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>

#include "ranks/suite.h"

namespace weft::test {
namespace {

struct Measured {
  std::uint64_t bytes = 0;  // of the busiest rank
  std::size_t rounds = 0;
};

struct Call {
  Family family;
  Algorithm row;
  Shape shape;
};

// Runs a row with vectors of int32.
Task<void> run_row(Comm comm, Call call, std::span<std::int32_t> data, std::span<std::int32_t> other) {
  const std::size_t micro_op = call.shape.micro_op_bytes;
  const std::string_view name = call.row.name;
  switch (call.family) {
    case Family::all_reduce:
      return all_reduce(comm, data,
                        {.algorithm = name, .node_size = call.shape.node_size, .micro_op_bytes = micro_op});
    case Family::reduce_scatter:
      return reduce_scatter(
          comm, data, {.algorithm = name, .node_size = call.shape.node_size, .micro_op_bytes = micro_op});
    case Family::all_gather:
      return all_gather(comm, data,
                        {.algorithm = name, .micro_op_bytes = micro_op, .node_size = call.shape.node_size});
    case Family::broadcast: {
      const int root = static_cast<int>(call.shape.count % comm.size());  // formulas hold for any root
      return broadcast(comm, data, {.root = root, .algorithm = name, .micro_op_bytes = micro_op});
    }
    case Family::barrier:
      return barrier(comm);
    case Family::all_to_all:
      return all_to_all(comm, data, other,
                        {.algorithm = name, .micro_op_bytes = micro_op, .node_size = call.shape.node_size});
    case Family::message:
    case Family::sparse_all_reduce:
      break;
  }
  throw UsageError("no such family");
}

std::vector<Call> calls_at(int size) {
  std::vector<Call> calls;
  for (const Family family : kFamilies) {
    for (const Algorithm& row : algorithms(family)) {
      for (const std::int64_t count : {0, 1, size - 1, size, 3 * size + 1, 12 * size + 7}) {
        for (const int asked : node_sizes_of(row, size)) {
          const int node_size = std::max(1, asked);
          const std::int64_t whole = family == Family::all_to_all ? count * size : count;
          for (const std::size_t micro_op : {std::size_t{1} << 20, std::size_t{20}}) {
            if (micro_op == 20 && count % 3 != 0) continue;
            calls.push_back(
                {family,
                 row,
                 {.size = size, .count = whole, .node_size = node_size, .micro_op_bytes = micro_op}});
          }
        }
      }
    }
  }
  return calls;
}

// What the recording transports saw of each call, at the busiest rank.
std::vector<Measured> measure(int size, const std::vector<Call>& calls) {
  std::vector<Measured> measured(calls.size());
  std::mutex mutex;
  with_ranks({.ranks = size, .eager_limit = 0}, [&](TestRank& rank) {
    for (std::size_t i = 0; i < calls.size(); ++i) {
      std::vector<std::int32_t> data(static_cast<std::size_t>(calls[i].shape.count), 1);
      std::vector<std::int32_t> other(data.size(), 0);
      rank.run([&](Comm comm) { return run_row(comm, calls[i], data, other); });
      const OperationTraffic traffic = rank.traffic();
      EXPECT_EQ(traffic.payload_bytes_sent, rank.bare().operation().bytes_sent);
      const std::lock_guard lock(mutex);
      measured[i].bytes = std::max(measured[i].bytes, traffic.payload_bytes_sent);
      measured[i].rounds = std::max(measured[i].rounds, traffic.hops.size());
    }
  });
  return measured;
}

bool agrees(const Call& call, const Measured& measured) {
  return call.row.bytes(call.shape) == measured.bytes &&
         static_cast<std::size_t>(call.row.rounds(call.shape)) == measured.rounds;
}

class Formulas : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, Formulas, testing::Range(1, 34));

TEST_P(Formulas, OfBytesAndRoundsAreExact) {
  const std::vector<Call> calls = calls_at(GetParam());
  const std::vector<Measured> measured = measure(GetParam(), calls);
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const Call& call = calls[i];
    EXPECT_TRUE(agrees(call, measured[i]))
        << name_of(call.family) << " " << call.row.name << " size " << call.shape.size << " count "
        << call.shape.count << " node_size " << call.shape.node_size << " micro-op "
        << call.shape.micro_op_bytes << ": bytes " << measured[i].bytes << " formula "
        << call.row.bytes(call.shape) << ", rounds " << measured[i].rounds << " formula "
        << call.row.rounds(call.shape);
  }
}

TEST(FormulaControl, AFormulaThatIsOffByOneIsCaught) {
  std::vector<Call> calls = calls_at(5);
  const std::vector<Measured> measured = measure(5, calls);
  for (std::size_t i = 0; i < calls.size(); ++i) {
    static std::uint64_t (*bytes)(const Shape&);
    static int (*rounds)(const Shape&);
    bytes = calls[i].row.bytes;
    rounds = calls[i].row.rounds;
    Call off = calls[i];
    off.row.bytes = [](const Shape& s) { return bytes(s) + 1; };
    EXPECT_FALSE(agrees(off, measured[i]));
    off = calls[i];
    off.row.rounds = [](const Shape& s) { return rounds(s) - 1; };
    EXPECT_FALSE(agrees(off, measured[i]));
  }
}

TEST(Formulas, AreTheTextbooksWhereBlocksAreEqual) {
  for (int size = 1; size <= 64; ++size) {
    const auto p = static_cast<std::uint64_t>(size);
    const Shape shape{.size = size, .count = 6 * size};
    const std::uint64_t n = shape.bytes();
    const auto bytes = [&](Family family, std::string_view name) {
      return find_algorithm(family, name).bytes(shape);
    };
    EXPECT_EQ(bytes(Family::all_reduce, "ring"), 2 * n * (p - 1) / p);
    EXPECT_EQ(bytes(Family::all_reduce, "rabenseifner"), 2 * n * (p - 1) / p);
    EXPECT_EQ(bytes(Family::all_reduce, "direct"), 2 * n * (p - 1) / p);
    EXPECT_EQ(bytes(Family::reduce_scatter, "ring"), n * (p - 1) / p);
    EXPECT_EQ(bytes(Family::all_gather, "ring"), n * (p - 1) / p);
    EXPECT_EQ(bytes(Family::all_gather, "bruck"), n * (p - 1) / p);
    EXPECT_EQ(bytes(Family::broadcast, "scatter_allgather"), 2 * n * (p - 1) / p);
    EXPECT_EQ(bytes(Family::all_to_all, "pairwise"), n * (p - 1) / p);
    if (size % 2 == 0) {
      const Shape pairs{.size = size, .count = 6 * size, .node_size = 2};
      const std::uint64_t nodes = p / 2;
      EXPECT_EQ(find_algorithm(Family::all_reduce, "two_level").bytes(pairs), n + n * (nodes - 1) / nodes);
      EXPECT_EQ(find_algorithm(Family::reduce_scatter, "two_level").bytes(pairs), n * (p - 1) / p);
      EXPECT_EQ(find_algorithm(Family::all_gather, "two_level").bytes(pairs), n * (p - 1) / p);
    }
    if ((p & (p - 1)) != 0) continue;
    const auto log2 = static_cast<std::uint64_t>(std::bit_width(p) - 1);
    EXPECT_EQ(bytes(Family::all_reduce, "recursive_doubling"), n * log2);
    EXPECT_EQ(bytes(Family::all_to_all, "bruck"), n / 2 * log2);
  }
}

TEST(Selection, FollowsTheLink) {
  const LinkCost slow{.hop_seconds = 50e-6, .seconds_per_byte = 1 / 125e6, .fold_seconds_per_byte = 1 / 4e9};
  const auto chosen = [&](Family family, const Shape& shape) { return choose(family, shape, slow).name; };
  EXPECT_EQ(chosen(Family::all_reduce, {.size = 8, .count = 1}), "recursive_doubling");
  EXPECT_EQ(chosen(Family::all_reduce, {.size = 8, .count = 1 << 16}), "rabenseifner");
  EXPECT_EQ(chosen(Family::all_reduce, {.size = 8, .count = 1 << 22}), "ring");
  EXPECT_EQ(chosen(Family::all_reduce, {.size = 512, .count = 1 << 22}), "rabenseifner");
  EXPECT_EQ(chosen(Family::all_reduce, {.size = 8, .count = 1 << 22, .node_size = 4}), "ring");
  EXPECT_EQ(chosen(Family::broadcast, {.size = 8, .count = 1}), "binomial");
  EXPECT_EQ(chosen(Family::broadcast, {.size = 8, .count = 1 << 26}), "chain");
  EXPECT_EQ(chosen(Family::all_to_all, {.size = 8, .count = 8}), "bruck");
  EXPECT_EQ(chosen(Family::all_to_all, {.size = 8, .count = 1 << 22}), "pairwise");
  EXPECT_NE(chosen(Family::all_to_all, {.size = 8, .count = 8, .uneven = true}), "bruck");
}

TEST(Selection, FollowsTheLevels) {
  LinkCost link{.hop_seconds = 50e-6, .seconds_per_byte = 1 / 125e6, .fold_seconds_per_byte = 1 / 4e9};
  link.node_ranks = 4;
  link.scale_up_hop_seconds = 1e-6;
  link.scale_up_seconds_per_byte = 1 / 1250e6;
  const auto chosen = [&](Family family, const Shape& shape) { return choose(family, shape, link).name; };
  for (const Family family : {Family::all_reduce, Family::reduce_scatter, Family::all_gather}) {
    EXPECT_EQ(chosen(family, {.size = 8, .count = 1 << 22, .node_size = 4}), "two_level");
    EXPECT_NE(chosen(family, {.size = 8, .count = 1 << 22, .node_size = 1}), "two_level")
        << "no two share a node";
    EXPECT_NE(chosen(family, {.size = 8, .count = 1 << 22, .node_size = 8}), "two_level") << "all share one";
  }
  // Few long messages where a hop between nodes costs more than its bytes; else the bytes inside count.
  EXPECT_EQ(chosen(Family::all_to_all, {.size = 8, .count = 8 << 8, .node_size = 4}), "hierarchical");
  EXPECT_EQ(chosen(Family::all_to_all, {.size = 8, .count = 8 << 20, .node_size = 4}), "pairwise");
  // A group inside a node pays the price of the node.
  const Shape near{.size = 4, .count = 1 << 20, .node_size = 4}, far{.size = 4, .count = 1 << 20};
  for (const Family family : kFamilies) {
    for (const Algorithm& row : algorithms(family)) {
      EXPECT_LT(row.seconds(near, link), row.seconds(far, link)) << name_of(family) << " " << row.name;
      EXPECT_EQ(row.seconds(near, link.inside()), row.seconds(near, link));
    }
  }
}

// With one level, whoever shares a node, nothing is cheaper inside: every row costs what it did.
TEST(Selection, OfOneLevelNeedsNoNodes) {
  const LinkCost flat{.hop_seconds = 50e-6, .seconds_per_byte = 1 / 125e6, .fold_seconds_per_byte = 1 / 4e9};
  for (const Family family : kFamilies) {
    for (const Algorithm& row : algorithms(family)) {
      for (const int size : {1, 4, 6, 8}) {
        const Shape alone{.size = size, .count = 1 << 16},
            together{.size = size, .count = 1 << 16, .node_size = size};
        EXPECT_DOUBLE_EQ(row.seconds(alone, flat), row.seconds(together, flat))
            << name_of(family) << " " << row.name << " " << size;
      }
    }
  }
}

TEST(Selection, RunsWhatItChooses) {
  with_ranks({.ranks = 4}, [](TestRank& rank) {
    for (const std::size_t count : {1, 5000, 200'000}) {
      std::vector<std::int32_t> data(count, 1 << rank.comm().rank());
      rank.run([&](Comm comm) { return all_reduce(comm, dense(data)); });
      EXPECT_EQ(data, std::vector<std::int32_t>(count, 15));
    }
  });
}

TEST(Registry, EveryRowIsNamedOnceAndSaysWhatItIs) {
  for (const Family family : kFamilies) {
    const std::span<const Algorithm> rows = algorithms(family);
    EXPECT_FALSE(rows.empty());
    EXPECT_LE(rows.size(), 64u) << "a row's place has 6 bits on the wire";
    for (const Algorithm& row : rows) {
      EXPECT_EQ(&find_algorithm(family, row.name), &row);
      EXPECT_FALSE(row.summary.empty());
      EXPECT_EQ(row.bytes({.size = 1, .count = 100}), 0u);
      EXPECT_EQ(row.rounds({.size = 1, .count = 100}), 0);
      EXPECT_EQ(row.seconds({.size = 1, .count = 100}, LinkCost{}), 0.0)
          << name_of(family) << " " << row.name;
    }
  }
}

}  // namespace
}  // namespace weft::test
