// Where the experts of a layer are while a model serves: popular ones on several ranks, rare ones together on
// one, so that all ranks have as much to do.
//
//   Step 1  an expert that gets n_e of the ranks' mean load (n_e sums to the number of ranks) gets floor(n_e)
//           ranks of its own, its home (expert mod ranks) first
//   Step 2  what is left of each is fitted into the other ranks, largest first, into the first that has room for
//           it (first-fit decreasing); where none has, to the one with the least to do. Every expert is
//           somewhere, also one that expects no rows
//   Step 3  water-filling: one more replica of the expert that has most rows a replica, again and again, all of
//           them dealt to the ranks anew, the heaviest first, each to the rank that has least to do
//
// What gives the busiest rank least to do is taken. A rank has `most` experts at most.
//
// An expert's rows are dealt to its replicas evenly, the remainder to the lowest ranks. All of it is a function
// of the numbers that it is given: ranks that have the same ones compute the same plan, and nobody is asked.
//
// Li et al., USENIX ATC 2023 (phase 1 packs; whole devices, home ranks and step 3 are ours).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace weft {

struct PlacementOptions {
  // affects speed only; equal on all ranks
  int ranks = 1;
  int experts = 1;
  int most = 4;            // experts of a rank
  double expert_rows = 0;  // one more expert with rows takes a rank as long as so many rows
  double remote_rows = 0;  // a row that comes from another rank takes it so much longer than one of its own
};
// Throws UsageError of one sentence: more experts than places.
void check(const PlacementOptions& options);

struct ExpertPlacement {
  std::vector<std::vector<int>> replicas;  // of each expert: its ranks, in order

  friend bool operator==(const ExpertPlacement&, const ExpertPlacement&) = default;
};

// Expert e is on rank e mod ranks, and nowhere else.
ExpertPlacement static_placement(const PlacementOptions& options);
// `rows`: how many each expert gets, or is expected to get; of all ranks. Never one whose busiest rank has more to
// do with these rows than in static_placement().
ExpertPlacement plan_placement(std::span<const double> rows, const PlacementOptions& options);

// Rows on the busiest rank; what its experts and others' rows take beside them, in rows too. Of its own rows a
// rank that has a replica gets as many as all others have, on the mean.
double max_load(const ExpertPlacement& placement, std::span<const double> rows,
                const PlacementOptions& options);

// Of an expert's rows, those of each replica.
std::vector<std::int64_t> quotas(std::int64_t rows, std::size_t replicas);

// Rows of [(source * ranks + destination) * experts + expert], from those of [source * experts + expert]: a source
// that has a replica keeps its own as far as the replica's quota goes; the others go, in order of sources, to
// the lowest rank that has room.
std::vector<std::int64_t> deal_rows(const ExpertPlacement& placement, std::span<const std::int64_t> counts,
                                    const PlacementOptions& options);

}  // namespace weft
