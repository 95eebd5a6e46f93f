// What `weft bench` measures: the options of a run, the cases that follow from them, and one rank's part of a
// case.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collectives/registry.h"
#include "measure/bench/embedding_bench.h"
#include "measure/bench/moe_bench.h"
#include "measure/bench/sparse_bench.h"
#include "transports/link_spec.h"
#include "weft/collective.h"
#include "weft/world.h"

namespace weft {

// The command line, checked.
struct BenchOptions {
  std::string family;                   // of the registry, or sparse_allreduce, embedding, moe, priority ...
  std::vector<std::string> algorithms;  // empty: all that can run
  std::vector<std::size_t> sizes;
  DType dtype = DType::float32;
  int ranks = 4;
  bool ranks_given = false;  // else it is the default
  std::string transport = "threads";
  std::optional<LinkSpec> link;   // emulated or simulated
  std::optional<LinkSpec> ideal;  // real, known to the caller; for ideal_seconds only
  int nodes = 0;
  double scale_up_bytes_per_second = 0;  // 0: no limit
  double byte_scale = 1;
  int iterations = 0;  // 0: for about a second, at least 10
  bool json = false;
  bool against_mpi = false;
  bool spoil = false;  // tests: a wrong result must be seen
  std::string trace;
  SparseBench sparse;        // sparse_allreduce
  EmbeddingBench embedding;  // embedding
  MoeBench moe;              // moe
};

// Ranks of a node where nodes are equal; 1 without nodes; 0 where they differ, which no algorithm supports.
int node_size(const BenchOptions& options);

struct BenchCase {
  Family family = Family::all_reduce;
  const Algorithm* algorithm = nullptr;
  std::size_t bytes = 0;  // as --bytes counts them; under sim these are virtual bytes
  DType dtype = DType::float32;
  Shape shape;  // of the real buffers
  std::uint32_t slot = 0;
};

// One case for each size and algorithm. Throws UsageError for sizes that are no multiple of the element, and
// for algorithms that do not exist or cannot run.
std::vector<BenchCase> make_cases(const BenchOptions& options, Family family);

// Lower bound: the bytes that must pass the busiest port of the slow network, at its rate. docs/measuring.md
// has the table. None without a link.
std::optional<double> ideal_seconds(const BenchOptions& options, const BenchCase& c);
// What nccl-tests calls algbw and busbw: bytes of the whole operation, and the share of them that a port must
// carry.
double algorithm_bytes(const BenchCase& c);
double bus_factor(const BenchCase& c);

// One rank's buffers of a case. The data are small integers that depend on element and rank, so that every
// order of additions gives the same bits, and misplaced blocks are seen.
class CaseBuffers {
 public:
  CaseBuffers(const BenchCase& c, int rank);
  // Input in place, and rubbish where the result goes.
  void refill();
  // The operation on these buffers; they stay until the task is done.
  Task<void> run(Comm comm) const;
  bool correct() const;
  void spoil();  // one element of the result

 private:
  struct Free {
    void operator()(std::byte* memory) const;
  };
  using Memory = std::unique_ptr<std::byte, Free>;
  static Memory allocate(std::size_t bytes);
  Dense dense(const Memory& memory) const { return {memory.get(), case_.shape.count, case_.dtype}; }
  int input(std::int64_t index) const;
  int expected(std::int64_t index) const;
  BlockRange result() const;

  BenchCase case_;
  int rank_;
  BlockRange given_;       // where the input lies: everywhere, or in the own block
  Memory original_;        // the input, of that
  Memory data_;            // in place; of all_to_all: what arrives
  std::vector<int> sums_;  // over ranks, by class of element
};

}  // namespace weft
