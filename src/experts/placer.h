// Who decides where the experts of each layer are, for one batch after the other. There is one on every rank, all
// are told the same numbers of all ranks' tokens, and so all decide the same.
//
//   static    never moves: expert e on rank e mod ranks
//   history   balanced by what came in a window of the last batches, placed anew every few batches (as EPLB of
//             DeepSeek, vLLM and SGLang does, with the packing of placement.h)
//   lina      of each batch and layer, in two phases. Plan: by what the tokens' paths let expect (popularity.h),
//             while the layer before is computed. Check, when the gate has spoken: the plan is kept if it is
//             good for the rows that really came, else the layer is planned again by them
//   ideal     every expert gets as many rows as any other: what a gate would give that balances perfectly, with
//             the plan for such rows. A limit of the load to compare with, for whoever draws rows; a real gate is
//             not changed. (Not of what travels: rows of a hot expert that is everywhere stay where they are)
//
// The check of a plan, one of two:
//   sets      the 2k most popular experts, expected and real, are the same, in any order (k: choices)
//   load      the busiest rank has at most 1 + tolerance times what was expected of the busiest one, or of all
//             ranks' mean where that is more
// Of an estimate that is right both keep the plan.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "experts/placement.h"

namespace weft {

struct PlacementKind {
  std::string_view name, summary;
  bool estimates = false;  // of each batch, from paths
  bool remembers = false;  // goes by what came before
  bool balanced = false;   // whoever draws rows gives every expert as many
};

inline constexpr std::array kPlacements{
    PlacementKind{.name = "static", .summary = "an expert is on one rank and stays there"},
    PlacementKind{.name = "history", .summary = "balanced by the last batches", .remembers = true},
    PlacementKind{.name = "lina", .summary = "by each batch's paths, checked at the gate", .estimates = true},
    PlacementKind{
        .name = "ideal", .summary = "a gate that balances perfectly, to compare with", .balanced = true},
};
std::vector<std::string_view> placement_names();
// Throws UsageError with the nearest name.
const PlacementKind& find_placement(std::string_view name);

struct PlacerOptions {
  // affects speed only; equal on all ranks
  std::string placement = "lina";
  PlacementOptions place;
  int layers = 1;
  int choices = 1;
  std::string check = "load";  // or "sets"
  double tolerance = 0.1;
  int window = 16;  // batches that history looks back to
  int every = 8;    // batches between two of its placements
};
// Throws UsageError of one sentence.
void check(const PlacerOptions& options);

// Whether a plan that was made by `expected` rows of each expert is kept for the real ones.
bool keeps(const ExpertPlacement& plan, std::span<const double> expected, std::span<const double> real,
           const PlacerOptions& options);

// Thread: one at a time; plan() of one layer beside what is asked of others.
class Placer {
 public:
  explicit Placer(const PlacerOptions& options);

  const PlacementKind& kind() const { return *kind_; }
  const PlacerOptions& options() const { return options_; }

  // Phase 1: what all ranks' tokens are expected to choose in this layer. Only where estimates() holds.
  void plan(int layer, std::span<const double> expected);
  // Phase 2: what they chose. Where this layer's experts are from now on.
  const ExpertPlacement& settle(int layer, std::span<const std::int64_t> chosen);
  // The batch is over.
  void batch_end();

  const ExpertPlacement& placement(int layer) const { return of(layer).placement; }
  bool replanned(int layer) const { return of(layer).replanned; }  // by the last settle()
  std::int64_t checks() const { return checks_; }
  std::int64_t replans() const { return replans_; }

 private:
  struct Layer {
    ExpertPlacement placement;
    std::vector<double> expected;  // empty: no plan was made for the batch
    bool replanned = false;
    bool placed = false;                     // of ideal: the plan is made
    std::deque<std::vector<double>> window;  // rows of each expert in the last batches
  };
  Layer& of(int layer) { return layers_[static_cast<std::size_t>(layer)]; }
  const Layer& of(int layer) const { return layers_[static_cast<std::size_t>(layer)]; }

  PlacerOptions options_;
  const PlacementKind* kind_;
  std::vector<Layer> layers_;
  std::int64_t batches_ = 0, checks_ = 0, replans_ = 0;
};

}  // namespace weft
