// Plan rows: what happens to each tensor, as data. Strategies write them, ranks compare them, `weft plan`
// prints them.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "step/move.h"
#include "weft/comm.h"
#include "weft/engine.h"
#include "weft/traffic.h"

namespace weft {

struct PlanRow {
  std::string tensor;       // its name, or those that travel together: "a and 3 more"
  std::int64_t count = 0;   // elements of all of them
  std::string strategy;     // whose row it is
  std::uint64_t group = 0;  // whose ranks exchange it: id and size
  int ranks = 1;
  double divisor = 1;  // of the sum
  std::string scheme;
  std::string codec;  // of entries, or bf16; empty: every element is sent, or factors
  TrafficClass traffic = TrafficClass::gradient;
  std::uint32_t slot = 0;
  double bytes = 0;    // payload of the busiest rank in a step, by formula
  double seconds = 0;  // of the exchange alone, by the link's figures
  std::string why;
};

// Of everything in the rows, of the exchanges, and of `options`: whatever else affects results.
std::uint64_t hash_of(std::span<const PlanRow> rows, std::span<const Exchange> exchanges,
                      std::span<const std::uint64_t> options);
inline std::uint64_t hash_part(double value) { return std::bit_cast<std::uint64_t>(value); }

// Compares `hash` between the ranks of a group. The ticket fails with a mismatch that names a rank where
// they differ; `what`: "plan of buckets (names, lengths or options)". `wishes` (none: nothing) has this
// rank's, and all ranks' when the ticket is done: what they need not agree on, but all must know.
using Wishes = std::shared_ptr<std::vector<std::int64_t>>;
Ticket compare_plans(Engine& engine, const Comm& group, const SubmitOptions& submit, std::uint64_t hash,
                     std::string what, std::int64_t wish = 0, const Wishes& wishes = nullptr);

}  // namespace weft
