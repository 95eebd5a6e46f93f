// The parts of `weft bench embedding`.
#pragma once

#include <cstdint>
#include <vector>

#include "embedding/formula.h"
#include "measure/bench/run.h"
#include "workload/table_draws.h"

namespace weft {

// What ranks read in which step. Any rank can tell another's. Const calls from any thread.
class EmbeddingIds {
 public:
  EmbeddingIds(const EmbeddingBench& bench, int ranks);
  std::vector<std::int64_t> ids(int rank, std::int64_t step) const;
  TableBatch batch(std::int64_t step) const;

 private:
  EmbeddingBench bench_;
  int ranks_;
  TableDraws draws_;
};

// Of place `i` in the list of a rank, as it is given to the exchange: a small integer, so that every order of
// additions gives the same bits. It does not depend on the step.
inline float embedding_gradient(int rank, std::size_t place, std::size_t column) {
  return static_cast<float>(
      static_cast<int>((5 * static_cast<std::size_t>(rank) + 3 * place + 7 * column) % 7) - 3);
}
inline float embedding_value(std::int64_t row, std::size_t column) {
  return static_cast<float>((static_cast<std::size_t>(row) + column) % 5);
}

// A way, measured; of ranks together.
struct EmbeddingMeasured {
  std::int64_t steps = 0;  // before the measured ones and those
  // Batches that were announced and whose rows were fetched: the last may be of a step that never came.
  std::int64_t announced = 0, looked_up = 0;
  std::vector<double> seconds;  // of each measured step: its slowest rank
  struct Sent {
    double ids = 0, rows = 0, gradients = 0;  // payload in all steps; gradients: and pushed values
  };
  std::vector<Sent> sent;           // of each rank
  std::vector<std::int64_t> asked;  // rows that were looked up in the end
  std::vector<float> values;        // of them
  bool same_bits = true;            // on all ranks
};

// One rank's part; `slot`: the first of its own.
EmbeddingMeasured measure_embedding(const BenchOptions& options, const TableWay& way, const EmbeddingIds& ids,
                                    std::uint32_t slot, const BenchRank& rank);

}  // namespace weft
