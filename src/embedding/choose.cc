#include "embedding/choose.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "collectives/registry.h"
#include "weft/error.h"

namespace weft {

namespace {

constexpr double kSplitBelow = 0.8;

[[noreturn]] void refuse(const std::string& what) { throw UsageError("choice of a table's way: " + what); }

void check(const TableFigures& f) {
  if (f.rows < 1 || f.columns < 1 || f.size < 1 || f.value_bytes < 1) refuse("no table, or no ranks");
  if (!(f.tokens >= 0 && std::isfinite(f.tokens))) refuse("a number of tokens that cannot be");
  if (!(f.unique_ratio >= 0 && f.unique_ratio <= 1)) refuse("unique_ratio must be 0 to 1");
  if (!(f.prior_share >= 0 && f.prior_share <= 1)) refuse("prior_share must be 0 to 1");
  if (!(f.shared_rows >= 0 && f.shared_rows <= f.unique_rows())) refuse("more shared rows than rows");
}

std::string text(const char* form, double value) {
  char out[32];
  std::snprintf(out, sizeof out, form, value);
  return out;
}
std::string seconds_in_words(double seconds) {
  return seconds < 1 ? text("%.3g ms", seconds * 1e3) : text("%.3g s", seconds);
}

double reduce_seconds(const TableFigures& f, double elements, const LinkCost& link) {
  const Shape shape{.size = f.size,
                    .count = std::llround(elements),
                    .element_bytes = static_cast<std::size_t>(f.value_bytes),
                    .node_size = link.node_size(f.size)};
  if (f.size == 1 || shape.count == 0) return 0;
  return choose(Family::all_reduce, shape, link).seconds(shape, link);
}

// Why, of the one that was taken: what its cost hangs on.
std::string reason(std::string_view way, const TableFigures& f) {
  if (f.size == 1) return "one rank has all of it";
  const double share = f.unique_rows() / static_cast<double>(f.rows);
  const std::string touched = text("%.3g", 100 * share) + " % of its rows";
  if (way == "dense")
    return "a rank reads " + touched + ", so sending all of it takes no longer than sending rows";
  if (way == "allgather") return "a rank reads " + touched + ", and few ranks hear of them";
  if (way == "hashed")
    return "a rank reads " + touched + ", and " + std::to_string(f.columns) +
           " columns do not cut evenly over " + std::to_string(f.size) + " ranks";
  if (way == "parallax") return "a rank reads " + touched + ", and few servers take few messages";
  return "a rank reads " + touched + ", which travel by columns, the table does not";
}

}  // namespace

std::vector<TableCost> table_costs(const TableFigures& f, const LinkCost& link) {
  check(f);
  const double others = f.size - 1, rows = f.unique_rows();
  const double row_seconds = static_cast<double>(f.columns * f.value_bytes) * link.seconds_per_byte;
  const double hops = others * link.hop_seconds;
  const double ids = hops + 4 * rows * others * link.seconds_per_byte;
  const double shared = f.size > 2 ? f.shared_rows : 0;
  const int servers = (f.size + 3) / 4;
  const std::int64_t widest = (f.columns + f.size - 1) / f.size;
  const double by_servers = hops + others * rows * row_seconds / servers;
  const double hashed = hops + others * rows * row_seconds / f.size;
  const double columns =
      hops + others * rows * static_cast<double>(widest * f.value_bytes) * link.seconds_per_byte;
  const double gathered = hops + others * (rows - shared) * row_seconds +
                          reduce_seconds(f, shared * static_cast<double>(f.columns), link);
  const double table = static_cast<double>(f.rows) * static_cast<double>(f.columns);
  return {{"embrace", ids + 2 * columns},
          {"hashed", ids + 2 * hashed},
          {"parallax", ids + 2 * by_servers},
          {"allgather", ids + gathered},
          {"dense", reduce_seconds(f, table, link)}};
}

TableChoice choose_table_way(const TableFigures& f, const LinkCost& link,
                             std::span<const std::string_view> ways) {
  std::vector<TableCost> costs = table_costs(f, link);
  for (const std::string_view way : ways) {
    if (std::ranges::find(costs, way, &TableCost::way) == costs.end())
      refuse("'" + std::string(way) + "' is none that has a cost");
  }
  if (!ways.empty())
    std::erase_if(costs, [&](const TableCost& c) { return std::ranges::find(ways, c.way) == ways.end(); });
  // Formulas that are equal on paper differ in the last bits: that must not decide.
  const auto least = std::ranges::min(costs, {}, &TableCost::seconds).seconds;
  const auto found =
      std::ranges::find_if(costs, [&](const TableCost& c) { return c.seconds <= least * (1 + 1e-9); });
  std::rotate(costs.begin(), found, found + 1);
  // The others by their seconds, equals as they stand.
  const auto faster = [](const TableCost& a, const TableCost& b) { return a.seconds < b.seconds; };
  for (auto next = costs.begin() + 1; next != costs.end(); ++next)
    std::rotate(std::upper_bound(costs.begin() + 1, next, *next, faster), next, next + 1);
  TableChoice out;
  out.way = costs[0].way;
  out.costs = costs;
  out.why = reason(out.way, f) + ": " + seconds_in_words(costs[0].seconds) + " a step by cost";
  if (costs.size() > 1)
    out.why += ", " + std::string(costs[1].way) + " " + seconds_in_words(costs[1].seconds);
  out.splits = out.way == "embrace" && f.prior_share <= kSplitBelow;
  if (out.way == "embrace" && !out.splits) {
    out.why += "; " + text("%.0f", 100 * f.prior_share) +
               " % of its rows are read again at once, so none are delayed";
  }
  return out;
}

}  // namespace weft
