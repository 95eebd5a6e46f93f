// Packing of experts (Lina; Li et al., ATC 2023): how many ranks share a layer's experts, chosen while a job
// runs. With packing P a rank holds P times as many experts as at the start, and every expert is on P times
// as many ranks: fewer rows leave a rank, and gradients of experts are summed over more of them.
//
// A decision every few steps, from two times of forward in the steps since the last one, each the mean of a
// rank and the largest over the ranks (so that all ranks decide the same):
//
//   Step 1  double while the experts of a slice take less than (1 - h) of its all-to-all: it cannot be hidden
//           behind them. Halve while they take more than (1 + h) of two of them
//   Step 2  only where it pays. A step costs its all-to-alls and the sums of experts' gradients; what
//           another packing saves over a horizon of steps must be more than the move takes. An all-to-all
//           takes what the network's figures say, or what was measured where that is less; with a packing
//           that has not been tried, by as much less as with that of now. (What was measured above them is
//           other traffic, and peers that are late: fewer rows do not save it.) What was measured is kept,
//           so that a packing that was left is not gone back to while times stay what they are
//   Step 3  only where a rank has the memory
//
// Where it pays: two nodes, experts dealt to all their ranks, doubled so that none is on another node. 2 k
// cf T d values less a rank leave a node in four all-to-alls, 16 d^2 more for sums: above T = 8 d / (k cf)
// tokens a rank.
//
// Thread: one at a time. Nothing here communicates.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "weft/comm.h"

namespace weft {

struct PackingOptions {
  double hysteresis = 0.1;
  std::int64_t first_step = 10, every = 4;  // of decisions: behind so many steps, then every so many
  double horizon = 200;                     // steps over which a move must pay
  std::int64_t memory = 0;                  // bytes a rank has for experts; 0: as many as it needs
  bool costs = true;                        // Step 2; false: to compare with
};

// Of a slice of tokens in forward, seconds; agreed.
struct PackingTimes {
  double experts = 0, all_to_all = 0;
};

// A packing that may be, as it is predicted.
struct PackingChoice {
  int packing = 1;
  double all_to_all = 0;   // seconds of a slice's
  double sums = 0;         // seconds of a step's sums of experts' gradients
  double move = 0;         // seconds from the one before it in the list, and back
  std::int64_t bytes = 0;  // that experts take of a rank's memory
};

// Step 1 alone.
int wished_packing(int packing, const PackingTimes& times, double hysteresis);

class PackingController {
 public:
  // `choices`: 1, 2, 4 ..., of which `now` is one. `all_to_alls`: of slices, in a step, forward and backward.
  // Throws UsageError for a packing of now that takes more memory than there is.
  PackingController(PackingOptions options, std::vector<PackingChoice> choices, double all_to_alls,
                    int now = 1);

  // Whether so many steps of the job are the end of a window.
  bool due(std::int64_t steps) const;
  struct Decision {
    int packing = 1;
    std::string why;     // a clause
    bool tells = false;  // it is worth a line: another packing, or one that was refused for the first time
  };
  Decision decide(const PackingTimes& times);
  int packing() const { return choices_[at_].packing; }
  const std::vector<PackingChoice>& choices() const { return choices_; }

 private:
  double all_to_all_at(std::size_t choice) const;
  double cost_of(std::size_t choice) const;

  PackingOptions options_;
  std::vector<PackingChoice> choices_;
  double all_to_alls_;
  std::size_t at_ = 0;
  std::vector<double> measured_;  // seconds of a slice's all-to-all with each packing; negative: not yet
  bool refused_ = false;          // was said
};

// The network as packing sees it: ranks of a node share its port to others, expert groups are neighbours.
struct PackingNetwork {
  LinkCost link;           // of a port to other nodes
  LinkCost scale_up;       // of a rank's port inside a node
  int ranks_per_node = 1;  // 1: every rank is a node
};
// What a byte costs that each rank of a group sends to its other members, as many to each: of `size` ranks
// that are `stride` apart, where all groups do so at the same time. Its hop_seconds are those of one hop.
LinkCost cost_of_group(const PackingNetwork& network, int size, int stride);
// Seconds in which every rank of such groups, neighbours, sends `bytes` in equal parts to all members, itself
// included.
double all_to_all_seconds(const PackingNetwork& network, int size, double bytes);

// "auto", or a number that divides the ranks that share experts. Throws UsageError of one sentence: no
// number, one that does not divide, more than there are ranks to share.
bool is_auto_packing(const std::string& text);
int packing_number(const std::string& text);  // of one that is not auto
int fixed_packing(const std::string& text, int ranks);

}  // namespace weft
