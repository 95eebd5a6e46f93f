#include "experts/route.h"

#include <cmath>
#include <numeric>
#include <string>

#include "patterns/blocks.h"
#include "weft/error.h"

namespace weft {

namespace {

[[noreturn]] void refuse(const std::string& what) { throw UsageError("experts: " + what); }

constexpr double kMostCapacity = 1e6;  // factor: far more places than anybody has tokens

}  // namespace

void check(const RouteOptions& o) {
  if (o.experts < 1) refuse("there is at least one, not " + std::to_string(o.experts));
  if (o.choices < 1 || o.choices > o.experts)
    refuse("a token has 1 to " + std::to_string(o.experts) + " choices, as many as there are experts, not " +
           std::to_string(o.choices));
  if (!(o.capacity_factor >= 0 && o.capacity_factor <= kMostCapacity))
    refuse("a capacity factor is positive, or 0 where nothing is dropped");
  if (o.slices < 1) refuse("tokens travel in at least one slice, not " + std::to_string(o.slices));
}

std::int64_t capacity_of(const RouteOptions& o, std::int64_t tokens) {
  return static_cast<std::int64_t>(
      std::ceil(o.choices * o.capacity_factor * static_cast<double>(tokens) / o.experts));
}

std::vector<std::int64_t> rows_of_slices(std::int64_t places, int slices) {
  const Blocks blocks(slices, places);
  std::vector<std::int64_t> out;
  out.reserve(static_cast<std::size_t>(slices));
  for (int s = 0; s < slices; ++s) out.push_back(blocks.count(s));
  return out;
}

Route route(std::span<const std::int64_t> experts, const RouteOptions& o) {
  const auto num_experts = static_cast<std::size_t>(o.experts), slices = static_cast<std::size_t>(o.slices);
  const auto choices = static_cast<std::size_t>(o.choices);
  const std::size_t tokens = experts.size() / choices;
  Route out;
  out.chosen.assign(num_experts, 0);
  std::vector<std::int64_t> place(experts.size());  // of each copy, with its expert
  for (std::size_t choice = 0; choice < choices; ++choice) {
    for (std::size_t t = 0; t < tokens; ++t) {
      const std::int64_t expert = experts[t * choices + choice];
      if (expert < 0 || expert >= o.experts)
        refuse("token " + std::to_string(t) + " chose expert " + std::to_string(expert) + " of " +
               std::to_string(o.experts));
      place[t * choices + choice] = out.chosen[static_cast<std::size_t>(expert)]++;
    }
  }
  const bool capped = o.capacity_factor > 0;
  const std::int64_t capacity = capped ? capacity_of(o, static_cast<std::int64_t>(tokens)) : 0;
  // Where the rows of a slice and expert begin, among those of all slices.
  std::vector<std::int64_t> first(slices * num_experts);
  out.counts.resize(slices * num_experts);
  for (std::size_t e = 0; e < num_experts; ++e) {
    const std::vector<std::int64_t> rows = rows_of_slices(capped ? capacity : out.chosen[e], o.slices);
    for (std::size_t s = 0; s < slices; ++s) out.counts[s * num_experts + e] = rows[s];
  }
  std::exclusive_scan(out.counts.begin(), out.counts.end(), first.begin(), std::int64_t{0});
  const std::int64_t num_rows = std::reduce(out.counts.begin(), out.counts.end());
  out.token_of_row.assign(static_cast<std::size_t>(num_rows), -1);
  out.row_of_copy.assign(experts.size(), -1);
  for (std::size_t copy = 0; copy < experts.size(); ++copy) {
    const auto expert = static_cast<std::size_t>(experts[copy]);
    const std::int64_t places = capped ? capacity : out.chosen[expert];
    if (place[copy] >= places) {
      ++out.num_dropped;
      continue;
    }
    const Blocks blocks(o.slices, places);
    int slice = 0;
    while (blocks.begin(slice + 1) <= place[copy]) ++slice;
    const std::int64_t row =
        first[static_cast<std::size_t>(slice) * num_experts + expert] + place[copy] - blocks.begin(slice);
    out.row_of_copy[copy] = row;
    out.token_of_row[static_cast<std::size_t>(row)] = static_cast<std::int64_t>(copy / choices);
  }
  return out;
}

std::vector<std::int64_t> by_expert(std::span<const std::int64_t> counts, std::int64_t experts) {
  std::vector<std::int64_t> first(counts.size());
  std::exclusive_scan(counts.begin(), counts.end(), first.begin(), std::int64_t{0});
  std::vector<std::int64_t> out;
  out.reserve(static_cast<std::size_t>(std::reduce(counts.begin(), counts.end())));
  const auto columns = static_cast<std::size_t>(experts);
  for (std::size_t e = 0; e < columns; ++e) {
    for (std::size_t at = e; at < counts.size(); at += columns) {
      for (std::int64_t i = 0; i < counts[at]; ++i) out.push_back(first[at] + i);
    }
  }
  return out;
}

}  // namespace weft
