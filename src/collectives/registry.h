// What algorithms there are: one explicit table for each family, one row for each algorithm. Tests, bench,
// command, Python and planner walk these tables; to add an algorithm is to add its file, its row
// (registry.cc), its CMake line and its section in docs/algorithms.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <variant>

#include "patterns/blocks.h"
#include "weft/collective.h"
#include "weft/comm.h"
#include "weft/dtype.h"
#include "weft/function_ref.h"
#include "weft/task.h"

namespace weft {

// On the wire (5 bits of a fingerprint): numbers are not reused.
enum class Family : std::uint8_t {
  all_reduce,
  reduce_scatter,
  all_gather,
  broadcast,
  barrier,
  all_to_all,
  message,
  sparse_all_reduce
};
inline constexpr Family kFamilies[] = {Family::all_reduce, Family::reduce_scatter, Family::all_gather,
                                       Family::broadcast,  Family::barrier,        Family::all_to_all};
std::string_view name_of(Family family);  // as in `weft bench`: allreduce, reducescatter, ...

// A call, as far as its cost goes; equal on all ranks.
struct Shape {
  int size = 1;
  std::int64_t count = 0;  // elements of the whole vector `data` (all_to_all: of `send`), not of a block
  std::size_t element_bytes = 4;
  bool uneven = false;  // blocks are given by counts (the -v calls); formulas then do not apply
  int node_size = 1;    // consecutive ranks that share a node, and so its scale-out port
  std::size_t micro_op_bytes = std::size_t{1} << 20;

  constexpr std::uint64_t bytes() const { return static_cast<std::uint64_t>(count) * element_bytes; }
  constexpr int nodes() const { return size / node_size; }
};

// The parts of an all-to-all in memory.
struct AllToAllParts {
  Dense send;
  Blocks send_blocks;
  Dense recv;
  Blocks recv_blocks;
  int node_size = 1;
  bool uneven = false;
  bool same = false;  // every rank is sent all of `send`; only where uneven

  Dense part_for(int rank) const {
    return same ? send : send.sub(send_blocks.begin(rank), send_blocks.count(rank));
  }
};

// The coroutines. Micro-ops and node_size, in the shape that the row was chosen for or alone, are resolved
// already (never 0); arguments are checked; the fingerprint is declared.
using AllReduceRun = Task<void>(Comm comm, Dense data, Reduction reduction, Shape shape);
using ReduceScatterRun = Task<void>(Comm comm, Dense data, Blocks blocks, Reduction reduction, Shape shape);
using AllGatherRun = Task<void>(Comm comm, Dense data, Blocks blocks, Shape shape);
using BroadcastRun = Task<void>(Comm comm, Dense data, int root, std::size_t micro_op_bytes);
using BarrierRun = Task<void>(Comm comm);
using AllToAllRun = Task<void>(Comm comm, AllToAllParts exchange, std::size_t micro_op_bytes);

// Elements that a rank sends to another.
using Counts = FunctionRef<std::int64_t(int from, int to)>;

struct Algorithm {
  std::string_view name;
  std::string_view summary;
  bool (*supports)(const Shape& shape);
  double (*seconds)(const Shape& shape, const LinkCost& link);  // predicted
  std::uint64_t (*bytes)(const Shape& shape);  // payload that the busiest rank sends, exactly; even blocks
  int (*rounds)(const Shape& shape);           // hops that the busiest rank takes part in, exactly
  std::variant<AllReduceRun*, ReduceScatterRun*, AllGatherRun*, BroadcastRun*, BarrierRun*, AllToAllRun*> run;
  // Of an all-to-all with any counts: payload that `rank` sends, exactly.
  std::uint64_t (*uneven_bytes)(const Shape& shape, int rank, Counts counts) = nullptr;
};

// Rows keep their place: it is in the fingerprint (6 bits).
std::span<const Algorithm> algorithms(Family family);

// The row with this name; UsageError that lists the names if there is none.
const Algorithm& find_algorithm(Family family, std::string_view name);
// The row with the lowest predicted time among those that support the shape, the earlier one where they are
// equal. Depends on its arguments only, so that all ranks choose alike.
const Algorithm& choose(Family family, const Shape& shape, const LinkCost& link);
// "auto": choose(); a name: that row; UsageError if it does not support the shape.
const Algorithm& pick(Family family, std::string_view name, const Shape& shape, const LinkCost& link);
// What an all-to-all with any counts is chosen by.
Shape uneven_shape(const Comm& comm, DType dtype, const AllToAllOptions& options);
// Its place in the family's table.
std::uint8_t row_of(Family family, const Algorithm& algorithm);

}  // namespace weft
