// The parts of `weft bench moe`.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "experts/experts.h"
#include "measure/bench/run.h"
#include "step/run_step.h"

namespace weft {

// Who goes where: of every rank. Const calls from any thread.
class MoeRouting {
 public:
  // Drawn, or read from a file with a line for each token: the numbers of its experts, the best first. Throws
  // UsageError for a file that says something else.
  MoeRouting(const MoeBench& bench, int ranks);

  std::int64_t tokens(int rank) const { return static_cast<std::int64_t>(of(rank).size()) / bench_.choices; }
  // Of each of the rank's tokens, each of its choices.
  const std::vector<std::int64_t>& of(int rank) const { return choices_[static_cast<std::size_t>(rank)]; }
  // Copies of all ranks' tokens for each expert, dropped ones too.
  std::vector<std::int64_t> load() const;
  std::int64_t num_dropped() const;

 private:
  void draw();
  void read_file();

  MoeBench bench_;
  std::vector<std::vector<std::int64_t>> choices_;
};

// One all-to-all algorithm and number of slices.
struct MoeCase {
  std::string algorithm;
  int slices = 1;
  int node_size = 1;
  std::uint32_t slot = 1;  // the first of its own
};

// Rows that go from rank to rank: [from * ranks + to], of each slice. By the rules of capacity and slices
// alone (docs/algorithms.md).
std::vector<std::vector<std::int64_t>> moe_rows(const MoeBench& bench, const MoeRouting& routing, int ranks,
                                                int slices);
// Payload bytes that each rank sends for dispatch and combine.
std::vector<std::uint64_t> moe_formula(const MoeBench& bench, const MoeRouting& routing, int ranks,
                                       const MoeCase& c);

// One rank: a layer of experts and nothing else, its forward walked as in training. Experts compute nothing,
// but where the result is looked at they add their number, so that a row at the wrong expert is seen.
class MoeRank final : public Driver {
 public:
  // In virtual time tickets are awaited, else they block the thread.
  MoeRank(const BenchOptions& options, const MoeRouting& routing, const MoeCase& c, Engine& engine,
          bool in_virtual_time);

  // Of all ranks; with nothing under way. `looked_at`: experts add their number.
  void prepare(bool looked_at);
  // REQUIRES: prepare(), and lives until the task is done.
  static Task<void> forward(MoeRank* me);
  // What the last forward gave, against a plain loop over the tokens. REQUIRES: it was looked at.
  bool correct(bool spoil) const;
  std::uint64_t bytes_sent();  // for rows, in the last forward

  Strategies& strategies() { return strategies_; }

  Task<void> compute(Piece piece) override;
  Task<void> wait(Ticket ticket) override;
  Dense tensor(const TensorName& name) override;

 private:
  const ExpertShape& layer() const { return strategies_.shape().experts.front(); }
  bool alone() const { return comm_.size() == 1; }
  std::span<const std::int64_t> counts(int slice) const;
  Experts::Rows computed(int slice) const;  // rows that are with their experts
  void keep_home();

  const MoeBench& bench_;
  const std::vector<std::int64_t>& choices_;
  Comm comm_;
  RouteOptions options_;
  Route route_;
  std::vector<float> rows_;          // that leave, of all slices
  std::vector<std::int64_t> first_;  // row of each slice
  Strategies strategies_;
  Experts* experts_ = nullptr;
  bool in_virtual_time_;
  bool looked_at_ = false;
  std::vector<Experts::Rows> made_;  // of each slice: what its experts give back
  std::vector<Experts::Rows> home_;  // and what came back here, where it is looked at
};

}  // namespace weft
