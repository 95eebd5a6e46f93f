// Serving with experts, without a model: requests one after the other, each a fixed number of tokens on every rank;
// what a rank computes is a timer, what the ranks exchange is real (experts/serving.h, whose walk a real server
// has too). In each layer: a timer for attention and gate, the walk of the layer with a timer in place of
// experts that is as long as their rows, a timer for the merge.
//
// One coroutine over a Comm: in wall time on an engine's thread, in virtual time in the simulator's. A request's
// seconds are those of the slowest rank, planning, planning again and moving weights included. Where all ranks
// have all weights (resident), nothing moves.
//
// All placements that are asked for take turns, request by request, and serve the same tokens.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "experts/placer.h"
#include "experts/popularity.h"
#include "weft/world.h"
#include "workload/drawn_router.h"
#include "workload/outline.h"

namespace weft {

// Of a request's tokens on one rank.
struct ServeTimes {
  struct Layer {
    double dense_seconds = 0;  // everything since the layer of experts before, and the gate
    double row_seconds = 0;    // of an expert
    double merge_seconds = 0;
  };
  std::vector<Layer> layers;
  double last_seconds = 0;  // behind the last layer of experts
};
// Forward of an outline's blocks. What stands behind the last experts (the head) is computed for the last token of
// each sequence only. Throws UsageError: no experts, or not told apart.
ServeTimes serve_times(const Outline& outline, std::int64_t sequence_tokens);

struct ServeOptions {
  // affects results; equal on all ranks
  DrawnRouterOptions router;  // experts and layers as in `times`
  ServeTimes times;
  std::int64_t tokens = 256;  // of a rank, in a request
  std::int64_t width = 256;   // of a row, float32
  std::int64_t requests = 100, warmup = 16;
  std::uint64_t seed = 2;  // of the tokens
  // affects speed only
  std::vector<std::string> placements = {"static", "history", "lina", "ideal"};
  PlacerOptions placer;                       // but its placement
  std::shared_ptr<const Popularity> profile;  // of the router's table
  double expert_seconds = 0;                  // an expert with rows takes so long beside them
  double plan_seconds = 0;                    // a plan takes so long in virtual time
  std::int64_t weight_bytes = 0;              // of an expert: what moves to a rank that lacks it; 0: resident
};
// Throws UsageError of one sentence.
void check(const ServeOptions& options);

// As many tokens as so many batches have, of another seed.
std::shared_ptr<const Popularity> fitted_profile(const DrawnRouter& router, std::uint64_t seed, int batches,
                                                 const PopularityOptions& options);

// Of one placement, on one rank; a number for each measured request.
struct Served {
  std::vector<double> seconds, expert_seconds;  // of the whole, and of counts .. combine
  std::vector<double> load;                     // rows of the busiest rank over the mean, mean of the layers
  std::int64_t checks = 0, replans = 0;         // of plans
  std::uint64_t payload_bytes = 0;              // of rows, of all measured requests
  std::int64_t formula_bytes = 0;  // the same from the plans: rows that leave, on their way out and home
  std::uint64_t moved_bytes = 0;   // of weights
};

// Of each rank and placement. Wall time, ranks as threads over such a link; virtual time.
std::vector<std::vector<Served>> serve_emulated(int ranks, const std::optional<EmulatedLink>& link,
                                                const ServeOptions& options);
std::vector<std::vector<Served>> serve_simulated(int ranks, const EmulatedLink& link,
                                                 const ServeOptions& options);

}  // namespace weft
