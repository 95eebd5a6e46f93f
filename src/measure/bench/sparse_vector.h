// A rank's vector in `weft bench sparse_allreduce`: one sparse all-reduce, or buckets that the data-parallel
// layer has in flight together.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "collectives/sparse_allreduce/call.h"
#include "data_parallel/data_parallel.h"
#include "measure/bench/message_log.h"
#include "measure/bench/sparse_bench.h"

namespace weft {

struct SparseCase {
  const SparseAlgorithm* row = nullptr;
  std::int64_t length = 0;  // real elements
  std::int64_t k = 0;
  std::uint32_t slot = 0;  // of the step; those of its buckets follow
};

// `count` operations in flight together, each begun by make(comm, i); returns when all have ended, then
// rethrows the first error. One alone runs inside `comm`'s. REQUIRES: on the engine's thread, in the same
// order on all ranks.
Task<void> together(Comm comm, Engine& engine, std::size_t count,
                    std::function<Task<void>(Comm, std::size_t)> make);

// Thread: run() and record() are for the engine's, one at a time; the rest is called between them. Memory:
// must outlive its operations.
class SparseVector {
 public:
  // An operation of the last step.
  struct Part {
    std::int64_t first = 0;  // element of the vector
    std::int64_t length = 0;
    SparseState* state = nullptr;
    const SparseResult* result = nullptr;
    SparseOptions call;
    std::uint32_t slot = 0, step = 0;
  };

  // REQUIRES: `bench` and `c` outlive it.
  SparseVector(const SparseBench& bench, const SparseCase& c, Engine& engine);

  // The gradient of a rank in a step.
  void draw(int rank, std::uint32_t step);
  // A step with the gradient that is there.
  Task<void> run(Comm comm, std::uint32_t step);
  // Ends it: commits, or rolls back and gives false where the gradient is not finite.
  bool finish();
  // The operations of the last step with the gradient that is there, rolled back. logs[i] is of parts()[i].
  Task<void> record(Comm comm, std::vector<MessageLog>& logs);

  const std::vector<Part>& parts() const { return parts_; }
  // What this rank would put in: gradient + committed residual.
  std::vector<float> put_in() const;
  std::vector<float> residual() const;
  // Entries of the last step's result.
  void for_each(const std::function<void(std::int64_t index, float value)>& f) const;
  bool finite() const;
  std::int64_t num_entries() const;
  double hash() const;               // the same number for the same entries in any order; 52 bits
  void spoil() { spoiled_ = true; }  // the results that are told are wrong from now on

 private:
  void lay_out(std::uint32_t step);

  const SparseBench& bench_;
  Engine& engine_;
  const SparseCase& case_;
  SparseOptions call_;
  std::vector<float> gradient_;
  std::vector<float> drawn_;               // where draws are shifted: what is shifted
  std::unique_ptr<DataParallel> buckets_;  // null: one operation, on the next two
  SparseState state_;
  SparseResult result_;
  std::vector<SparseResult> recorded_;
  std::vector<Part> parts_;
  bool spoiled_ = false;
};

}  // namespace weft
