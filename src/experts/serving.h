// Layers of experts of a model that serves: forward only, each expert on as many ranks as its placement says.
// Whoever computes (a model, or timers) is a driver. The walk of one layer, on every rank:
//
//   Step 1  how many rows each rank has for each expert, to all ranks (all-gather)
//   Step 2  where the layer's experts are now (placer.h): all ranks know the same and decide the same. Where a
//           plan was made again, weights that a rank lacks come first
//   Step 3  in the background, for the next layer: what this rank's tokens are expected to choose (popularity.h),
//           summed over the ranks, and a plan by it: while this layer's rows travel and are computed
//   Step 4  rows to the replicas of their experts, by quotas (uneven all-to-all): ordered by destination, then
//           expert, then token
//   Step 5  the driver computes what has come, one expert after the other
//   Step 6  the same rows back
//
// A token's output does not depend on the placement: its rows meet the same weights wherever they are.
//
// Weights: resident, all ranks have all of them and nothing moves; or so many bytes an expert go from its home
// (expert mod ranks) to ranks that lack it, in step 2 or, for a plan, in step 3.
//
// Bytes of a rank, rows of d values of s bytes: d s for each of its rows that goes to another rank, and for each
// that came from one; E R values of 8 bytes in all for the counts, E for the expectation.
//
// Thread: pass() runs on the engine's, and what takes longer (estimates, plans, dealing and gathering rows) on the
// worker pool; everything else while it does not. Memory: it outlives its operations.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <vector>

#include "experts/placer.h"
#include "experts/popularity.h"
#include "weft/comm.h"
#include "weft/engine.h"

namespace weft {

class ServingDriver {
 public:
  virtual ~ServingDriver() = default;
  // Rows that leave, in this order; a copy c is choice c mod choices of token c / choices. On a worker.
  virtual Dense rows_to_send(int layer, std::span<const std::int64_t> copies) = 0;
  // Memory for so many rows that come, and for those that come back, in the order in which they left.
  virtual Dense room(int layer, std::int64_t rows) = 0;
  virtual Dense room_for_return(int layer, std::int64_t rows) = 0;
  // Of the rows in room(), in place. `counts`: [source * experts + expert], in this order.
  virtual Task<void> compute(Comm comm, int layer, std::span<const std::int64_t> counts) = 0;
};

struct ServingOptions {
  // affects results
  std::int64_t width = 1;  // of a row
  // affects speed only; equal on all ranks
  PlacerOptions placer;
  std::shared_ptr<const Popularity> profile;  // where the placement estimates; outlives nothing
  std::int64_t weight_bytes = 0;              // of an expert that moves; 0: resident
  double plan_seconds = 0;                    // that a plan takes in virtual time
};
// Throws UsageError of one sentence.
void check(const ServingOptions& options);

class ExpertServing {
 public:
  // The driver outlives it. Throws UsageError.
  ExpertServing(Engine& engine, const Comm& group, const ServingOptions& options, ServingDriver& driver);

  // A batch of so many tokens of this rank, which may be 0; all ranks call it. Starts expecting the first layer.
  void begin(std::int64_t tokens);
  // One layer; layers come in order. `chosen`: experts of [token * choices + choice], until the task is done.
  // REQUIRES: this lives until the task is done.
  Task<void> pass(Comm comm, int layer, std::span<const std::int32_t> chosen);
  // The batch is over. Weights that history moves, move now.
  Task<void> end(Comm comm);
  // Nothing of this is under way afterwards.
  void abandon(const std::exception_ptr& cause) noexcept;

  const Placer& placer() const { return placer_; }
  double load() const {
    return load_;
  }  // of the last pass(): rows of the busiest rank over the mean; 0: no rows
  std::uint64_t row_bytes() const { return row_bytes_; }         // payload of rows, sent since it was made
  std::int64_t formula_bytes() const { return formula_bytes_; }  // the same from the plans
  std::uint64_t moved_bytes() const { return moved_bytes_; }     // of weights, sent
  static constexpr std::uint32_t kHops = 1 << 16;                // that pass() and end() have

 private:
  struct Flow {                         // of this rank's rows in a layer
    std::vector<std::int64_t> copies;   // in the order in which they leave
    std::vector<std::int64_t> out, in;  // elements to and from each rank
    std::vector<std::int64_t> counts;   // that come: [source * experts + expert]
  };
  Task<void> count(Comm comm, int layer, std::span<const std::int32_t> chosen);
  void settle(int layer);
  Task<void> bring_weights(Comm comm, int layer);
  Task<void> exchange(Comm comm, const Flow* flow, Dense mine, int layer, bool back);
  static Task<void> expect(Comm comm, ExpertServing* me, int layer);
  void estimate(int layer);
  void start_expecting(int layer);
  Flow deal(int layer, std::span<const std::int32_t> chosen);
  void hold(std::vector<bool>& held, const ExpertPlacement& placement) const;
  std::size_t ranks() const { return static_cast<std::size_t>(comm_.size()); }
  std::size_t experts() const { return static_cast<std::size_t>(options_.placer.place.experts); }
  std::size_t choices() const { return static_cast<std::size_t>(options_.placer.choices); }
  std::size_t layers() const { return static_cast<std::size_t>(options_.placer.layers); }

  Engine& engine_;
  Comm comm_;
  ServingOptions options_;
  ServingDriver& driver_;
  Placer placer_;
  std::vector<std::vector<bool>> held_;  // of each layer, [expert * ranks + rank]: weights are there
  std::vector<std::int32_t> paths_;      // first choices of the batch: [token * layers + layer]
  std::size_t tokens_ = 0;
  std::vector<double> expected_;
  std::vector<std::int64_t> counts_;  // of all ranks: [source * experts + expert]
  Ticket expecting_;
  std::vector<std::byte> weights_;
  double load_ = 0;
  std::uint64_t row_bytes_ = 0, moved_bytes_ = 0;
  std::int64_t formula_bytes_ = 0;
};

}  // namespace weft
